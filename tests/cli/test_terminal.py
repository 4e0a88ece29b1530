import re
import time
from io import StringIO

import pytest
from rich.console import Console
from rich.text import Text

from dlrm_hybrid.cli import terminal
from dlrm_hybrid.cli.terminal import Eta, Terminal
from dlrm_hybrid.cli.verbs.train import LiveTraining, LiveWork
from dlrm_hybrid.report.table import Table
from dlrm_hybrid.telemetry.events import Event, Kind


class Clock:
    """Stands until it is set."""

    now = 100.0

    def __call__(self) -> float:
        return self.now


def test_a_table_shows_every_character_however_narrow_the_terminal() -> None:
    file = StringIO()
    columns = ["run", "cuts", *(f"figure {number}" for number in range(12))]
    row = ["one", "[bottom.1,top.1]", *(f"{number}.1234" for number in range(12))]
    Terminal(Console(file=file, width=40, soft_wrap=True)).table(Table(columns, [row], "llr"))
    _, head, _, body, _ = file.getvalue().splitlines()
    assert [cell.strip() for cell in head.split("┃")[1:-1]] == columns
    assert [cell.strip() for cell in body.split("│")[1:-1]] == row


def test_the_eta_knows_nothing_of_a_slow_start_and_of_steps_done_before() -> None:
    clock = Clock()
    eta = Eta(clock)
    clock.now += 60  # ranks start, kernels load
    assert eta.update(5000, 6000) == "-:--"  # a resumed run: these steps took no time
    clock.now += 2
    assert eta.update(5020, 6000) == "1:38"  # 980 steps at 10 a second


def test_the_eta_goes_by_the_speed_of_the_last_seconds() -> None:
    clock = Clock()
    eta = Eta(clock)
    for second in range(100):  # one step a second, then ten
        clock.now += 1
        eta.update(second, 2000)
    for _ in range(30):
        clock.now += 1
        second += 10
        shown = eta.update(second, 2000)
    assert second == 399
    assert shown == "2:40"  # 1,601 steps at 10 a second


def test_the_eta_of_another_stage_is_its_own() -> None:
    clock = Clock()
    eta = Eta(clock)
    eta.update(0, 1000)
    clock.now += 10
    assert eta.update(1000, 1000) == "0:00"
    assert eta.update(0, 50) == "-:--"
    clock.now += 10
    assert eta.update(10, 50) == "0:40"


@pytest.mark.parametrize(
    ("width", "is_terminal", "wanted"),
    [
        (80, True, ("1,234", "loss 0.4893", "12,346/s", "MB/s", "ETA")),
        (100, True, ("1,234/46,870", "loss 0.4893", "acc 77.71%", "12,346/s", "MB/s", "20.1×")),
        (140, True, ("step 1,234/46,870", "accuracy 77.71%", "12,346 samples/s", "20.1× less")),
        (80, False, ("1,234/46,870", "accuracy 77.71%", "12.3 MB/s 20.1× less")),
    ],
)
def test_a_line_shows_every_figure_that_it_has_columns_for(
    width: int, is_terminal: bool, wanted: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(terminal, "ETA_AFTER_SECONDS", 0.0)
    file = StringIO()
    console = Console(file=file, width=width, force_terminal=is_terminal, soft_wrap=True)
    rows = {"train_rows": 6_000_000, "test_rows": 1000, "steps_total": 46_870}
    told = {"sent_rows": 1, "dense_equivalent_bytes": 20_100, "loss": 0.4893, "accuracy": 0.7771}
    with LiveTraining(Terminal(console)) as live:
        live.show(Event(Kind.STARTED, 0, time.time(), {**rows, "samples_per_step": 128}))
        # Of some ticks it is not known what was sent.
        for step, samples, sent_bytes in (
            (1000, 0, None),
            (1100, 6000, 1000),
            (1234, 12_346, None),
        ):
            values = {**told, "samples": samples, "sent_bytes": sent_bytes}
            live.show(Event(Kind.TICK, step, 10.0 + samples / 12_346, values))
    shown = Text.from_ansi(file.getvalue()).plain.splitlines()
    last = [line for line in shown if "loss" in line][-1]
    assert not is_terminal or len(last.rstrip()) <= width
    assert not is_terminal or re.search(r"ETA \d+:\d\d", last)
    for text in wanted:
        assert text in last


@pytest.mark.parametrize(
    ("speed", "repeats", "lines"), [(None, None, 1), (2.1, 90, 1), (0.46, 90, 2), (0.46, 2, 2)]
)
def test_a_bfloat16_that_loses_is_told(
    speed: float | None, repeats: int | None, lines: int
) -> None:
    measured = {"bfloat16_speed": speed, "bfloat16_repeats": repeats}
    file = StringIO()
    rows = {"train_rows": 1, "test_rows": 1, "steps_total": 1, "samples_per_step": 1}
    with LiveTraining(Terminal(Console(file=file, width=200))) as live:
        live.show(Event(Kind.STARTED, 0, 1.0, {**rows, **measured}))
    assert len(file.getvalue().splitlines()) == lines
    assert ("0.46 times the speed of float32" in file.getvalue()) == (lines == 2)
    assert ("(best of 2: a rough figure)" in file.getvalue()) == (repeats == 2)


def working(done: int, task: str = "evaluate") -> Event:
    values = {"task": task, "done": done, "total": 1_000_000, "unit": "rows"}
    return Event(Kind.WORKING, -1, 0.0, values)


EVALUATED = {"log_loss": 0.5, "auc": 0.7, "accuracy": 0.75, "base_rate": 0.25}


def drawn(file: StringIO) -> str:
    """What has been drawn since the last call, without colours."""
    text = Text.from_ansi(file.getvalue()).plain
    file.seek(0)
    file.truncate()
    return text


@pytest.mark.parametrize("width", [80, 100])
def test_work_that_takes_a_while_stands_in_the_place_of_the_training(width: int) -> None:
    clock, file = Clock(), StringIO()
    console = Console(file=file, width=width, force_terminal=True, soft_wrap=True)
    rows = {"train_rows": 6_000_000, "test_rows": 1000, "steps_total": 46_870}
    with LiveTraining(Terminal(console, clock)) as live:
        live.show(Event(Kind.STARTED, 0, 0.0, {**rows, "samples_per_step": 128}))
        drawn(file)
        for second in (0.0, 1.9):
            clock.now = 100 + second
            live.show(working(int(100_000 * second)))
        assert "evaluate" not in drawn(file)
        clock.now = 104.0
        live.show(working(400_000))
        lines = [line.strip("\r") for line in drawn(file).split("\r") if "evaluate" in line]
        assert "40%  100,000 rows/s ETA 0:06" in lines[-1]
        assert len(lines[-1].rstrip()) <= width
        assert "train" not in lines[-1]
        live.show(Event(Kind.EVALUATED, 100, 5.0, EVALUATED))
        shown = drawn(file)
        assert "step 100: test log-loss 0.5000" in shown
        assert "train" in shown.splitlines()[-1]
        assert "evaluate" not in shown.splitlines()[-1]


@pytest.mark.parametrize(
    ("is_terminal", "seconds", "wanted"),
    [
        (False, range(3), []),
        (False, range(13), ["evaluate  50%  100,000 rows/s  ETA 0:05"]),
        (True, range(2), []),
    ],
)
def test_what_is_done_soon_is_not_shown_and_a_file_gets_a_line_now_and_then(
    is_terminal: bool, seconds: range, wanted: list[str]
) -> None:
    clock, file = Clock(), StringIO()
    console = Console(file=file, width=80, force_terminal=is_terminal, soft_wrap=True)
    with LiveWork(Terminal(console, clock)) as live:
        for second in seconds:
            clock.now = 100.0 + second
            live.show(working(100_000 * second))
    lines = file.getvalue().splitlines()
    assert lines[:1] == wanted
    assert len(lines) == len(seconds) // 6


def test_a_late_bar_leaves_nothing_behind_and_another_task_has_its_own() -> None:
    clock, file = Clock(), StringIO()
    console = Console(file=file, width=80, force_terminal=True, soft_wrap=True)
    with LiveWork(Terminal(console, clock)) as live:
        for task in ("checkpoint", "evaluate"):
            for second in range(4):
                clock.now += 1
                live.show(working(100_000 * second, task))
    shown = file.getvalue()
    assert "checkpoint" in shown
    assert "evaluate" in shown
    rest = shown.rpartition("\x1b[2K")[2]  # behind the last time that the line was erased
    assert Text.from_ansi(rest).plain.strip() == ""


@pytest.fixture
def shows_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a file every report has its line."""
    monkeypatch.setattr(terminal, "PLAIN_LINE_SECONDS", 0.0)


@pytest.mark.usefixtures("shows_at_once")
def test_the_speed_shown_is_right_from_the_first_file_to_the_last() -> None:
    clock, file, size_bytes = Clock(), StringIO(), 10_000_000_000
    with LiveWork(Terminal(Console(file=file, width=200), clock)) as live:
        for tick in range(1, 58):  # 0.7 s apart: no file begins or ends with a report
            clock.now = 100 + 0.7 * tick
            done = round(0.7 * tick * 1e9) % size_bytes
            values = {"task": "checkpoint", "done": done, "total": size_bytes, "unit": "bytes"}
            live.show(Event(Kind.WORKING, -1, 0.0, values))
    first, *lines = file.getvalue().splitlines()
    assert "  0 MB/s" in first  # nothing to compare it with
    assert len(lines) == 56
    assert [line for line in lines if "  1,000 MB/s" not in line] == []


def test_what_its_first_report_says_is_done_has_a_speed() -> None:
    clock, file = Clock(), StringIO()
    with Terminal(Console(file=file, width=200), clock).counter("generate", "rows") as show:
        clock.now += 2
        show(7000, 7000)
    assert file.getvalue() == "generate 100%  3,500 rows/s  ETA 0:00\n"


@pytest.mark.usefixtures("shows_at_once")
def test_what_was_done_before_a_late_bar_is_no_speed() -> None:
    clock, file = Clock(), StringIO()
    shown = Terminal(Console(file=file, width=200), clock)
    with shown.counter("evaluate", "rows", is_late=True) as show:
        for done in (500_000, 500_010):
            clock.now += 1
            show(done, 1_000_000)
    assert "  10 rows/s" in file.getvalue().splitlines()[-1]


def last_drawn(file: StringIO) -> str:
    """The lines of bars as they were drawn last."""
    return drawn(file).rpartition("\r")[2].strip()


def test_a_bar_in_a_bar_in_a_bar_gives_its_place_back() -> None:
    clock, file = Clock(), StringIO()
    shown = Terminal(Console(file=file, width=80, force_terminal=True, soft_wrap=True), clock)
    with shown.bar("outer"):
        with shown.bar("middle"):
            with shown.bar("inner") as inner:
                inner.update(1, 2, "")
            assert last_drawn(file).startswith("middle")
        assert last_drawn(file).startswith("outer")


def test_a_late_bar_that_first_shows_inside_another_has_a_place_afterwards() -> None:
    clock, file = Clock(), StringIO()
    shown = Terminal(Console(file=file, width=80, force_terminal=True, soft_wrap=True), clock)
    with shown.bar("outer", is_late=True) as outer:
        with shown.bar("inner"):
            clock.now += 3
            outer.update(1, 4, "")
        assert "25%" in drawn(file)
        clock.now += 3
        outer.update(2, 4, "")
        assert "50%" in drawn(file)
