"""The page about a run that goes on: figures, lines, and what it does with others' texts."""

import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dlrm_hybrid.report.live.page import Watched, page
from dlrm_hybrid.report.live.plot import HEIGHT, MOST_POINTS, TOP, WIDTH, Plot, thinned, ticks
from dlrm_hybrid.report.runs import read_run

NOW = 1_000_100.0


def started(**changes: Any) -> dict[str, Any]:
    values: dict[str, Any] = {
        "attempt": 0,
        "rank": 0,
        "role": "worker",
        "steps_total": 1000,
        "samples": 0,
    }
    values["samples_per_step"] = 10
    return {"kind": "started", "step": 0, "time_seconds": 1e6, **values, **changes}


def progress(step: int, seconds: float, **changes: Any) -> dict[str, Any]:
    values = {
        **{"samples": 10 * step, "rows": 1000, "loss": 0.5 + 1 / step, "accuracy": 0.75, "lr": 0.1},
        **{"timed_rows": 1000, "timed_seconds": 0.5, "timed_cpu_seconds": 0.4},
        **{"seconds_by_span": {"compute": 0.3, "wait": 0.1}},
        **{"sent_bytes": 20_000, "dense_equivalent_bytes": 100_000, "sent_rows": 1000},
    }
    return {"kind": "progress", "step": step, "time_seconds": 1e6 + seconds, **values, **changes}


def evaluated(step: int, loss: float, **changes: Any) -> dict[str, Any]:
    values = {
        **{"samples": 10 * step, "seconds": 1.0, "log_loss": loss, "accuracy": 0.7, "auc": 0.8},
        **{"normalized_entropy": 0.9, "base_rate": 0.25, "calibration": 1.0},
    }
    return {"kind": "evaluated", "step": step, "time_seconds": 1e6 + step, **values, **changes}


def watched(folder: Path, *events: dict[str, Any], running: bool = True, **config: Any) -> Watched:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps({"name": "mine", **config}))
    (folder / "events.jsonl").write_text("".join(f"{json.dumps(one)}\n" for one in events))
    return Watched(run=read_run(folder), is_running=running, now=NOW)


def texts(html: str) -> list[str]:
    """What a reader sees, cell by cell."""

    class Reader(HTMLParser):
        found: list[str] = []
        hidden = 0

        def handle_starttag(self, tag: str, attrs: Any) -> None:
            self.hidden += tag == "style"

        def handle_endtag(self, tag: str) -> None:
            self.hidden -= tag == "style"

        def handle_data(self, data: str) -> None:
            if not self.hidden and data.strip():
                self.found.append(data.strip())

    reader = Reader()
    reader.found = []
    reader.feed(html)
    return reader.found


def cells(html: str, name: str) -> list[str]:
    found = texts(html)
    return found[found.index(name) + 1 : found.index(name) + 3]


def test_figures_are_the_last_ones_with_their_steps(tmp_path: Path) -> None:
    events = [started(), progress(100, 10), evaluated(100, 0.4), progress(200, 20)]
    saved = {"kind": "saved", "step": 200, "time_seconds": 1e6 + 21, "seconds": 0.012}
    html = page(watched(tmp_path / "run", *events, evaluated(200, 0.45), saved), 5)
    assert cells(html, "training log-loss") == ["0.5050", "200"]
    assert cells(html, "test log-loss") == ["0.4500", "200"]
    assert cells(html, "best test log-loss") == ["0.4000", "100"]
    assert cells(html, "samples a second") == ["2,000", "200"]
    assert cells(html, "bytes sent a sample") == ["20.0", "200"]
    assert cells(html, "dense ÷ sent") == ["5.0×", "200"]
    assert cells(html, "checkpoints saved") == ["1", "200"]
    assert cells(html, "compute") == ["75%", "75%"]
    assert "saved a checkpoint: training stood still for 12 ms" in texts(html)
    assert "20% running: mine" in texts(html)
    assert "Of all steps; the summary's figure leaves out warm-up." in texts(html)
    assert "Training:" not in html  # the steps done so far are not the plan


def test_what_is_left_goes_by_the_last_points_of_this_attempt(tmp_path: Path) -> None:
    # 100 steps in 10 s, and the last point was 80 s ago: 800 steps take 80 s, which are over.
    events = [started(), progress(100, 10), progress(200, 20)]
    assert watched(tmp_path / "a", *events).seconds_left() == 0
    late = [progress(300, 95), progress(400, 96)]
    again = [*events, started(step=200, time_seconds=1e6 + 90, attempt=1), *late]
    assert watched(tmp_path / "b", *again).seconds_left() == pytest.approx(600 / 100 * 1 - 4)
    assert watched(tmp_path / "c", *again, running=False).seconds_left() is None
    assert watched(tmp_path / "d", *events[:2]).seconds_left() is None


@pytest.mark.parametrize("seconds", [5.0, 0.5, None])
def test_only_a_page_that_will_be_made_again_is_loaded_again(
    seconds: float | None, tmp_path: Path
) -> None:
    html = page(watched(tmp_path / "run", started()), seconds)
    found = re.findall(r'<meta http-equiv="refresh" content="(\d+)">', html)
    assert found == ([] if seconds is None else [str(max(1, round(seconds)))])


def test_a_run_without_a_step_has_a_page(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.json").write_text("{}")
    html = page(Watched(run=read_run(tmp_path / "run"), is_running=True, now=NOW), 5)
    assert "No step yet." in texts(html)
    assert "nothing yet" in texts(html)
    assert "<svg" not in html


def test_no_text_of_a_run_is_markup(tmp_path: Path) -> None:
    bad = "<script>alert(1)</script>"
    run = watched(tmp_path / bad.replace("/", ""), started(), name=bad, model={"name": bad})
    html = page(Watched(run=read_run(run.run.folder), is_running=True, now=NOW), 5)
    assert "<script" not in html


def test_evaluations_stay_in_sight_and_outliers_of_the_line_do_not_hide_it() -> None:
    line = [(0.0, 0.7), (10.0, 900.0), (20.0, 0.6), (30.0, 0.5), (40.0, 0.5)]
    svg = Plot(title="loss", line=line, dots=[(40.0, 2.4)], dots_name="tested").svg()
    points = re.search(r'points="([^"]*)"', svg)
    assert points is not None
    ys = [float(point.split(",")[1]) for point in points[1].split()]
    assert ys[1] == TOP  # it runs out of the picture
    assert max(ys) - min(ys[:1] + ys[2:]) > 5  # the others are told apart
    dot = re.search(r'<circle cx="[\d.]+" cy="([\d.]+)"', svg)
    assert dot is not None
    assert TOP < float(dot[1]) < min(ys[:1] + ys[2:])
    assert "Dots: tested." in svg


def test_a_single_point_of_a_line_is_seen(tmp_path: Path) -> None:
    """A polyline of one point draws nothing: a page would be blank until the second."""
    one, two = (Plot(title="any", line=[(8.0, 2.0), (9.0, 3.0)][:n]).svg() for n in (1, 2))
    assert one.count("<circle") == 1
    assert "<circle" not in two
    html = page(watched(tmp_path / "run", started(), progress(100, 10)), 5)
    assert html.count("<circle") == html.count("<svg") == 3


@given(
    low=st.floats(-1e6, 1e6), width=st.one_of(st.just(0.0), st.floats(1e-6, 1e9, exclude_min=True))
)
def test_ticks_are_round_few_and_around_the_range(low: float, width: float) -> None:
    found = ticks(low, low + width)
    assert 2 <= len(found) <= 8
    slack = 1e-9 * max(abs(found[0]), abs(found[-1]))
    assert found[0] <= low + slack
    assert found[-1] >= low + width - slack
    step = found[1] - found[0]
    assert step > 0
    digits = f"{step:.6e}"[0]
    assert digits in "1259"  # 9.99…: a power of ten, rounded


@given(
    points=st.lists(st.tuples(st.floats(0, 1e9), st.floats(-1e6, 1e6)), max_size=1500),
)
def test_a_long_line_is_thinned_to_means(points: list[tuple[float, float]]) -> None:
    found = thinned(points)
    assert len(found) <= MOST_POINTS
    if len(points) <= MOST_POINTS:
        assert found == points
    for x, y in found:
        assert min(one for one, _ in points) <= x <= max(one for one, _ in points) * (1 + 1e-12)
        assert abs(y) <= 1e6


@given(values=st.lists(st.floats(-1e20, 1e20), min_size=1, max_size=50))
def test_every_point_is_inside_the_picture(values: list[float]) -> None:
    svg = Plot(title="any", line=list(enumerate(values)), from_zero=True).svg()
    points = re.search(r'points="([^"]*)"', svg)
    assert points is not None
    for point in points[1].split():
        x, y = map(float, point.split(","))
        assert 0 <= x <= WIDTH
        assert 0 <= y <= HEIGHT
