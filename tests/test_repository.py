"""What git leaves out, and what a wheel holds."""

import subprocess
import sys
from pathlib import Path
from zipfile import ZipFile

import pytest

ROOT = Path(__file__).parent.parent


def is_ignored(name: str) -> bool:
    command = ["git", "-C", str(ROOT), "check-ignore", "--quiet", "--no-index", name]
    return subprocess.run(command, check=False).returncode == 0


@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="not a checkout of git")
@pytest.mark.parametrize(
    ("name", "ignored"),
    [
        *((f"{folder}train{end}", True) for folder in ("", "x/") for end in (".txt", ".txt.gz")),
        *((name, True) for name in ("train_1.txt.zst", "day_0.gz", "data/x/train.tsv", "data/y")),
        *((name, True) for name in ("report.html", "report.md", "runs/a/b", "keys.json")),
        *((name, False) for name in ("data/README.md", "docs/report.md", "tests/data/x.py")),
    ],
)
def test_git_leaves_out_rows_and_results(name: str, ignored: bool) -> None:
    assert is_ignored(name) == ignored


def test_a_wheel_holds_licence_and_configuration(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    (wheel,) = tmp_path.glob("*.whl")
    names = ZipFile(wheel).namelist()
    assert [name for name in names if name.endswith("licenses/LICENSE")]
    assert "dlrm_hybrid/conf/config.yaml" in names
    outside = [name for name in names if not name.startswith(("dlrm_hybrid/", "dlrm_hybrid-"))]
    assert outside == []
