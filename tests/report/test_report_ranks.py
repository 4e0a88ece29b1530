"""What the ranks of a role took, as a table."""

from pathlib import Path

import pytest
from made_runs import counted, make_run, plain_events, world_events

from dlrm_hybrid.report.runs import Run, read_run
from dlrm_hybrid.report.tables import ranks, steps
from dlrm_hybrid.telemetry.events import Kind
from dlrm_hybrid.telemetry.traffic import Phase


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
