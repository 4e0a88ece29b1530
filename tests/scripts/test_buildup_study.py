"""Build-up over trainers: means over seeds, what is refused, and the bound of chance."""

import buildup
import pytest
from study_runs import study_run

from dlrm_hybrid.report import axes
from dlrm_hybrid.report.runs import Run
from dlrm_hybrid.types import ConfigError


def a_run(
    method: str,
    trainers: int,
    *,
    pushed: float | None,
    pulled: float | None,
    sparsity: float = 0.99,
    status: str = "complete",
    loss: float = 0.5,
) -> Run:
    summary = {
        "status": status,
        "test": {"loss": loss},
        "compression": {"gradient_density": pushed},
        "network": {"by_class": {}, "pull_density": pulled},
    }
    return study_run(method, sparsity=sparsity, trainers=trainers, summary=summary)


RUNS = [
    a_run("topk", 4, pushed=0.01, pulled=0.03),
    a_run("topk", 4, pushed=0.01, pulled=0.04, loss=0.52),
    a_run("topk", 1, pushed=0.01, pulled=0.01),
    a_run("cltk", 4, pushed=0.01, pulled=0.01),
]


def test_points_are_means_by_method_and_trainers() -> None:
    found = buildup.points(RUNS)
    assert [(one.method, one.trainers, one.seeds) for one in found.itertuples()] == [
        *(("topk", 1, 1), ("topk", 4, 2), ("cltk", 4, 1))
    ]
    assert found["pulled"][1] == pytest.approx(0.035)
    assert found["growth"][1] == pytest.approx(3.5)


def test_runs_that_are_not_complete_do_not_count() -> None:
    unfinished = a_run("topk", 16, pushed=None, pulled=None, status="unfinished")
    assert buildup.points([*RUNS, unfinished]).equals(buildup.points(RUNS))
    with pytest.raises(ConfigError, match=r"runs of densities \[\]"):
        buildup.points([unfinished])


def test_the_table_has_a_column_for_each_number_of_trainers() -> None:
    table = buildup.table(buildup.points(RUNS))
    assert table.columns == ("method", "n = 1", "n = 4", "loss, n = 1", "loss, n = 4", "seeds")
    assert table.rows == (
        ("topk", "1.00 % (1.00×)", "3.50 % (3.50×)", "0.5000", "0.5100 ± 0.0141", "1"),
        ("cltk", "–", "1.00 % (1.00×)", "–", "0.5000", "1"),
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
    with pytest.raises(ConfigError, match="none-.*: says nothing of the density"):
        buildup.points([*RUNS, a_run("none", 2, pushed=pushed, pulled=pulled)])


def test_two_densities_are_refused() -> None:
    with pytest.raises(ConfigError, match="runs of densities"):
        buildup.points([*RUNS, a_run("topk", 2, pushed=0.1, pulled=0.1, sparsity=0.9)])
