"""What checkpoints hold, put together from their files as the manifest says; without the package.

Of bfloat16 numpy knows nothing: nothing here is saved as that.
"""

import json
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file


def saved_groups(folder: Path) -> dict[str, dict[str, np.ndarray]]:
    """Whole tensors of a checkpoint by group and name; every element comes from one file."""
    manifest = json.loads((folder / "manifest.json").read_text())
    files = {name: load_file(folder / name) for name in manifest["files"]}
    groups: dict[str, dict[str, np.ndarray]] = {}
    for name, told in manifest["tensors"].items():
        tensors = groups.setdefault(told["group"], {})
        for part in told["parts"]:
            is_full = part["shape"] == told["shape"]
            key = name if is_full else f"{name}@{'x'.join(map(str, part['begin']))}"
            found = files[part["file"]].pop(key)
            assert list(found.shape) == part["shape"]
            whole = tensors.setdefault(name, np.zeros(told["shape"], found.dtype))
            corner = zip(part["begin"], part["shape"], strict=True)
            box = [slice(begin, begin + length) for begin, length in corner]
            if (every := part.get("every", 1)) > 1:
                box[0] = slice(part["begin"][0], None, every)
            whole[tuple(box)] = found
    assert not any(files.values()), "in no list of parts"
    return groups


def saved_tensors(run_folder: Path, step: int) -> dict[str, np.ndarray]:
    """Weights, and what optimizers remember, of one checkpoint of a run."""
    groups = saved_groups(run_folder / "checkpoints" / f"step_{step:08d}")
    return {**groups["dense"], **groups["embeddings"]}
