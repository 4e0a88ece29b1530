"""Compares runs of several processes with the same in one process: equal bits, bytes, CPU time.

    python scripts/studies/worlds.py FOLDER...

Takes pairs of runs that differ only in parallel.world, and compares their last checkpoints.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from frame import cpu_microseconds, frame, method_of, sent_per_sample, study
from numpy.typing import NDArray
from safetensors.numpy import load_file  # pyright: ignore[reportUnknownVariableType]

from dlrm_hybrid.checkpoint.folder import find, key_of, read
from dlrm_hybrid.disk import plain_file
from dlrm_hybrid.report.measures import digits
from dlrm_hybrid.report.runs import Run
from dlrm_hybrid.report.table import Table
from dlrm_hybrid.types import ConfigError

ALONE, PROCESSES = "in_process", "processes"
COLUMNS = (
    *("method", "seed", "test log-loss", "tensors in the checkpoint", "push B/sample"),
    *("pull B/sample", "CPU µs/sample in one process", "in processes", "ratio"),
)


def pairs_of(runs: Sequence[Run]) -> list[tuple[Run, Run]]:
    """Complete runs that differ in `parallel.world` alone, that of one process first.

    Raises:
        ConfigError: a run has no counterpart, or several.
    """
    complete = frame(runs)
    pairs: list[tuple[Run, Run]] = []
    for (method, *_), group in complete.groupby(["method", "sparsity", "seed"], observed=True):
        found: dict[str, Run] = {}
        for row in group.itertuples():
            run = runs[int(row.run)]
            if found.setdefault(row.world, run) is not run:
                raise ConfigError(
                    f"{run.folder}: another run is {method} with parallel.world={row.world}"
                )
        for world, other in ((ALONE, PROCESSES), (PROCESSES, ALONE)):
            if world not in found:
                raise ConfigError(f"{found[other].folder}: no such run with parallel.world={world}")
        pairs.append((found[ALONE], found[PROCESSES]))
    return pairs


def table(found: Sequence[tuple[Run, Run]]) -> Table:
    """A row for each pair; what should be one value and is not is told twice."""
    return Table(COLUMNS, tuple(_row(one, other) for one, other in found))


def differing(one: Path, other: Path) -> tuple[list[str], int]:
    """Names of tensors of which two runs' last checkpoints hold other bits, and how many there are.

    Raises:
        DataError: a run has no checkpoint.
    """
    first, second = _tensors(find(one)), _tensors(find(other))
    names = first.keys() | second.keys()
    unlike = [
        name
        for name in sorted(names)
        if name not in first
        or name not in second
        or first[name].tobytes() != second[name].tobytes()
    ]
    return unlike, len(names)


def _row(one: Run, other: Run) -> tuple[str, ...]:
    unlike, num_tensors = differing(one.folder, other.folder)
    costs = [cpu_microseconds(run) for run in (one, other)]
    return (
        method_of(one.config),
        str(one.config["train"]["seed"]),
        _both(*(f"{run.summary['test']['loss']:.17g}" for run in (one, other))),
        f"{len(unlike)} of {num_tensors} differ" if unlike else f"all {num_tensors} equal",
        _both(*(digits(sent_per_sample(run)["gradient_push"]) for run in (one, other))),
        _both(*(digits(sent_per_sample(run)["parameter_pull"]) for run in (one, other))),
        *(digits(cost) for cost in costs),
        f"{costs[1] / costs[0]:.2f}",
    )


def _both(one: str, other: str) -> str:
    return one if one == other else f"{one}, {other}"


def _tensors(folder: Path) -> Mapping[str, NDArray[Any]]:
    """Of a checkpoint, by group and name, put together from the parts that ranks have written."""
    manifest = read(folder)
    files = {file: load_file(plain_file(folder, file)) for file in manifest.files}
    tensors: dict[str, NDArray[Any]] = {}
    for name, told in manifest.tensors.items():
        pieces = [
            (part, files[part.file][key_of(name, part.begin, part.shape == told.shape)])
            for part in told.parts
        ]
        whole = np.empty(told.shape, pieces[0][1].dtype)
        for part, piece in pieces:
            corner = zip(part.begin, part.shape, strict=True)
            box = [slice(begin, begin + length) for begin, length in corner]
            if part.every > 1:
                box[0] = slice(part.begin[0], None, part.every)
            whole[tuple(box)] = piece
        tensors[f"{told.group} {name}"] = whole
    return tensors


def main() -> None:
    """Print the table."""
    study(__doc__, pairs_of, table)


if __name__ == "__main__":
    main()
