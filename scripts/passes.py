"""Lists the files of this program that a datum passes through, in the order of first entry.

    python scripts/passes.py step     a step of DDP with `Dct(precision="levels")`, on two ranks
    python scripts/passes.py criteo   a row of Criteo's text, from the file to prepared rows
    python scripts/passes.py csv      a row of a CSV file, from the file to prepared rows

Compiled kernels cannot be traced: those count to which an entered function refers, directly or
through others. Files entered only by an import do not count; for rows only those of data/ and
kernels/ do, as a command enters more that no row passes through.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from types import CodeType, FrameType, ModuleType
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import dlrm_hybrid
from dlrm_hybrid.compress import Dct, ddp_hook

PACKAGE = Path(dlrm_hybrid.__file__).parent
ROWS = 300


def files_of(call: Callable[[], object]) -> list[str]:
    """Files of the package in which this call runs functions, in the order of first entry."""
    passed: dict[str, None] = {}
    seen: set[CodeType] = set()

    def enter(frame: FrameType, event: str, _: object) -> None:
        code = frame.f_code
        inside = code.co_filename.startswith(str(PACKAGE))
        if event == "call" and inside and code.co_name != "<module>":
            visit(code, frame.f_globals)

    def visit(code: CodeType, names: Mapping[str, Any]) -> None:
        if code in seen:
            return
        seen.add(code)
        passed.setdefault(code.co_filename)
        values = [names.get(name) for name in code.co_names]
        modules = [value for value in values if isinstance(value, ModuleType)]
        values += [getattr(module, name, None) for module in modules for name in code.co_names]
        for kernel in values:
            if (function := getattr(kernel, "py_func", None)) is not None:
                visit(function.__code__, function.__globals__)

    threading.setprofile(enter)
    sys.setprofile(enter)
    try:
        call()
    finally:
        sys.setprofile(None)
        threading.setprofile(None)  # pyright: ignore[reportArgumentType]  # None is what ends it
    return [str(Path(name).relative_to(PACKAGE)) for name in passed]


def step() -> list[str]:
    """Of a step that exchanges gradients as levels; the steps before it have made thresholds."""
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(_rank, (folder,), nprocs=2)  # pyright: ignore[reportUnknownMemberType, reportPrivateImportUsage]
        return (Path(folder) / "files").read_text(encoding="utf-8").split("\n")


def _rank(rank: int, folder: str) -> None:
    store = f"file://{folder}/store"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=2)
    torch.manual_seed(0)
    ddp = DistributedDataParallel(nn.Linear(24, 8))
    state = Dct(density=0.1, precision="levels").ddp_state(ddp)
    ddp.register_comm_hook(state, ddp_hook)

    def backward() -> None:
        ddp(torch.randn(4, 24)).square().mean().backward()

    for _ in range(5):
        backward()
    files = files_of(backward)
    if rank == 0:
        (Path(folder) / "files").write_text("\n".join(files), encoding="utf-8")
    dist.destroy_process_group()


def criteo() -> list[str]:
    """Of rows of Criteo's text, prepared."""
    numbers, texts = ["3"] * 13, ["0a1b2c3d"] * 26
    line = "\t".join(["1", *numbers, *texts])
    return _prepared("train.txt", [line] * ROWS, "data=criteo_kaggle")


def csv() -> list[str]:
    """Of rows of a CSV file with a number and a category, prepared."""
    schema = "label: click\ndense: [{name: price}]\ncategorical: [{name: shop}]\n"
    schema += "split: {by: fraction, test: 0.2}\n"
    lines = ["click,price,shop", *(f"{row % 2},{row}.5,shop {row % 7}" for row in range(ROWS))]
    return _prepared("rows.csv", lines, "data=table", schema)


def _prepared(name: str, lines: list[str], *overrides: str) -> list[str]:
    from dlrm_hybrid.cli.main import run

    with tempfile.TemporaryDirectory() as folder:
        raw = Path(folder) / name
        raw.write_text("\n".join(lines) + "\n", encoding="utf-8")
        own = [f"data.raw={raw}", f"data.prepared={folder}/prepared"]
        if len(overrides) == 2:
            (Path(folder) / "schema.yaml").write_text(overrides[1], encoding="utf-8")
            own.append(f"data.schema={folder}/schema.yaml")
        argv = ["dlrm_hybrid", "prepare", overrides[0], *own]
        codes: list[int] = []
        files = files_of(lambda: codes.append(run(argv)))
        if codes != [0]:
            sys.exit(f"prepare ended with {codes}")
        return [file for file in files if file.startswith(("data/", "kernels/"))]


def main() -> None:
    """Print the files, and how many they are."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    names = {"step": step, "criteo": criteo, "csv": csv}
    parser.add_argument("datum", choices=names)
    files = names[parser.parse_args().datum]()
    print(*files, f"{len(files)} files", sep="\n")


if __name__ == "__main__":
    main()
