"""k̂ / k from what events say was sent, its figures, and runs of which there is none."""

from dataclasses import replace
from pathlib import Path

import estimates
import pandas as pd
import pytest

from dlrm_hybrid.report import axes
from dlrm_hybrid.report.runs import Run
from dlrm_hybrid.telemetry import compression
from dlrm_hybrid.telemetry.events import Event, Kind
from dlrm_hybrid.types import ConfigError

RULE = {"threshold": "dgc", "lifespan": 1, "scope": "tensor", "sidco": None, "correction": None}
FITTED = {"sidco": {"distribution": "gamma"}, "scope": "stage"}


def event(step: int, sent: int) -> Event:
    """A tenth of what is sent is of a small tensor; a boundary sends too."""
    counts = {
        "gradient.top.1.weight": compression.counted(9_000, sent - sent // 10, 0.0, 0),
        "gradient.top.1.bias": compression.counted(1_000, sent // 10, 0.0, 0),
        "activation.0": compression.counted(400, 400, 0.0, 0),
    }
    return Event(Kind.COMPRESSION, step, float(step), {"of": compression.values_of(counts)})


def a_run(name: str, sparsity: float, *sent: int, **options: object) -> Run:
    gradient = {"name": name, "sparsity": sparsity, **RULE, **options}
    return Run(
        folder=Path(f"{name}-{sparsity}"),
        config={"gradient": gradient},
        overrides=(),
        environment={},
        summary={"status": "complete"},
        events=tuple(event(step, one) for step, one in enumerate(sent, 1)),
    )


def test_quality_is_what_left_over_what_was_asked_for() -> None:
    runs = [
        a_run("dct", 0.99, 100, 110, 50),
        a_run("dct", 0.9, 1000, 2000, 500, lifespan=1000),
        a_run("sidco", 0.9, 900, 1000, 1000, **FITTED),
    ]
    sampled, lived, fitted = estimates.estimates(runs)
    assert [one.estimator for one in (sampled, lived, fitted)] == ["dgc", "dct", "sidco-GP, stage"]
    assert list(sampled.curve.index) == [1, 2, 3]
    assert list(sampled.curve) == pytest.approx([1.0, 1.1, 0.5])
    assert list(lived.curve) == pytest.approx([1.0, 2.0, 0.5])


def test_the_table_tells_the_spread_of_all_points() -> None:
    found = estimates.estimates(
        [a_run("dct", 0.99, *range(85, 186)), a_run("topk", 0.9, 1000, 1000)]
    )
    table = estimates.table(found)
    assert table.rows == (
        ("0.1", "topk", "1.00", "1.00", "1.00 – 1.00", "100%"),
        ("0.01", "dgc", "1.35", "1.35", "0.90 – 1.80", "36%"),
    )


def test_a_running_mean_begins_with_the_first_point() -> None:
    curve = pd.Series([4.0, 2.0, *[1.0] * 38])
    means = list(estimates.smoothed(curve))
    assert means[:2] == [4.0, 3.0]
    assert means[19] == pytest.approx(1.2)
    assert means[21:] == [1.0] * 19


def test_the_picture_has_a_panel_for_each_estimator() -> None:
    runs = [a_run("dct", density, 300, 200, 1) for density in (0.9, 0.99)]
    picture = estimates.figure(estimates.estimates([*runs, a_run("topk", 0.9, 1000, 1000)]))
    titles = [panel.get_title(loc="left") for panel in picture.axes]
    assert titles == ["dgc", "topk"]
    drawn = [value for line in picture.axes[0].get_lines() for value in line.get_ydata()]
    assert min(drawn) == estimates.SHOWN[0], "what is out of sight lies on the edge"
    assert axes.svg(picture).startswith(b"<?xml")


def test_runs_without_one_density_to_come_near_to_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"none-0\.0: nothing of its gradients was held back"):
        estimates.estimates([a_run("none", 0.0, 10_000)])
    with pytest.raises(ConfigError, match=r"topk-0\.9: nothing of its gradients"):
        estimates.estimates([a_run("topk", 0.9)])
    with pytest.raises(ConfigError, match=r"gradient=dgc asks for other densities"):
        estimates.estimates([a_run("dgc", 0.99, 100, correction={"warmup_steps": 100})])
    again = replace(a_run("topk", 0.9, 1000), folder=Path("again"))
    with pytest.raises(ConfigError, match=r"two runs of topk at density 0\.1"):
        estimates.estimates([a_run("topk", 0.9, 1000), again])
