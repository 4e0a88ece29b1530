"""The example of a study finds something, prunes, and goes on where it ended."""

import subprocess
import sys
from pathlib import Path

import pytest
from patience import HANG_SECONDS

SCRIPT = Path(__file__).parent.parent.parent / "scripts" / "examples" / "tune.py"


@pytest.mark.slow
def test_a_study_goes_on_where_it_ended(small_rows: list[str], tmp_path: Path) -> None:
    pytest.importorskip("optuna", reason="the example needs pip install optuna")
    given = [*small_rows, "parallel.world=in_process", "train.steps=16", "train.evaluate_every=8"]
    for count in (2, 1):
        ended = subprocess.run(
            [sys.executable, str(SCRIPT), str(tmp_path / "study"), str(count), *given],
            capture_output=True,
            text=True,
            timeout=HANG_SECONDS,
            check=False,
        )
        assert ended.returncode == 0, ended.stderr
        assert "best: log-loss 0." in ended.stdout
    folders = {path.name for path in (tmp_path / "study").iterdir() if path.is_dir()}
    assert folders == {"0", "1", "2"}
