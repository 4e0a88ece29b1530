"""A run that fails is not taken for one that diverged."""

import subprocess
from collections.abc import Sequence
from pathlib import Path

import learning_rates
import pytest

from dlrm_hybrid.types import ExitCode


def test_a_run_that_diverges_has_no_loss(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def diverges(*_: object) -> None:
        raise subprocess.CalledProcessError(ExitCode.DIVERGED, "train")

    monkeypatch.setattr(learning_rates, "train_once", diverges)
    assert learning_rates.train(tmp_path / "run") is None


def test_a_run_that_fails_ends_the_script(
    tmp_path: Path, small_rows: Sequence[str], capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="run: exit code 2"):
        learning_rates.train(tmp_path / "run", *small_rows, "optimizer.rate=0.1")
    assert "optimizer.rate" in capfd.readouterr().err
