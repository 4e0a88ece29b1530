"""Methods beside each other: points over seeds, held against whole gradients of the same seed."""

from dataclasses import replace
from pathlib import Path

import methods
import pytest
from study_runs import study_run

from dlrm_hybrid.report import axes
from dlrm_hybrid.report.runs import Run
from dlrm_hybrid.types import ConfigError


def a_run(
    method: str, sparsity: float, seed: int, loss: float, *, push: int = 1000, threshold: str = ""
) -> Run:
    summary = {
        "test": {"loss": loss},
        "compression": {"gradient_density": None if method == "none" else 1.1 * (1 - sparsity)},
        "network": {
            "by_class": {"gradient_push": {"bytes": push}, "parameter_pull": {"bytes": 500}}
        },
    }
    return study_run(
        method, sparsity=sparsity, seed=seed, threshold=threshold or None, summary=summary
    )


RUNS = [
    a_run("topk", 0.99, 0, 0.505, push=20),
    a_run("topk", 0.99, 1, 0.51, push=20),
    a_run("topk", 0.9, 0, 0.501, push=200),
    a_run("dct", 0.9, 0, 0.5, push=100, threshold="sidco"),
    a_run("none", 0.0, 0, 0.5),
    a_run("none", 0.0, 1, 0.5),
]


def test_points_are_methods_at_densities_over_seeds() -> None:
    found = methods.points(RUNS)
    assert [(point.method, round(point.density, 3)) for point in found.itertuples()] == [
        *(("none", 1.0), ("topk", 0.1), ("topk", 0.01), ("dct, sidco", 0.1))
    ]
    low = found.loc[2]
    assert low.gaps == pytest.approx([1.0, 2.0])
    assert (low.push_bytes, low.pull_bytes, low.num_bytes) == pytest.approx((0.2, 5.0, 5.2))
    assert low.cpu_microseconds == pytest.approx(20.0)
    assert low.sent == pytest.approx(0.011)


def test_the_table_compares_with_whole_gradients() -> None:
    table = methods.table(methods.points(RUNS))
    by_row = {row[:2]: dict(zip(table.columns, row, strict=True)) for row in table.rows}
    row = by_row["topk", "0.01"]
    assert row["against none, %"] == "+1.50 ± 0.71"
    assert row["fewer bytes"] == "2.9×"  # 15 bytes a sample against 5.2
    assert by_row["none", "1"]["sent"] == "all"
    assert by_row["dct, sidco", "0.1"]["against none, %"] == "+0.00"


def test_the_picture_has_a_line_for_each_method() -> None:
    picture = methods.figure(methods.points(RUNS))
    names = {text for panel in picture.axes for text in panel.get_legend_handles_labels()[1]}
    assert names == {"topk", "dct, sidco"}
    assert axes.svg(picture).startswith(b"<?xml")


def test_runs_that_differ_otherwise_are_not_averaged() -> None:
    own = a_run("topk", 0.9, 0, 0.501)
    union = replace(a_run("topk", 0.9, 0, 0.502), folder=Path("union"))
    with pytest.raises(ConfigError, match="union: another run of topk at density 0.1 .* = 0 and"):
        methods.points([*RUNS, union])
    told = {**own.config, "gradient": {**own.config["gradient"], "aggregation": "union"}}
    found = methods.points([*RUNS, own, replace(union, config=told)])
    (gaps,) = found[found["method"] == "topk, union"]["gaps"]
    assert gaps == pytest.approx([0.4])


def test_a_seed_without_whole_gradients_is_named() -> None:
    with pytest.raises(ConfigError, match=r"topk-0\.9-.*-7: no run with gradient=none has .* = 7"):
        methods.points([*RUNS, a_run("topk", 0.9, 7, 0.5)])


def test_bytes_that_were_not_counted_are_asked_for() -> None:
    run = a_run("topk", 0.9, 0, 0.501)
    run.summary["network"]["by_class"].pop("parameter_pull")
    with pytest.raises(ConfigError, match=r"parameter_pull was not counted"):
        methods.points([run, *RUNS])
