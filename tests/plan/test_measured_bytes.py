"""Calculated bytes against those of worlds that train."""

import pytest
from world_runs import Train

from dlrm_hybrid.config.validate import saved_values, validate
from dlrm_hybrid.plan.calibration import measured
from dlrm_hybrid.plan.frames import bytes_by_class, frames
from dlrm_hybrid.plan.layout import layout
from dlrm_hybrid.report.runs import read_run
from dlrm_hybrid.telemetry.events import Kind

STEPS = 40
TRAIN_ROWS = 6_000
WORLD = (
    *("parallel=hybrid", "parallel.world=in_process", f"train.steps={STEPS}", "telemetry.every=5"),
    *("checkpoint.minutes=0",),
)


@pytest.mark.parametrize(
    "overrides",
    [
        ("gradient=none", "activation=dct", "activation.precision=bfloat16"),
        ("gradient=terngrad", "parallel.servers=2", "parallel.trainers=3"),
        ("gradient=deft", "parallel.cuts=[]", *("embedding=served", "parallel.table_servers=1")),
        ("gradient=dct", "gradient.precision=bfloat16", "pull.precision=bfloat16"),
    ],
    ids=lambda one: one[0],
)
def test_bytes_of_every_class_are_as_calculated(overrides: tuple[str, ...], train: Train) -> None:
    code, folder = train("run", *WORLD, *overrides)
    assert code == 0
    run = read_run(folder)
    plain = layout(validate(saved_values(run.config)), TRAIN_ROWS)
    world = measured(run, plain, TRAIN_ROWS)
    sent = run.summary["network"]["by_class"]
    calculated = bytes_by_class(world, frames(world))
    compared = [one for one in calculated if one.value in sent and sent[one.value]["bytes"]]
    assert len(compared) >= 3
    timed = max(one.values["timed_steps"] for one in run.events if one.kind is Kind.RANK)
    for traffic in compared:
        a_step = sent[traffic.value]["bytes"] / timed
        assert calculated[traffic] == pytest.approx(a_step, rel=0.01), traffic
