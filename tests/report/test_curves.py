import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from made_runs import SAMPLES_PER_STEP, make_run, plain_events, progress, world_events

from dlrm_hybrid.report import figures, tables
from dlrm_hybrid.report.figures import MAX_POINTS, Curve, Lines, Over
from dlrm_hybrid.report.runs import Run, read_run, steps_before
from dlrm_hybrid.telemetry.events import Event, Kind


def made(folder: Path, record: list[Event]) -> Run:
    make_run(folder, record=record)
    return read_run(folder)


def points(curve: Curve | None) -> list[tuple[float, float]]:
    assert curve is not None
    return list(curve.items())


def test_loss_over_each_axis(tmp_path: Path) -> None:
    late = Event(Kind.SAVED, 10, 0.0, {})
    run = made(tmp_path / "run", [*world_events(0.5), late])
    per_sample = 2 * 6400 / (20 * SAMPLES_PER_STEP)
    places = {
        Over.STEPS: (10, 20),
        Over.SECONDS: (1.0, 2.0),
        Over.BYTES: (10 * SAMPLES_PER_STEP * per_sample, 20 * SAMPLES_PER_STEP * per_sample),
    }
    for axis, x in places.items():
        assert points(figures.training_loss(run, axis)) == list(zip(x, (0.6, 0.5), strict=True))
        assert points(figures.evaluated_loss(run, axis)) == [(x[1], 0.51)]


def test_days_are_one_curve_where_their_runs_are_together(tmp_path: Path) -> None:
    runs: list[Run] = []
    for day in (1, 2, 3):
        folder = tmp_path / f"day{day}"
        make_run(folder, record=plain_events())
        of = {"rows": 7, "reused": 3, "appended": 2, "unknown": 1, "evicted": 4}
        last = [f"{one.folder}/checkpoints/step_00000020" for one in runs]
        text = json.loads((folder / "summary.json").read_text())
        text |= {"descends_from": last or None, "growth": {"shop": of} if last else None}
        (folder / "summary.json").write_text(json.dumps(text))
        runs.append(read_run(folder))
    (picture,) = figures.losses(runs, ["a", "b", "c"], [Over.STEPS])
    assert isinstance(picture.content, Lines)
    drawn = [[x for x, _ in points(line.curve)] for line in picture.content.lines]
    assert drawn == [[10, 20], [30, 40], [50, 60]]
    assert [points(line.dots) for line in picture.content.lines][2] == [(60, 0.51)]
    assert steps_before(runs[1:]) == [0, 20]
    table = tables.growth(runs, ["a", "b", "c"])
    assert table is not None
    assert table.rows == [(day, "shop", "7", "3", "2", "4", "1") for day in "bc"]
    assert tables.growth(runs[:1], ["a"]) is None


def test_a_mean_of_fewer_steps_is_no_point(tmp_path: Path) -> None:
    record = plain_events()
    last = max(record, key=lambda event: event.step)
    short = progress(last.step + 1, 9.0)
    record.append(Event(short.kind, short.step, 0.0, {**short.values, "is_short": True}))
    run = made(tmp_path / "run", record)
    assert max(step for step, _ in points(figures.training_loss(run, Over.STEPS))) <= last.step


def test_what_was_not_measured_is_no_curve(tmp_path: Path) -> None:
    run = made(tmp_path / "run", plain_events())
    assert figures.training_loss(run, Over.BYTES) is None
    assert figures.density(run, "gradient.") is None
    assert figures.threshold(run, "gradient.") is None
    nothing = made(tmp_path / "nothing", [])
    assert [figures.training_loss(nothing, axis) for axis in Over] == [None] * 3
    assert figures.evaluated_loss(nothing, Over.STEPS) is None


def test_density_and_threshold(tmp_path: Path) -> None:
    run = made(tmp_path / "run", world_events())
    assert points(figures.density(run, "gradient.")) == [(10, 0.02), (20, 0.01)]
    band = figures.threshold(run, "gradient.")
    assert band is not None
    for curve in band.values():
        assert points(curve) == [(10, 0.5), (20, 0.25)]


@given(st.lists(st.floats(0.1, 2.0), min_size=1, max_size=700))
def test_few_points_stand_for_many(losses: list[float]) -> None:
    record = tuple(progress(10 * n, loss) for n, loss in enumerate(losses, 1))
    nothing: dict[str, Any] = {}
    run = Run(
        folder=Path(),
        config=nothing,
        overrides=(),
        environment=nothing,
        summary=nothing,
        events=record,
    )
    curve = figures.training_loss(run, Over.STEPS)
    assert curve is not None
    (x, y), *_ = points(curve)
    assert len(curve) <= MAX_POINTS
    assert curve.index[-1] == 10 * len(losses)
    assert curve.index.is_monotonic_increasing
    first = int(x) // 10
    assert y == pytest.approx(sum(losses[:first]) / first)
