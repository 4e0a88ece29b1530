"""What tests of worlds read from run folders, and plain runs to hold them against."""

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
from saved_tensors import saved_groups, saved_tensors

from dlrm_hybrid.telemetry import events
from dlrm_hybrid.telemetry.events import Kind

Train = Callable[..., tuple[int, Path]]
Trained = Callable[..., Path]


def checkpoint(folder: Path, step: int) -> Path:
    return folder / "checkpoints" / f"step_{step:08d}"


def tensors(folder: Path, step: int) -> dict[str, np.ndarray]:
    """The weights of one checkpoint, and what optimizers remember, by name."""
    return saved_tensors(folder, step)


def summary(folder: Path) -> dict:
    return json.loads((folder / "summary.json").read_text())


def pids(folder: Path) -> dict[str, int]:
    """Process ids of a run's ranks by role."""
    return {path.stem: int(path.read_text()) for path in (folder / "log").glob("*.pid")}


def assert_same(one: Path, other: Path, step: int) -> None:
    """Every tensor of two checkpoints has the same bytes."""
    first, second = tensors(one, step), tensors(other, step)
    assert first.keys() == second.keys()
    for name, tensor in first.items():
        assert tensor.tobytes() == second[name].tobytes(), name


def assert_same_state(one: Path, other: Path, step: int) -> None:
    """Two checkpoints hold the same: weights, versions of them, and what compressors remember."""
    first, second = (saved_groups(checkpoint(folder, step)) for folder in (one, other))
    assert first.keys() == second.keys()
    for group, held in first.items():
        assert held.keys() == second[group].keys()
        for name, tensor in held.items():
            assert tensor.tobytes() == second[group][name].tobytes(), name


def curve(folder: Path) -> list[tuple[int, dict]]:
    """What a run recorded of its learning and compressing, by step; no times."""
    wanted = {
        Kind.PROGRESS: ("samples", "rows", "loss", "accuracy", "lr"),
        Kind.COMPRESSION: ("of",),
    }
    return [
        (event.step, {name: event.values[name] for name in wanted[event.kind]})
        for event in events.read(folder / "events.jsonl")
        if event.kind in wanted
    ]


def largest_difference(
    one: dict[str, np.ndarray], other: dict[str, np.ndarray], prefix: str
) -> float:
    """Between elements of the tensors whose names begin with `prefix`."""
    assert one.keys() == other.keys()
    chosen = [name for name in one if name.startswith(prefix)]
    assert chosen
    return max(float(np.abs(one[name] - other[name]).max()) for name in chosen)


def assert_moved(folder: Path, before: int, after: int) -> None:
    """Something of each part of the model has moved by 1e-3 between two checkpoints."""
    first, last = tensors(folder, before), tensors(folder, after)
    for prefix in ("bottom", "top", "embedding"):
        assert largest_difference(first, last, prefix) >= 1e-3, prefix


class PlainRuns:
    """Runs of one process, each made once."""

    def __init__(self, overrides: list[str], folder: Path) -> None:
        self._overrides = overrides
        self._folder = folder
        self._made: dict[tuple[str, ...], Path] = {}

    def __call__(self, *options: str) -> Path:
        """The run folder of plain training with these options."""
        from dlrm_hybrid.cli.main import run

        if options not in self._made:
            folder = self._folder / f"plain-{len(self._made)}"
            argv = ["dlrm_hybrid", "train", *self._overrides, f"hydra.run.dir={folder}", *options]
            assert run(argv) == 0
            self._made[options] = folder
        return self._made[options]
