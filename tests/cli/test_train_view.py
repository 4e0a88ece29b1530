"""What a person sees of a run: it fits the terminal, and every figure is the summary's."""

import re
from io import StringIO

import pytest
from rich.console import Console

from dlrm_hybrid.cli.terminal import Terminal, quantity
from dlrm_hybrid.cli.verbs.train import LiveTraining, show_roles, show_run, show_scores
from dlrm_hybrid.telemetry.events import Event, Kind
from dlrm_hybrid.telemetry.spans import Span

TALLY = {"messages": 123_456, "bytes": 2_000_000_000, "dense_equivalent_bytes": 199_000_000_000}


def role(name: str, wait: float, sent: int | None) -> dict:
    rest = (1 - wait) / (len(Span) - 1)
    return {
        "role": name,
        "cpu_utilization": 1 - wait,
        "bytes_sent": sent,
        "seconds_by_span": {span.value: 7 * (wait if span == "wait" else rest) for span in Span},
    }


NOBODY = {"foreign_messages": 0, "refused_connections": 0}
SUMMARY = {
    "samples": 123_456_789,
    "samples_per_second": 12_345.6,
    "sync": None,
    "cpu": {"utilization": 0.5},
    "step_milliseconds": {"steps": 1_000, "p50": 12_345.67, "p95": 23_456.78, "p99": 9e6},
    "roles": {
        "0": role("worker-0.0", 0.2, 1_000_000),
        "1": role("worker-1.0", 0.6, 2_000_000),
        "2": role("server-0", 1.0, 999_400_000_000),
    },
    "network": {
        "bytes_total": 4_000_000_000,
        "bytes_per_sample": 4000.0,
        "dense_equivalent_bytes": 398_000_000_000,
        "by_class": {"activation_gradient": TALLY, "gradient_push": TALLY},
        **NOBODY,
    },
}
SCORES = dict.fromkeys(("loss", "auc", "accuracy", "normalized_entropy", "base_rate"), 0.5)
SCORES["calibration"] = 1.0123


def shown(width: int, summary: dict = SUMMARY) -> list[str]:
    file = StringIO()
    terminal = Terminal(Console(file=file, width=width, soft_wrap=True))
    show_scores(terminal, "test part", SCORES, SCORES)
    show_run(terminal, summary)
    return file.getvalue().splitlines()


def cells(lines: list[str], first: str) -> list[str]:
    (line,) = (line for line in lines if line.lstrip("│┃ ").startswith(first))
    return [cell.strip() for cell in re.split("[│┃]", line)[1:-1]]


@pytest.mark.parametrize("width", [80, 120])
def test_the_closing_tables_fit(width: int) -> None:
    assert max(map(len, shown(width))) <= width


def test_scores_stand_below_their_names() -> None:
    assert cells(shown(80), "model")[3:] == ["0.5000", "0.5000", "0.5000", "1.0123"]
    file = StringIO()
    before = {name: one for name, one in SCORES.items() if name != "calibration"}
    show_scores(Terminal(Console(file=file, width=80)), "test part", before, None)
    assert cells(file.getvalue().splitlines(), "model")[-1] == "–"


def test_time_is_averaged_over_a_role_and_bytes_are_added() -> None:
    lines = shown(80)
    assert cells(lines, "role")[0::5] == ["role", "wait"]
    assert cells(lines, "stage 0") == ["stage 0", *["8%"] * 4, "40%", "30%", "60%", "3.00 MB"]
    assert cells(lines, "servers")[5:] == ["100%", "0%", "0%", "999 GB"]
    assert cells(shown(120), "role")[1:10] == ["compute", "embed", *list(Span)[2:]]


def test_bytes_stand_beside_what_they_would_be() -> None:
    lines = shown(80)
    figures = ["123,456", "2.00 GB", "199 GB", "99.5×", "2,000"]
    assert cells(lines, "activation gradient") == ["activation gradient", *figures]
    assert cells(lines, "all") == ["all", "246,912", "4.00 GB", "398 GB", "99.5×", "4,000"]


def test_there_is_no_sum_where_a_class_is_not_counted() -> None:
    sums = dict.fromkeys(("bytes_total", "bytes_per_sample", "dense_equivalent_bytes"))
    lines = shown(80, {**SUMMARY, "network": {**sums, **NOBODY, "by_class": {"control": TALLY}}})
    assert cells(lines, "control")[-2:] == ["99.5×", "–"]
    assert not any(line.startswith("│ all ") for line in lines)


@pytest.mark.parametrize("all_bytes", [0, None])
def test_a_run_of_few_steps_has_no_table_of_zeros(all_bytes: int | None) -> None:
    nothing = {**SUMMARY["network"], "bytes_total": all_bytes}
    lines = shown(80, {**SUMMARY, "samples_per_second": None, "network": nothing})
    assert "bytes and time are those of steps after warm-up; this run has none" in lines
    assert not any("sent in training" in line for line in lines)


def test_a_world_that_sends_nothing_shows_zeros() -> None:
    zeros = dict.fromkeys(TALLY, 0)
    network = {"bytes_total": 0, "bytes_per_sample": 0.0, "dense_equivalent_bytes": 0, **NOBODY}
    lines = shown(80, {**SUMMARY, "network": {**network, "by_class": {"control": zeros}}})
    assert cells(lines, "control")[1:3] == ["0", "0 B"]


def test_what_was_not_measured_is_left_out() -> None:
    unmeasured = {"by_class": {}, "foreign_messages": None, "refused_connections": None}
    alone = {"0": role("worker", 0.0, None)}
    lines = shown(80, {**SUMMARY, "network": unmeasured, "roles": alone})
    assert cells(lines, "worker")[-1] == "–"
    assert not any("sent in training" in line for line in lines)
    file = StringIO()
    show_roles(Terminal(Console(file=file)), [{"role": "worker", "cpu_utilization": None}])
    assert file.getvalue() == ""


def test_a_line_says_how_long_steps_took_if_that_is_known() -> None:
    told = "milliseconds a step: p50 12,345.7, p95 23,456.8, p99 9,000,000.0"
    assert told in shown(80)
    unknown = shown(80, {**SUMMARY, "step_milliseconds": {"steps": None}})
    assert not any("a step" in line for line in unknown)


def test_a_slow_trainer_is_named_where_none_waits_for_it() -> None:
    def sync(by_trainer: dict) -> dict:
        means = {trainer: {"mean": mean} for trainer, mean in by_trainer.items()}
        return {"staleness": {"mean": 2.96, "p95": 5, "max": 1234, "by_trainer": means}}

    told = "staleness of pushes: mean 3.0, p95 5, max 1,234; by trainer 2.2 to 31.0 (trainer 1)"
    assert told in shown(80, {**SUMMARY, "sync": sync({"0": 2.2, "1": 31.0, "2": 3.0})})
    for unknown in (None, sync({})):
        assert not any("staleness" in line for line in shown(80, {**SUMMARY, "sync": unknown}))


@pytest.mark.parametrize(
    ("amount", "text"),
    [(0, "0 "), (999, "999 "), (1000, "1.00 k"), (99_949, "99.9 k"), (999_499, "999 k")]
    + [(999_500, "1.00 M"), (5e15, "5000 T")],
)
def test_quantities_have_three_digits(amount: float, text: str) -> None:
    assert quantity(amount) == text


def tick_of(second: int, sent_bytes: int | None, dense_bytes: int) -> Event:
    values = {
        "samples": 12_345 * second,
        "loss": 0.5,
        "accuracy": 0.75,
        "sent_rows": 100,
        "sent_bytes": sent_bytes,
        "dense_equivalent_bytes": dense_bytes,
    }
    return Event(Kind.TICK, 12_345 + second, float(second), values)


def test_a_run_that_saves_nothing_boasts_of_nothing() -> None:
    file = StringIO()
    steps = {"steps_total": 23_437, "samples_per_step": 64, "train_rows": 1, "test_rows": 1}
    with LiveTraining(Terminal(Console(file=file, width=120))) as live:
        live.show(Event(Kind.STARTED, 0, 0.0, steps))
        for second in range(3):
            live.show(tick_of(second, 1_990_000, 2_000_000))
    assert "MB/s" in file.getvalue()
    assert "×" not in file.getvalue()


@pytest.mark.parametrize(("rows", "left"), [(248, "120"), (256, ""), (1_408_000_127, "127")])
def test_rows_that_fill_no_batch_are_told(rows: int, left: str) -> None:
    file = StringIO()
    steps = {"steps_total": 3, "samples_per_step": 128, "train_rows": rows, "test_rows": 1}
    with LiveTraining(Terminal(Console(file=file, width=120))) as live:
        live.show(Event(Kind.STARTED, 0, 0.0, steps))
    line = f"{left} rows do not fill a batch and are left out of each epoch\n"
    assert (line in file.getvalue()) == bool(left)
    assert ("left out" in file.getvalue()) == bool(left)


def test_who_came_from_outside_is_told_if_anybody_did() -> None:
    def told(messages: int, connections: int) -> list[str]:
        came = {"foreign_messages": messages, "refused_connections": connections}
        lines = shown(80, {**SUMMARY, "network": {**SUMMARY["network"], **came}})
        return [line for line in lines if "outside" in line]

    assert told(0, 0) == []
    assert told(1_000, 0) == ["rejected from outside the run: 1,000 messages, 0 connections"]
    assert told(0, 2) == ["rejected from outside the run: 0 messages, 2 connections"]
