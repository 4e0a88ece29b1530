from pathlib import Path
from typing import Any

import pytest

from dlrm_hybrid.report import tables
from dlrm_hybrid.report.runs import Run


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
