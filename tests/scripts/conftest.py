"""Scripts, run in this process."""

import runpy
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from dlrm_hybrid.run import training

SCRIPTS = Path(__file__).parents[2] / "scripts"
Script = Callable[..., int]


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Script:
    """Run a script as a program would be, in this process: its exit code."""

    def run_here(name: str, *arguments: object) -> int:
        path = SCRIPTS / name
        monkeypatch.syspath_prepend(path.parent)
        monkeypatch.setattr(sys, "argv", [str(path), *map(str, arguments)])
        monkeypatch.setattr(training, "TRAIN_RANK", training.TRAIN_RANK)  # some set another
        try:
            runpy.run_path(str(path), run_name="__main__")
        except SystemExit as exit:
            return int(exit.code or 0)
        return 0

    return run_here
