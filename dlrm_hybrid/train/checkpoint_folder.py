"""Where checkpoints lie and what they say about themselves; free of torch, for the supervisor.

checkpoints/step_00001024/dense.safetensors …    one file per group of tensors
checkpoints/step_00001024/manifest.json          step, sizes, checksums, facts; written last
checkpoints/latest                               the name of the newest complete folder
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from dlrm_hybrid.types import DataError

FORMAT = 1
MANIFEST_FILE = "manifest.json"
LATEST_FILE = "latest"
CHECKPOINTS = "checkpoints"


def has_latest(run_folder: Path) -> bool:
    """Whether a run has saved anything yet."""
    return (run_folder / CHECKPOINTS / LATEST_FILE).is_file()


def find(path: Path) -> Path:
    """The checkpoint folder that `path` means: itself, or the latest of a run folder.

    Raises:
        DataError: there is none; the message lists the ones that exist.
    """
    if (path / MANIFEST_FILE).is_file():
        return path
    root = path if (path / LATEST_FILE).is_file() else path / CHECKPOINTS
    try:
        return root / (root / LATEST_FILE).read_text(encoding="ascii").strip()
    except (OSError, ValueError):
        found = sorted(str(manifest.parent) for manifest in path.glob(f"**/{MANIFEST_FILE}"))
        hint = f"; there are {', '.join(found)}" if found else ""
        raise DataError(f"{path}: no checkpoint here (no {LATEST_FILE}){hint}") from None


def saved_step(path: Path | None) -> int:
    """The step after which a run goes on from this run folder or checkpoint; 0 without one.

    Raises:
        DataError: as `find` and `read_facts`.
    """
    return 0 if path is None else read_facts(find(path))["step"]


def read_facts(folder: Path) -> dict[str, Any]:
    """The manifest of a checkpoint: `step`, `files` and the facts given to `save`.

    Raises:
        DataError: it is missing or not one of ours.
    """
    path = folder / MANIFEST_FILE
    try:
        manifest: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        if manifest["format"] != FORMAT:
            raise DataError(f"{path}: format {manifest['format']}, expected {FORMAT}")
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DataError(f"{path}: not a checkpoint: {error!r}") from error
    return manifest
