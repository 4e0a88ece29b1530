"""Worlds that predictions are held against can be, differ, and are compared right."""

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any, cast

import plan
import pytest
import scaling
from study_runs import study_run

from dlrm_hybrid.config.compose import values_of
from dlrm_hybrid.config.validate import validate
from dlrm_hybrid.plan.prediction import Prediction
from dlrm_hybrid.report.runs import Run
from dlrm_hybrid.telemetry.traffic import Traffic

ALL = (*plan.CALIBRATIONS.values(), *plan.WORLDS, *plan.WEAK, *plan.STRONG)


@pytest.mark.parametrize("world", dict.fromkeys(ALL), ids=lambda one: f"{one.name} {one.links}")
def test_worlds_are_valid(world: plan.World) -> None:
    config = validate(values_of(list(world.words)))
    assert config.network.name == "emulated"
    assert config.network.ranks_per_host == 1
    assert config.checkpoint.every == config.checkpoint.minutes == config.train.evaluate_every == 0


def test_worlds_are_as_many_and_as_different_as_was_asked_for(tmp_path: Any) -> None:
    assert len({world.folder(tmp_path) for world in ALL}) == len(set(ALL))
    assert len(plan.WORLDS) >= 18
    assert not {world.folder(tmp_path) for world in plan.WORLDS} & {
        world.folder(tmp_path) for world in plan.CALIBRATIONS.values()
    }
    for name, wanted in {
        "trainers": {1, 2, 4},
        "stages": {1, 2, 3},
        "servers": {1, 2},
        "gradient": {"none", "dct", "deft"},
        "sync": {"sync", "bounded", "async"},
        "tables": {0, 1},
        "rate": {"10mbit", "100mbit", "1gbit"},
        "latency": {None, "20ms"},
    }.items():
        assert {getattr(world, name) for world in plan.WORLDS} == wanted


def a_run(speed: float, sent: float, memory: float) -> Run:
    classes = {Traffic.GRADIENT_PUSH: 0.75 * sent, Traffic.PARAMETER_PULL: 0.25 * sent}
    by_class = {name: {"bytes": 100 * one} for name, one in classes.items()}
    control = {Traffic.CONTROL: {"bytes": 1e9}}
    return study_run(
        "none",
        summary={
            "samples_per_second": speed,
            "seconds": 100 / speed,
            "network": {"by_class": by_class | control},
            "roles": {"0": {"role": "worker-0.0", "peak_rss_bytes": memory}},
        },
    )


def a_prediction(speed: float, sent: float, memory: float, trainers: int = 1) -> Prediction:
    by_class = dict.fromkeys(plan.CLASSES, 0.0) | {Traffic.GRADIENT_PUSH: sent}
    return cast(
        Prediction,
        SimpleNamespace(
            samples_per_second=speed,
            bytes_per_sample=by_class,
            memory_bytes={"worker-0.0": memory},
            bottleneck="cores, 90 %",
            trainers=trainers,
        ),
    )


def test_errors_are_relative_to_what_was_measured() -> None:
    worlds = plan.WORLDS[:2]
    found = dict(zip(worlds, (a_run(1000, 50, 4e8), a_run(200, 10, 5e8)), strict=True))
    predicted = dict(
        zip(worlds, (a_prediction(1100, 50.5, 4e8), a_prediction(150, 10, 4e8)), strict=True)
    )
    speeds = plan.speed_rows(found, predicted)
    assert [row["error, %"] for row in speeds] == ["+10.0", "-25.0"]
    sent: list[Mapping[str, Any]] = list(plan.byte_rows(found, predicted))
    assert [row["error, %"] for row in sent] == ["+1.00", "+0.00"]
    assert sent[0]["gradient push, %"] == "+34.7"
    assert sent[0]["embedding, %"] is None
    memory = plan.memory_rows(found, predicted)
    assert [row["worst rank, %"] for row in memory] == ["+0.0", "-20.0"]
    told = plan.summary(plan.speed_errors(found, predicted), "samples/s")
    assert "median 17.5 %, worst 25.0 %; 1 of 2 within 12 %" in told


def test_a_world_is_the_last_that_more_trainers_made_faster() -> None:
    worlds = [a_prediction(speed, 1, 1, 2**n) for n, speed in enumerate((1, 2, 3.9, 4, 4.05))]
    knee = scaling.knee(worlds)
    assert knee is not None
    assert knee.trainers == 4
    assert scaling.knee(worlds[:3]) is None
