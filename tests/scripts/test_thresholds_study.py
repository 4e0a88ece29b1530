from pathlib import Path

import pandas as pd
import pytest
from made_runs import make_run, plain_events, world_events
from thresholds import (
    deviations,
    figure,
    steadiness,
    threshold_names,
    thresholds,
)

from dlrm_hybrid.report.runs import Run, read_run
from dlrm_hybrid.types import ConfigError

DCT = ["gradient=dct", "parallel=hybrid", "activation=dct"]
GRADIENT, ACTIVATION = "gradient.top.1.weight", "activation.0"


@pytest.fixture
def runs(tmp_path: Path) -> list[Run]:
    """Of two sparsities, and one that only measured."""
    observed = ["parallel=hybrid", "activation.observe=0.8"]
    for number, overrides in enumerate(
        ([*DCT, "gradient.sparsity=0.9", "activation.sparsity=[0.8,0.5]"], DCT, observed)
    ):
        make_run(tmp_path / str(number), overrides, world_events())
    return [read_run(tmp_path / str(number)) for number in range(3)]


def test_deviation_is_of_the_mean_before() -> None:
    curve = pd.Series([*[2.0] * 10, 3.0, 2.1], [10 * i for i in range(1, 13)])
    assert list(deviations(curve)) == pytest.approx([0.5, 0.0])


def test_what_was_asked_of_each_name(runs: list[Run]) -> None:
    assert threshold_names(runs) == [GRADIENT, ACTIVATION]
    low, high = thresholds(runs[:2], GRADIENT)
    assert (low.label, high.label) == ("90 %", "99 %")
    assert low.curve.to_dict() == {10: 0.5, 20: 0.25}
    activations = thresholds([runs[0], runs[2]], ACTIVATION)
    assert [one.label for one in activations] == ["80 %, measured only", "80 %"]


def test_a_panel_for_each_name(runs: list[Run]) -> None:
    drawn = [thresholds(runs[:2], GRADIENT), thresholds(runs, GRADIENT)]
    assert len(figure(drawn).axes) == 2
    table = steadiness(drawn[0])
    assert table.rows[0] == (GRADIENT, "90 %", "0.500", "0.250", "–", "–")


def test_an_unknown_name_is_refused(runs: list[Run], tmp_path: Path) -> None:
    make_run(tmp_path / "plain", [], plain_events())
    with pytest.raises(ConfigError, match=f"plain: no thresholds of {GRADIENT}"):
        thresholds([*runs, read_run(tmp_path / "plain")], GRADIENT)
