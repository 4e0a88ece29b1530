"""The page about a run that goes on: figures, lines, and what it does with others' texts."""

import json
import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import made_runs
import pytest

from dlrm_hybrid.report.live import Watched, live_document
from dlrm_hybrid.report.page import html as html_of
from dlrm_hybrid.report.runs import read_run
from dlrm_hybrid.telemetry.events import Event, Kind

NOW = 1_000_100.0


def started(step: int = 0, time_seconds: float = 1e6, attempt: int = 0) -> Event:
    values = {"attempt": attempt, "rank": 0, "role": "worker", "steps_total": 1000, "samples": 0}
    return Event(Kind.STARTED, step, time_seconds, {**values, "samples_per_step": 10})


def progress(step: int, seconds: float) -> Event:
    values = {
        **{"samples": 10 * step, "rows": 1000, "accuracy": 0.75, "timed_rows": 1000},
        **{"timed_seconds": 0.5, "seconds_by_span": {"compute": 0.3, "wait": 0.1}},
        **{"sent_bytes": 876_000, "dense_equivalent_bytes": 4_380_000, "sent_rows": 1000},
    }
    return made_runs.progress(step, 0.5 + 1 / step, 1e6 + seconds, **values)


def evaluated(step: int, loss: float) -> Event:
    return replace(made_runs.evaluated(step, loss), time_seconds=1e6 + step)


def watched(folder: Path, *events: Event, running: bool = True, **config: Any) -> Watched:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps({"name": "mine", **config}))
    (folder / "events.jsonl").write_text("".join(f"{event.to_json()}\n" for event in events))
    return Watched(run=read_run(folder), is_running=running, now=NOW)


def page(watched: Watched, seconds: float | None) -> str:
    return html_of(live_document(watched), seconds)


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
    saved = Event(Kind.SAVED, 200, 1e6 + 21, {"seconds": 0.012})
    html = page(watched(tmp_path / "run", *events, evaluated(200, 0.45), saved), 5)
    assert cells(html, "training log-loss") == ["0.5050", "200"]
    assert cells(html, "test log-loss") == ["0.4500", "200"]
    assert cells(html, "best test log-loss") == ["0.4000", "100"]
    assert cells(html, "samples a second") == ["2,000", "200"]
    assert cells(html, "bytes sent a sample") == ["876", "200"]
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
    assert "<img" not in html


def test_no_text_of_a_run_is_markup(tmp_path: Path) -> None:
    bad = "<script>alert(1)</script>"
    run = watched(tmp_path / bad.replace("/", ""), started(), name=bad, model={"name": bad})
    html = page(Watched(run=read_run(run.run.folder), is_running=True, now=NOW), 5)
    assert "<script" not in html
