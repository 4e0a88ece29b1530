"""How stale pushes are in a simulated world, and with which rate they are applied."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from dlrm_hybrid.config.compose import values_of
from dlrm_hybrid.config.validate import validate
from dlrm_hybrid.telemetry.summary import staleness_figures

if TYPE_CHECKING:
    from dlrm_hybrid.train.in_process import InProcessEngine

TRAINERS, STAGES, SERVERS, STEPS, REST = 4, 2, 2, 20, 15
WORLD = (
    *("parallel=hybrid", "parallel.world=in_process", "parallel.cuts=[bottom.2]", "sync=async"),
    *(
        "embedding=served",
        "parallel.table_servers=1",
        f"parallel.trainers={TRAINERS}",
        f"parallel.servers={SERVERS}",
    ),
    *("train.batch_size=8", f"train.steps={STEPS}", f"checkpoint.every={REST}"),
)


def opened(rows: Sequence[str], slowness: Mapping[int, float], *options: str) -> "InProcessEngine":
    # Torch and TorchRec take seconds to import, which other choices of tests need not wait for.
    from dlrm_hybrid.data.shards import open_shards
    from dlrm_hybrid.model.row_storage import IN_MEMORY
    from dlrm_hybrid.run.assembly import build
    from dlrm_hybrid.run.assembly import engine as build_engine
    from dlrm_hybrid.train.asynchronous.pace import SimulatedPace

    config = validate(values_of([*rows, *WORLD, *options]))
    shards = open_shards(build.prepared_folder(config), build.semantics(config))
    engine = build_engine.engine(config, shards, STEPS, IN_MEMORY)
    assert isinstance(engine.pace, SimulatedPace)
    return replace(engine, pace=replace(engine.pace, slowness=slowness))


def learn(engine: "InProcessEngine") -> None:
    from dlrm_hybrid.data.loader import START

    at = START
    for step in range(STEPS):
        _, at = engine.make_step(step, at)


@pytest.mark.parametrize(
    "slowness",
    [pytest.param({}, marks=pytest.mark.slow, id="alike"), pytest.param({2: 10.0}, id="one_slow")],
)
def test_pushes_miss_one_update_of_each_other_trainer_whatever_the_times(
    slowness: dict[int, float], small_rows: list[str]
) -> None:
    engine = opened(small_rows, slowness)
    assert engine.pace is not None
    learn(engine)
    batches, by_trainer = engine.pace.batches, engine.staleness()
    # Each push counts for all others that are at a batch then: for all, but for the last ones
    # before a rest. There, with none left to take, the last finds nobody, the one before it one.
    owned = sum(
        bool(server.weights(stage)) for _, server in engine.ranks.servers for stage in range(STAGES)
    )
    last_ones = 2 * (TRAINERS * (TRAINERS - 1) // 2)  # there are two rests
    expected = owned * ((TRAINERS - 1) * STEPS * TRAINERS - last_ones)
    assert sum(one.total for one in by_trainer.values()) == expected
    assert {trainer: one.count for trainer, one in by_trainer.items()} == {
        trainer: owned * count for trainer, count in enumerate(batches)
    }
    values = staleness_figures(by_trainer)
    assert values["mean"] == expected / (owned * STEPS * TRAINERS)
    own = [one["mean"] for one in values["by_trainer"].values()]
    if slowness:
        assert batches[2] < min(batches[:2]) / 5
        assert own[2] > 5 * (TRAINERS - 1) and max(own[:2]) < TRAINERS - 1
    else:
        assert min(own) >= TRAINERS - 1.5 and max(own) < TRAINERS - 0.5


def test_nobody_gets_further_ahead_of_a_slow_trainer_than_it_may(small_rows: list[str]) -> None:
    ahead = 3
    engine = opened(small_rows, {2: 10.0}, f"sync.ahead={ahead}")
    assert engine.pace is not None
    learn(engine)
    batches = engine.pace.batches
    assert sum(batches) == STEPS * TRAINERS and max(batches) - min(batches) <= ahead
    # While it is at a batch, others go from so many behind it to so many ahead of it at most.
    assert staleness_figures(engine.staleness())["max"] <= (TRAINERS - 1) * 2 * ahead


def test_a_push_misses_as_many_updates_more_as_are_in_flight(small_rows: list[str]) -> None:
    in_flight, rests, engine = 3, 2, opened(small_rows, {}, "sync.in_flight=3")
    learn(engine)
    values = staleness_figures(engine.staleness())
    # Between a push and the answer it was computed with all others push in_flight times, and its
    # own trainer once less; from a rest on, where all are equal to the servers, that begins anew.
    mean = TRAINERS * in_flight - 1
    assert mean - rests * TRAINERS * in_flight**2 / STEPS < values["mean"] < mean
    alone = opened(small_rows, {}, "sync.in_flight=3", "parallel.trainers=1")
    learn(alone)
    values = staleness_figures(alone.staleness())
    assert values["max"] == 2
    assert values["mean"] == (2 * STEPS - rests * (2 + 1)) / STEPS


def test_the_rate_that_is_reported_is_the_one_that_is_applied(small_rows: list[str]) -> None:
    for options, rate in (((), 0.1 / TRAINERS), (("sync.lr_scale=one",), 0.1)):
        engine = opened(small_rows, {}, "optimizer.lr=0.1", *options)
        assert engine.schedule.lr(0) == rate
