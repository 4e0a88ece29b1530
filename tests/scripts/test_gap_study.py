from pathlib import Path

import pandas as pd
import pytest
from gap import averaged, gap, gaps, smooth
from made_runs import evaluated, make_run, progress

from dlrm_hybrid.report.runs import Run, read_run
from dlrm_hybrid.types import ConfigError


def made(folder: Path, seed: int, loss: float) -> Run:
    record = [progress(10, loss), progress(20, loss), evaluated(20, 2 * loss)]
    make_run(folder, [f"train.seed={seed}"], record)
    return read_run(folder)


def test_arithmetic() -> None:
    loss = pd.Series({100 * i: float(i) for i in range(1, 21)})
    assert smooth(loss).to_dict() == {100 * i: i - 0.5 for i in range(2, 21)}
    higher = gap(pd.Series({1: 1.5, 2: 3.0, 3: 1.0}), pd.Series({2: 2.0, 3: 1.0}))
    assert higher.to_dict() == {2: 50.0, 3: 0.0}
    assert averaged([pd.Series({1: 1.0, 2: 2.0}), pd.Series({2: 4.0})]).to_dict() == {2: 3.0}


def test_runs_are_held_against_the_baseline_of_their_seed_and_averaged(tmp_path: Path) -> None:
    bases = [made(tmp_path / f"base_{seed}", seed, 1.0 + seed) for seed in (0, 1)]
    runs = [made(tmp_path / f"run_{seed}", seed, 2.0 + seed) for seed in (0, 1)]
    (line,) = gaps(bases, runs)
    assert line.label == "run, 2 seeds"
    assert line.curve is not None and line.curve.to_dict() == {10: 75.0, 20: 75.0}
    assert line.dots is not None and line.dots.to_dict() == {20: 75.0}


def test_a_seed_without_baseline_is_named(tmp_path: Path) -> None:
    base, run = made(tmp_path / "base_0", 0, 1.0), made(tmp_path / "run_1", 1, 1.0)
    with pytest.raises(ConfigError, match=r"run_1: no baseline has its train.seed = 1"):
        gaps([base], [run])
