"""Build-up over trainers: means over seeds, what is refused, and the bound of chance."""

from pathlib import Path
from typing import Any

import buildup
import pytest

from dlrm_hybrid.report import axes
from dlrm_hybrid.report.runs import Run
from dlrm_hybrid.types import ConfigError


def a_run(method: str, trainers: int, *, pushed: float | None, pulled: float | None) -> Run:
    network: dict[str, Any] = {"pull_density": pulled}
    return Run(
        folder=Path(f"{method}-{trainers}"),
        config={
            "gradient": {"name": method, "sparsity": 0.99, "threshold": None},
            "parallel": {"trainers": trainers},
        },
        overrides=(),
        environment={},
        summary={
            "status": "complete",
            "compression": {"gradient_density": pushed},
            "network": network,
        },
        events=(),
    )


RUNS = [
    a_run("topk", 4, pushed=0.01, pulled=0.03),
    a_run("topk", 4, pushed=0.01, pulled=0.04),
    a_run("topk", 1, pushed=0.01, pulled=0.01),
    a_run("cltk", 4, pushed=0.01, pulled=0.01),
]


def test_points_are_means_by_method_and_trainers() -> None:
    found = buildup.points(RUNS)
    assert [(one.method, one.trainers, one.seeds) for one in found] == [
        *(("topk", 1, 1), ("topk", 4, 2), ("cltk", 4, 1))
    ]
    assert found[1].pulled == pytest.approx(0.035)
    assert found[1].growth == pytest.approx(3.5)


def test_runs_that_are_not_complete_do_not_count() -> None:
    running = a_run("topk", 16, pushed=None, pulled=None)
    unfinished = Run(**{**fields(running), "summary": {**running.summary, "status": "unfinished"}})
    assert buildup.points([*RUNS, unfinished]) == buildup.points(RUNS)
    with pytest.raises(ConfigError, match=r"runs of densities \[\]"):
        buildup.points([unfinished])


def test_the_table_has_a_column_for_each_number_of_trainers() -> None:
    table = buildup.table(buildup.points(RUNS))
    assert table.columns == ("method", "n = 1", "n = 4", "seeds")
    assert table.rows == (
        ("topk", "1.00 % (1.00×)", "3.50 % (3.50×)", "1"),
        ("cltk", "–", "1.00 % (1.00×)", "1"),
    )


def test_choices_by_chance_grow_until_everything_is_chosen() -> None:
    assert buildup.independent(0.01, 1) == pytest.approx(0.01)
    assert buildup.independent(0.5, 2) == pytest.approx(0.75)
    assert buildup.independent(0.01, 16) == pytest.approx(0.149, abs=5e-4)  # 14.9 times 0.01


def test_the_picture_has_both_ratios_of_each_method() -> None:
    total, growth = buildup.figure(buildup.points(RUNS)).axes
    for panel in (total, growth):
        lines = {str(line.get_label()): line for line in panel.get_lines()}
        assert list(lines["topk"].get_ydata()) == pytest.approx([1.0, 3.5])
        assert {"cltk", "independent choices"} <= lines.keys()
    told = [line for line in total.get_lines() if "DEFT" in str(line.get_label())]
    assert [line.get_ydata()[0] for line in told] == list(buildup.PUBLISHED.values())
    assert axes.svg(buildup.figure(buildup.points(RUNS))).startswith(b"<?xml")


@pytest.mark.parametrize(("pushed", "pulled"), [(None, 1.0), (0.01, None)])
def test_runs_that_counted_nothing_are_refused(pushed: float | None, pulled: float | None) -> None:
    with pytest.raises(ConfigError, match="none-2: says nothing of the density"):
        buildup.points([*RUNS, a_run("none", 2, pushed=pushed, pulled=pulled)])


def test_two_densities_are_refused() -> None:
    other = a_run("topk", 2, pushed=0.1, pulled=0.1)
    gradient = {**other.config["gradient"], "sparsity": 0.9}
    config = {**other.config, "gradient": gradient}
    with pytest.raises(ConfigError, match="runs of densities"):
        buildup.points([*RUNS, Run(**{**fields(other), "config": config})])


def fields(run: Run) -> dict[str, Any]:
    return {name: getattr(run, name) for name in Run.__slots__}
