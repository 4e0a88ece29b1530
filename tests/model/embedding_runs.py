"""Starts the trainers of the sharded embeddings' tests and collects what they tell."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from dlrm_hybrid.run.supervisor import Rank, run_ranks
from dlrm_hybrid.telemetry.events import Event


class World(NamedTuple):
    """What so many trainers do: an entry, MODULE:NAME or that of embedding_ranks, and how."""

    trainers: int
    entry: str
    given: Mapping[str, Any]
    is_slow: bool = False


def run(folder: Path, entry: str, trainers: int, silent: int = 0, **given: Any) -> list[dict]:
    """What trainers tell, all but the last `silent`; they must not fail and print nothing."""
    return run_several(folder, {entry: World(trainers, entry, given)}, silent)[entry]


def run_several(
    folder: Path, worlds: Mapping[str, World], silent: int = 0
) -> dict[str, list[dict]]:
    """What trainers tell of each world, one after the other in the same processes."""
    (trainers,) = {world.trainers for world in worlds.values()}
    seen: list[Event] = []
    members = list(range(1, 1 + 3 * trainers, 3))
    several = {
        name: {"optimizer": "sgd", "members": members, "folder": str(folder / name), **world.given}
        for name, world in worlds.items()
    }
    entries = {name: world.entry for name, world in worlds.items()}
    ranks = [
        Rank(
            index=rank,
            name=f"worker-{rank}",
            argument=json.dumps({"rank": rank, "worlds": several, "entries": entries}),
            log_folder=folder,
        )
        for rank in members
    ]
    for name in worlds:
        (folder / name).mkdir(parents=True, exist_ok=True)
    outcome = run_ranks(ranks, "embedding_ranks:several", seen.append)
    logs = "".join((folder / f"worker-{rank}.log").read_text() for rank in members)
    assert outcome.message == "", logs
    assert logs == ""
    told: dict[str, list[dict]] = {name: [] for name in worlds}
    for event in seen:
        told[event.values["world"]].append(
            {name: value for name, value in event.values.items() if name != "world"}
        )
    for name, of_world in told.items():
        assert {one["trainer"] for one in of_world} == set(range(trainers - silent)), name
        of_world.sort(key=lambda values: values["trainer"])
    return told


def rows(worlds: Mapping[str, World]) -> list[Any]:
    """The names of worlds; slow ones are for `make test-all`."""
    marks = {name: pytest.mark.slow if world.is_slow else () for name, world in worlds.items()}
    return [pytest.param(name, marks=mark) for name, mark in marks.items()]
