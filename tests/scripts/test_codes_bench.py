"""What coding costs is measured by a script that names functions there are, and times them."""

import os
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).parents[2] / "scripts" / "benchmarks"


def test_what_is_timed_exists(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(SCRIPTS)
    for module, names in import_module("codes").PARTS.items():
        for name in names:
            found = import_module(f"dlrm_hybrid.{module}")
            for part in name.split("."):
                found = getattr(found, part)
            assert callable(found)


@pytest.mark.slow
def test_every_function_that_was_called_has_a_row(small_rows: list[str], tmp_path: Path) -> None:
    levels = ("+experiment=dct_hybrid", "gradient.precision=levels", "activation.bits=4")
    command = [sys.executable, str(SCRIPTS / "codes.py"), str(tmp_path / "run"), *small_rows]
    done = subprocess.run(
        [*command, *levels, "train.steps=40"], capture_output=True, text=True, env=dict(os.environ)
    )
    assert done.returncode == 0, done.stdout + done.stderr
    rows = [line.split(" | ") for line in done.stdout.splitlines() if line.startswith("| ")]
    calls = {row[1]: float(row[2]) for row in rows if row[1].endswith(("kept", "update"))}
    # Two trainers have two cuts; three stages push to one server each.
    assert calls["encode_kept"] == calls["decode_kept"] == 4
    assert calls["list_update"] == calls["read_update"] >= 6
