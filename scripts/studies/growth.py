"""Shows bytes per sample over the number of trainers, of worlds in one process.

    python scripts/studies/growth.py RUNS...

Runs are grouped by their name. Worlds in one process share their tables and count no embedding
traffic: it is taken from a run of processes with the same batch size and `embedding`, which must be
among them; of several, from the one with the nearest number of trainers. Each of T trainers holds
1 / T of the tables, so (T - 1) / T of its lookups are sent. The first name is the baseline.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from frame import sent_per_sample, study

from dlrm_hybrid.report.runs import Run
from dlrm_hybrid.report.table import MISSING, Table
from dlrm_hybrid.telemetry.summary import COMPLETE
from dlrm_hybrid.types import ConfigError

CLASSES = {
    "gradient push": ("gradient_push",),
    "parameter pull": ("parameter_pull",),
    "activations, both ways": ("activation", "activation_gradient"),
    "embedding": ("embedding",),
}
ALL = "all"

Sent = Mapping[str, float]
"""Bytes per sample by the names of CLASSES, and of all."""


def sent_by_world(runs: Sequence[Run]) -> dict[str, dict[int, Sent]]:
    """By name and number of trainers, of the complete runs in one process.

    Raises:
        ConfigError: there is none, or no run of processes says what its embeddings would send.
    """
    found: dict[str, dict[int, Sent]] = {}
    complete = [run for run in runs if run.status == COMPLETE]
    for run in complete:
        if run.config["parallel"]["world"] == "in_process":
            worlds = found.setdefault(run.config["name"], {})
            worlds[run.config["parallel"].get("trainers", 1)] = _sent(
                run, _embedding(run, complete)
            )
    if not found:
        raise ConfigError("none of these runs is a world in one process")
    return found


def table(found: Mapping[str, Mapping[int, Sent]]) -> Table:
    """A row for each name and class; under it all, and how many times less than the first name."""
    trainers = sorted({number for worlds in found.values() for number in worlds})
    first = found[next(iter(found))]
    rows: list[tuple[str, ...]] = []
    for name, worlds in found.items():
        for what in (*CLASSES, ALL):
            cells = [
                f"{worlds[number][what]:,.1f}" if number in worlds else MISSING
                for number in trainers
            ]
            rows.append((name, what, *cells))
        if worlds is not first:
            times = [
                f"{first[number][ALL] / worlds[number][ALL]:.1f}"
                if number in worlds and number in first
                else MISSING
                for number in trainers
            ]
            rows.append((name, "times less", *times))
    columns = ("bytes per sample", "", *(f"T = {one}" for one in trainers))
    return Table(columns, tuple(rows), "llr")


def _sent(run: Run, embedding: float) -> Sent:
    per_sample = sent_per_sample(run) | {"embedding": embedding}
    sent = {
        name: sum(per_sample.get(one, 0.0) for one in classes) for name, classes in CLASSES.items()
    }
    return {**sent, ALL: sum(sent.values())}


def _embedding(run: Run, runs: Sequence[Run]) -> float:
    """Of as many trainers as `run` has, from the run of processes that has most nearly as many."""
    own = _trainers(run)
    counted = [
        other
        for other in runs
        if other.config["parallel"]["world"] == "processes"
        and _trainers(other) > 1
        and _tables(other) == _tables(run)
    ]
    if not counted:
        raise ConfigError(
            f"{run.folder}: in one process no embedding traffic is counted; give a run of "
            "processes with the same train.batch_size and embedding, too"
        )
    nearest = min(counted, key=lambda other: abs(_trainers(other) - own))
    travels = 1 - 1 / _trainers(nearest)
    return sent_per_sample(nearest)["embedding"] / travels * (1 - 1 / own)


def _trainers(run: Run) -> int:
    return run.config["parallel"].get("trainers", 1)


def _tables(run: Run) -> Any:
    """What embedding traffic depends on, but for the number of trainers."""
    return run.config["train"]["batch_size"], run.config["embedding"]


def main() -> None:
    """Print the table."""
    study(__doc__, sent_by_world, table)


if __name__ == "__main__":
    main()
