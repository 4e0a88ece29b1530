"""The worlds of figure 7 and table 5 can be, have folders of their own, and are compared right."""

from itertools import chain

import production
import pytest
from study_runs import study_run

from dlrm_hybrid.config.compose import values_of
from dlrm_hybrid.config.validate import validate
from dlrm_hybrid.report.runs import Run


def test_worlds_that_differ_have_other_folders() -> None:
    folders: dict[str, object] = {}
    for name, case in chain.from_iterable(part.items() for part in production.PARTS.values()):
        assert folders.setdefault(production.world_slug(name, case), case.words) == case.words
    assert len(folders) == 19


@pytest.mark.parametrize(("part", "setting"), [(0, "TIMED"), (1, "SCORED"), (2, "TIMED")])
def test_worlds_are_valid(part: int, setting: str) -> None:
    *_, case = list(production.PARTS.values())[part].values()
    validate(values_of((*production.WORLD, *getattr(production, setting), *case.words)))


def a_run(samples_per_second: float, loss: float) -> Run:
    summary = {
        "samples_per_second": samples_per_second,
        "network": {"utilization": 0.5, "bytes_per_sample": 100.0},
        "cpu": {"utilization": 0.25},
        "test": {"loss": loss},
    }
    run = study_run("none", summary=summary)
    run.config["activation"] = {"name": "none"}
    return run


def test_worlds_are_compared_with_nothing_compressed_turn_by_turn() -> None:
    part = "Table 5, two stages"
    runs = {name: [a_run(1000, 0.5), a_run(2000, 0.4)] for name in production.PARTS[part]}
    runs["90 %"] = [a_run(1250, 0.51), a_run(2500, 0.404)]
    times = {str(row["compressed"]): row for row in production.time_rows(part, runs)}
    assert times["75 %"]["time, %"] == "+0.0"
    assert times["90 %"]["time, %"] == "-20.0"
    assert times["90 %"]["\u00b5s per sample"] == "600 (400 – 800)"
    losses = {str(row["compressed"]): row for row in production.loss_rows(part, runs)}
    assert losses["90 %"]["to nothing, %"] == "+1.500 ± 0.707"
