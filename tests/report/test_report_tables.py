"""Tables of a report: how they read, and what ranks, spans and links are told in them."""

from dataclasses import replace
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from made_runs import BEGIN, counted, make_run, plain_events, told, world_events
from rich.console import Console

from dlrm_hybrid.report import tables
from dlrm_hybrid.report.figures import (
    MAX_POINTS,
    cpu_use,
    cpu_use_of_all,
    network_use,
    time_by_span,
)
from dlrm_hybrid.report.page import build_report, html
from dlrm_hybrid.report.runs import Run, read_run
from dlrm_hybrid.report.table import Table
from dlrm_hybrid.report.tables import ranks, steps
from dlrm_hybrid.telemetry.events import Event, Kind
from dlrm_hybrid.telemetry.traffic import Phase

TABLE = Table(["what", "rows"], [["a|b", "1"], ["two\nlines", "1,000"]])


def test_markdown_is_aligned_and_no_cell_breaks_it() -> None:
    assert TABLE.markdown() == (
        "| what      |  rows |\n"
        "| --------- | ----: |\n"
        "| a\\|b      |     1 |\n"
        "| two lines | 1,000 |\n"
    )


def test_the_last_alignment_holds_for_the_rest() -> None:
    rules = [Table("abc", [], align).markdown().splitlines()[1] for align in ("l", "lr", "rlr")]
    assert rules == ["| --- | --- | --- |", "| --- | --: | --: |", "| --: | --- | --: |"]


def test_html_is_escaped_and_a_status_that_is_not_complete_stands_out() -> None:
    html = Table(["status", "n"], [["complete", "<1>"], ["failed", "2"]], "lr").html()
    assert '<tr><td>complete</td><td class="number">&lt;1&gt;</td></tr>' in html
    assert '<tr><td class="bad">failed</td><td class="number">2</td></tr>' in html


def test_a_terminal_gets_no_control_characters() -> None:
    file = StringIO()
    Console(file=file, width=80).print(Table(["\x1b[2J"], [["[red]\x07"]]).rich())
    assert "[red]" in file.getvalue()
    assert not {"\x1b", "\x07"} & set(file.getvalue())


@pytest.fixture
def world(tmp_path: Path) -> Run:
    """CPU seconds 1, 2 and 3, a tenth less than half of it in the main thread."""
    record = world_events()
    for event in record:
        if event.kind is Kind.RANK:
            number = event.values["rank"]
            event.values["thread_cpu_seconds"][Phase.TRAIN] = 0.4 * (1 + number)
            event.values["peak_rss_bytes"] = 10**9 + number * 10**8
    make_run(tmp_path / "world", [], record)
    return read_run(tmp_path / "world")


def test_a_row_for_each_role(world: Run, tmp_path: Path) -> None:
    table = ranks([world], ["world"])
    assert table is not None
    assert table.rows == [
        ("stage 0", "1", "1.00", "40.0%", "1,000"),
        ("stage 1", "1", "2.00", "40.0%", "1,100"),
        ("servers", "1", "3.00", "40.0%", "1,200"),
    ]
    make_run(tmp_path / "alone", ["name=alone"], plain_events())
    alone = read_run(tmp_path / "alone")
    assert ranks([alone], ["alone"]) is None, "nobody has reported"
    both = ranks([world, alone], ["one", "two"])
    assert both is not None
    assert [row[0] for row in both.rows] == ["one · stage 0", "one · stage 1", "one · servers"]


def test_a_row_for_each_run_where_there_would_be_too_many(world: Run) -> None:
    table = ranks([world] * 6, list("abcdef"))
    assert table is not None
    assert len(table.rows) == 6
    assert table.rows[0] == ("a · all", "3", "6.00", "40.0%", "1,200")


def test_steps_are_told_of_runs_that_have_timed_them(world: Run, tmp_path: Path) -> None:
    assert steps([world], ["world"]) is None
    record = world_events()
    for event in record:
        if event.values.get("role") in ("worker-0.1", "worker-0.0"):
            times = counted(*[1_000_000] * 90, *[10_000_000] * 10)
            event.values["step_nanoseconds"] = times.to_json()
    make_run(tmp_path / "timed", ["name=timed"], record)
    table = steps([world, read_run(tmp_path / "timed")], ["world", "timed"])
    assert table is not None
    assert table.rows == [("timed", "100", "1.90", "1.00", "9.99", "9.99", "10.0", "9.99", "–")]


def spent(wait: float, compute: float) -> dict[str, float]:
    return {**dict.fromkeys(tables.SPANS, 0.0), "wait": wait, "compute": compute}


def run_of(roles: dict[str, dict[str, float] | None], seconds: float = 2.0) -> Run:
    summary: dict[str, Any] = {
        "seconds": seconds,
        "samples_per_second": 500.0,
        "roles": {
            str(number): {"role": role, "seconds_by_span": by_span}
            for number, (role, by_span) in enumerate(roles.items())
        },
    }
    return Run(folder=Path(), config={}, overrides=(), environment={}, summary=summary, events=())


WORLD = run_of(
    {
        "server-0": spent(1.5, 0.5),
        "worker-0.0": spent(1.0, 1.0),
        "worker-0.1": spent(0.25, 1.75),
        "worker-1.0": spent(0.5, 1.5),
        "worker-1.1": spent(0.75, 1.25),
    }
)


def test_ranks_of_a_role_are_averaged_and_add_up_to_the_time_of_the_run() -> None:
    by_role = tables.microseconds_by_role(WORLD.summary)
    assert list(by_role.index) == ["stage 0", "stage 1", "servers"]
    assert by_role.loc["stage 0", "wait"] == pytest.approx(750)
    assert by_role.loc["servers", "compute"] == pytest.approx(500)
    assert list(by_role.sum(axis="columns")) == pytest.approx([1e6 / 500] * 3)


def test_a_bar_for_each_role_or_each_run_where_that_is_too_many() -> None:
    alone = run_of({"worker": spent(0.0, 2.0)})
    assert list(tables.span_bars([alone], ["one"]).index) == ["worker"]
    assert list(tables.span_bars([WORLD, alone], ["many", "one"]).index) == [
        *("many · stage 0", "many · stage 1", "many · servers", "one · worker")
    ]
    labels = [str(number) for number in range(6)]
    each = tables.span_bars([WORLD] * 6, labels)
    assert list(each.index) == labels
    assert each.loc["0", "wait"] == pytest.approx((750 + 500 + 1500) / 3)


def test_spans_of_a_last_attempt_are_of_its_own_seconds() -> None:
    restarted = run_of({"worker": spent(0.25, 0.75), "server-0": spent(0.0, 0.0)}, seconds=4.0)
    by_role = tables.microseconds_by_role(restarted.summary)
    assert list(by_role.index) == ["worker"], "a rank without a step has no share"
    assert (by_role.loc["worker", "wait"], by_role.loc["worker", "compute"]) == (500, 1500)


def test_a_last_attempt_may_only_have_evaluated(tmp_path: Path) -> None:
    """Killed in the last evaluation and resumed: what the ranks tell is of no step."""
    start, *points, score, finished = plain_events()
    again = Event(Kind.STARTED, 20, BEGIN + 40, {**start.values, "attempt": 1})
    rank = told(0, "worker", 0)
    rank.values["seconds_by_span"] = dict.fromkeys(tables.SPANS, 0.0)
    rank.values["seconds"][Phase.TRAIN] = rank.values["cpu_seconds"][Phase.TRAIN] = 0.0
    make_run(tmp_path / "run", record=[start, *points, again, score, finished, rank])
    run = read_run(tmp_path / "run")
    assert run.summary["samples_per_second"], "the first attempt has trained"
    assert list(time_by_span([run], ["run"])) == []
    assert tables.spans([run], ["run"]) is None
    assert "Time by span" not in html(build_report([run], "now"))


def test_the_table_leaves_out_what_takes_no_time() -> None:
    table = tables.spans([WORLD], ["world"])
    assert table is not None
    assert table.columns == ("µs per sample", "compute", "wait", "all")
    assert table.rows[0] == ("stage 0", "1,250", "750", "2,000")


@pytest.mark.parametrize("roles", [{}, {"worker": None}])
def test_runs_without_spans_have_none(roles: dict[str, None]) -> None:
    assert tables.span_bars([run_of(roles)], ["old"]).empty
    assert tables.spans([run_of(roles)], ["old"]) is None


def test_waiting_is_shown_by_reason_the_longest_first() -> None:
    roles = {rank["role"]: rank["seconds_by_span"] for rank in WORLD.summary["roles"].values()}
    world = run_of(roles)
    waits = [{"push": 1.5}, {"activation_gradient": 0.25, "parameters": 0.75}, {"activation": 0.25}]
    for rank, by_wait in enumerate([*waits, {"parameters": 0.5}, {"activation": 0.75}]):
        world.summary["roles"][str(rank)]["seconds_by_wait"] = by_wait
    table = tables.waits([world], ["world"])
    assert table is not None
    columns = ("µs per sample", "push", "parameters", "activation", "activation gradient", "all")
    assert table.columns == columns
    assert table.rows == (
        ("stage 0", "–", "625", "–", "125", "750"),
        ("stage 1", "–", "–", "500", "–", "500"),
        ("servers", "1,500", "–", "–", "–", "1,500"),
    )
    older = run_of({"worker": spent(1.0, 1.0)})
    assert tables.waits([older], ["older"]) is None
    both = tables.waits([world, older], ["new", "old"])
    assert both is not None
    assert [row[0] for row in both.rows] == ["new · stage 0", "new · stage 1", "new · servers"]


@pytest.mark.parametrize(
    ("raw", "told"),
    [("/x/a.parquet", "a.parquet"), (["/x/a.csv", "/x/b.csv"], "a.csv, b.csv"), (None, "–")],
)
def test_rows_scored_before_they_are_learned_are_named_by_their_files(
    raw: str | list[str] | None, told: str
) -> None:
    run = replace(run_of({}), config={"data": {"raw": raw, "progressive": True}})
    table = tables.progressive([replace(run, summary={"test": {"loss": 0.5}})], ["one"])
    assert table is not None
    assert table.rows[0][:3] == ("one", told, "0.5000")


RATE = 8000  # bits per second: 1,000 bytes


def run_told_by(*ranks: dict[str, Any], cores: int = 2) -> Run:
    told = [Event(Kind.RANK, 20, BEGIN + 50, values) for values in ranks]
    return Run(
        folder=Path(),
        config={},
        overrides=(),
        environment={"cores": cores},
        summary={},
        events=(*plain_events(), *told),
    )


def linked(role: str, series: list[list[float]], rate: int | None = RATE) -> dict[str, Any]:
    return {"role": role, "interface": {"rate_bits_per_second": rate, "series": series}}


def test_the_busier_direction_of_each_window_counts_and_the_busiest_link_is_first() -> None:
    idle = [[BEGIN + 5 + n, 1.0, 100, 50] for n in range(4)]
    busy = [[BEGIN + 5 + n, 1.0, *((900, 10, 900) if n % 2 else (300, 400, 700))] for n in range(4)]
    use = network_use(run_told_by(linked("worker-0.0", idle), linked("server-0", busy)))
    assert list(use) == ["server-0", "worker-0.0"]
    assert list(use["server-0"].index) == [0.5, 1.5, 2.5, 3.5]
    assert list(use["server-0"]) == pytest.approx([70, 90, 70, 90])
    assert list(use["worker-0.0"]) == pytest.approx([10, 10, 10, 10])


def test_links_without_a_rate_or_a_link_are_left_out() -> None:
    assert network_use(run_told_by()) == {}
    window = [[BEGIN, 1.0, 100, 50]]
    loopback = {"role": "worker-0.0", "interface": None}
    assert network_use(run_told_by(loopback, linked("server-0", window, rate=None))) == {}
    assert cpu_use_of_all(run_told_by(loopback)) is None


def test_times_without_training_have_no_point() -> None:
    series = [[BEGIN + start, 1.0, 500, 0] for start in (0, 1, 8, 9)]
    (curve,) = network_use(run_told_by(linked("server-0", series))).values()
    assert list(curve.index) == [1.25, 8.75]
    assert list(curve) == pytest.approx([50, 50])


def test_all_ranks_together_share_the_cores_they_can_use() -> None:
    ranks = [
        {"role": f"worker-0.{n}", "cpu_series": [[BEGIN, 2.0, 0.5], [BEGIN + 2, 2.0, 1.0]]}
        for n in range(3)
    ]
    for cores, share in ((2, 3 / 2), (8, 1.0)):
        run = run_told_by(*ranks, cores=cores)
        assert list(cpu_use(run)["worker-0.1"]) == pytest.approx([25, 50])
        together = cpu_use_of_all(run)
        assert together is not None
        assert list(together) == pytest.approx([share * 25, share * 50])


@given(st.lists(st.tuples(st.floats(0.05, 2), st.floats(0, 1)), min_size=1, max_size=300))
def test_few_points_keep_the_mean(windows: list[tuple[float, float]]) -> None:
    series, start = [], BEGIN
    for seconds, share in windows:
        series.append([start, seconds, 1000 * share * seconds, 0])
        start += seconds
    (curve,) = network_use(run_told_by(linked("server-0", series))).values()
    assert len(curve) <= MAX_POINTS
    whole = sum(seconds * share for seconds, share in windows) / (start - BEGIN)
    assert curve.mean() == pytest.approx(100 * whole, abs=1e-3)
