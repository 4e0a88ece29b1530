"""`optimizer.staleness_warmup_steps`: how stale dense gradients are, and the rate they get."""

import numpy as np
import pytest
from world_runs import Train, assert_same, tensors

from dlrm_hybrid.config.compose import values_of
from dlrm_hybrid.config.validate import validate
from dlrm_hybrid.run.assembly.model import dense_schedule, embedding_schedule

WARM = "optimizer.staleness_warmup_steps=20"
STALE = ("parallel=hybrid", "parallel.trainers=1", "schedule=dsp", WARM)
UPDATES = ("gradient=dct", "gradient.residual=update", "gradient.density=1")
SERVED = ("embedding=served", "parallel.table_servers=1")


@pytest.mark.parametrize(
    ("overrides", "staleness"),
    [
        (STALE, (4, 2, 1)),
        ((*STALE, "sync=bounded", "sync.staleness=3"), (7, 5, 3)),
        (("parallel=hybrid", WARM, "sync=bounded", "sync.staleness=3"), (3, 3, 3)),
        (("parallel=hybrid", WARM, "sync=async", "parallel.trainers=5", *SERVED), (4, 4, 4)),
        (("parallel=hybrid", WARM, "sync=async", "parallel.threads=3", *SERVED), (5, 5, 5)),
        (("parallel=hybrid", WARM, "sync=async", "sync.in_flight=2", *SERVED), (3, 3, 3)),
    ],
)
def test_the_rate_is_divided_by_the_staleness_at_first(
    overrides: tuple[str, ...], staleness: tuple[int, ...]
) -> None:
    warm, cold = (
        validate(values_of([*overrides, *more]))
        for more in ((), ("optimizer.staleness_warmup_steps=null",))
    )
    for stage, number in enumerate(staleness):
        rates = [dense_schedule(config, 100, stage) for config in (warm, cold)]
        assert rates[0].lr(0) == pytest.approx(rates[1].lr(0) / number)
        assert rates[0].lr(10) == pytest.approx(rates[1].lr(10) / number**0.5)
        assert rates[0].lr(20) == rates[1].lr(20)
    assert embedding_schedule(warm, 100) == embedding_schedule(cold, 100)


def test_servers_apply_the_rate_of_each_stage(train: Train) -> None:
    world = (*STALE, "parallel.world=in_process", "train.steps=12", "optimizer.lr=0.3")
    folders = {}
    for name, options in (
        ("alone", ("parallel.servers=0",)),
        ("servers", ("parallel.servers=2",)),
        ("updates", ("parallel.servers=2", *UPDATES)),
    ):
        code, folders[name] = train(name, *world, *options)
        assert code == 0
    assert_same(folders["alone"], folders["servers"], 12)
    one, other = (tensors(folders[name], 12) for name in ("alone", "updates"))
    for name, tensor in one.items():
        assert np.abs(tensor - other[name]).max() < 1e-5, name
