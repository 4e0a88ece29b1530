"""Calculated bytes against those of worlds that train."""

import pytest
from world_runs import Trained

from dlrm_hybrid.cli.terminal import quiet
from dlrm_hybrid.cli.verbs.train import TerminalView
from dlrm_hybrid.config.validate import saved_values, validate
from dlrm_hybrid.plan.calibration import measured
from dlrm_hybrid.plan.frames import bytes_by_class, frames
from dlrm_hybrid.plan.layout import Densities, layout
from dlrm_hybrid.plan.probe import count
from dlrm_hybrid.plan.worlds import as_configured
from dlrm_hybrid.report.runs import Run, read_run
from dlrm_hybrid.telemetry.events import Kind
from dlrm_hybrid.telemetry.traffic import Traffic

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
        ("gradient=dct", "gradient.precision=levels", "pull.precision=levels"),
    ],
    ids=lambda one: one[0],
)
def test_bytes_of_every_class_are_as_calculated(
    overrides: tuple[str, ...], trained: Trained
) -> None:
    folder = trained("run", *WORLD, *overrides)
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


def test_a_shorter_run_is_predicted_from_the_first_steps_of_a_longer_one(trained: Trained) -> None:
    def run_of(name: str, steps: int) -> Run:
        folder = trained(name, *WORLD, "gradient=dct", f"train.steps={steps}")
        return read_run(folder)

    def pushed(run: Run) -> float:
        timed = max(one.values["timed_steps"] for one in run.events if one.kind is Kind.RANK)
        return run.summary["network"]["by_class"][Traffic.GRADIENT_PUSH]["bytes"] / timed

    def calculated(densities: Densities) -> float:
        at = layout(world.config, TRAIN_ROWS, densities)
        return bytes_by_class(at, frames(at))[Traffic.GRADIENT_PUSH]

    long, short = run_of("long", 60), run_of("short", 20)
    world = measured(long, layout(validate(saved_values(long.config)), TRAIN_ROWS), TRAIN_ROWS)
    known = world.densities
    assert calculated(known) == pytest.approx(pushed(long), rel=0.01)
    assert abs(pushed(short) / pushed(long) - 1) > 0.015  # else this says nothing
    assert calculated(known.over(20)) == pytest.approx(pushed(short), rel=0.01)


@pytest.mark.parametrize("sync", ["sync", "bounded"])
def test_counted_steps_send_what_processes_send(sync: str, trained: Trained) -> None:
    # Another number of trainers and other cuts than any calibration.
    overrides = ("gradient=dct", "parallel.trainers=3", "parallel.cuts=[bottom.2]", f"sync={sync}")
    overrides = (*overrides, "train.epochs=10", "parallel.world=processes")
    folder = trained("run", *WORLD, *overrides)
    run = read_run(folder)
    planned = as_configured(validate(saved_values(run.config)))
    (sent,) = count([planned], 10 * STEPS, quiet(), TerminalView(quiet()))
    world = layout(planned.config, TRAIN_ROWS, sent)
    calculated = bytes_by_class(world, frames(world))
    by_class = run.summary["network"]["by_class"]
    timed = max(one.values["timed_steps"] for one in run.events if one.kind is Kind.RANK)
    for traffic in (Traffic.GRADIENT_PUSH, Traffic.PARAMETER_PULL):
        a_step = by_class[traffic]["bytes"] / timed
        assert a_step > 0
        assert calculated[traffic] == pytest.approx(a_step, rel=1e-6), traffic
