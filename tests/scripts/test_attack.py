"""The attack script: an attack that is withstood, one that is not, one that cannot be run."""

import subprocess
import sys
from pathlib import Path

FAULTS = Path(__file__).parents[2] / "scripts" / "faults"
BROKEN = """
from .base import Attack, BrokenError, NotHereError

def _broken(folder):
    raise BrokenError("the wall fell")

def _not_here(folder):
    raise NotHereError("needs a moat")

ATTACKS = (Attack("trumpets", "the wall stands", _broken), Attack("boats", "dry", _not_here))
"""


def attack(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(FAULTS / "attack.py"), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_what_is_withstood_ends_with_0(tmp_path: Path) -> None:
    done = attack(str(tmp_path), "--only", "unknown-key")
    assert done.returncode == 0, done.stderr
    assert "1 attacks withstood, 0 not, 0 not run" in done.stdout


def test_what_is_not_withstood_ends_with_1(tmp_path: Path) -> None:
    package = tmp_path / "attacks"
    package.mkdir()
    for name in ("__init__.py", "base.py"):
        (package / name).write_text((FAULTS / "attacks" / name).read_text())
    (package / "walls.py").write_text(BROKEN)
    script = tmp_path / "attack.py"
    script.write_text((FAULTS / "attack.py").read_text())
    command = [sys.executable, str(script), str(tmp_path / "runs")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 1, done.stderr
    assert "**BROKEN** the wall fell" in done.stdout
    assert "not run: needs a moat" in done.stdout
    assert "1 not, 1 not run here" in done.stdout
