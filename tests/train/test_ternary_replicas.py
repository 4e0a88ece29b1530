"""Replicas that learn from levels hold the same bits in every trainer after a run."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import pytest

from dlrm_hybrid.config.compose import values_of
from dlrm_hybrid.config.validate import validate
from dlrm_hybrid.telemetry.spans import SpanClock
from dlrm_hybrid.types import DlrmError

if TYPE_CHECKING:
    from dlrm_hybrid.train.in_process import InProcessEngine

STEPS, TRAINERS, STAGES = 20, 3, 2
WORLD = (
    *("parallel=hybrid", "parallel.cuts=[bottom.2]", "parallel.servers=2"),
    *("parallel.world=in_process", f"parallel.trainers={TRAINERS}", "train.batch_size=8"),
    *("gradient=terngrad", "gradient.smallest=30", f"train.steps={STEPS}"),
)
NEVER = f"sync.check_every={STEPS + 1}"


def opened(rows: Sequence[str], *options: str) -> "InProcessEngine":
    # Torch and TorchRec take seconds to import, which other choices of tests need not wait for.
    from dlrm_hybrid.data.shards import open_shards
    from dlrm_hybrid.model.row_storage import IN_MEMORY
    from dlrm_hybrid.run.assembly import build
    from dlrm_hybrid.run.assembly import engine as build_engine
    from dlrm_hybrid.train.in_process import InProcessEngine

    config = validate(values_of([*rows, *WORLD, *options]))
    shards = open_shards(build.prepared_folder(config), build.semantics(config))
    engine = build_engine.engine(config, shards, STEPS, IN_MEMORY, SpanClock())
    assert isinstance(engine, InProcessEngine)
    return engine


def learn(engine: "InProcessEngine", first: int, end: int) -> None:
    from dlrm_hybrid.data.loader import START

    at = START
    for step in range(first, end):
        _, at = engine.make_step(step, at)


def replicas(engine: "InProcessEngine") -> list[dict[str, bytes]]:
    """The weights of every trainer by name."""
    held: list[dict[str, bytes]] = [{} for _ in range(TRAINERS)]
    for rank, worker in enumerate(engine.ranks.workers):
        held[rank // STAGES] |= {
            name: weight.detach().numpy().tobytes()
            for name, weight in worker.stage.model.dense_parameters().items()
        }
    return held


@pytest.mark.parametrize("optimizer", [pytest.param("sgd", marks=pytest.mark.slow), "momentum"])
def test_all_replicas_are_bit_identical_after_a_run(optimizer: str, small_rows: list[str]) -> None:
    engine = opened(small_rows, NEVER, f"optimizer={optimizer}", "optimizer.lr=0.02")
    before = replicas(engine)[0]
    learn(engine, 0, STEPS)
    first, *others = replicas(engine)
    assert all(first[name] != weight for name, weight in before.items())
    assert others == [first] * (TRAINERS - 1)


def flip(engine: "InProcessEngine") -> None:
    """The lowest bit of one weight of the last trainer's last stage."""
    weight = dict(engine.ranks.workers[-1].stage.model.dense_parameters())["top.1.weight"]
    weight.detach().numpy().reshape(-1).view("uint32")[0] ^= 1


def test_a_wrong_bit_in_one_replica_stays_there(small_rows: list[str]) -> None:
    engine = opened(small_rows, NEVER)
    learn(engine, 0, 3)
    flip(engine)
    learn(engine, 3, 4)
    first, second, third = replicas(engine)
    assert first == second
    assert [name for name in first if first[name] != third[name]] == ["top.1.weight"]


def test_a_wrong_bit_in_one_replica_is_noticed(small_rows: list[str]) -> None:
    engine = opened(small_rows, "sync.check_every=1")
    learn(engine, 0, 3)
    flip(engine)
    with pytest.raises(DlrmError, match=r"worker-2\.1 .*: stage 1 differs from what server-"):
        learn(engine, 3, 4)
