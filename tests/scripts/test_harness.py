import dataclasses
import subprocess
import sys

import harness as table
import pytest

from dlrm_hybrid.telemetry import machine

ROWS = [
    {"what": "one|two", "rows": 45_800_000, "seconds": 1.23456, "peak": None},
    {"what": "b", "rows": 7, "seconds": 999.7, "peak": 0.001},
]


def test_page_has_title_command_machine_and_an_aligned_table():
    here = machine.describe()
    page = table.render("Prepare", here, "python scripts/benchmarks/step.py", ROWS)
    lines = page.splitlines()
    assert lines[0] == "# Prepare"
    assert "python scripts/benchmarks/step.py" in lines
    assert any(here.cpu in line for line in lines)
    grid = [line for line in lines if line.startswith("|")]
    assert len({len(line) for line in grid}) == 1
    assert grid[0].split() == ["|", "what", "|", "rows", "|", "seconds", "|", "peak", "|"]
    assert grid[2].split(" | ")[1:] == ["45,800,000", "   1.23", "    – |"]
    assert "one\\|two" in grid[2]
    assert " 1,000 " in grid[3]


def test_section_follows_a_page():
    text = table.section("Loader", ROWS, "Measured with a warm page cache.")
    assert text.startswith("\n## Loader\n\n| what")
    assert text.endswith("|\n\nMeasured with a warm page cache.\n")
    assert table.section("Loader", ROWS, "").endswith("|\n")


def test_rows_of_other_columns_are_refused():
    with pytest.raises(ValueError, match="row 1 has the columns"):
        table.table([{"a": 1}, {"b": 1}])
    with pytest.raises(ValueError, match="at least one row"):
        table.table([])


def test_spread_names_the_median_and_both_ends():
    assert table.spread([3.0, 1.0, 2000.0], 1) == "3.0 (1.0 – 2,000.0)"


def test_description_is_frozen_and_loads_no_torch():
    here = machine.describe()
    assert here.cores >= 1
    assert here.versions["numpy"]
    with pytest.raises(dataclasses.FrozenInstanceError):
        here.cores = 0  # pyright: ignore[reportAttributeAccessIssue]
    code = (
        "import sys; from dlrm_hybrid.telemetry.machine import describe; describe();"
        " sys.exit('torch' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_package_that_is_missing_and_a_folder_without_git_are_unknown(tmp_path):
    assert machine._version("no-such-package-anywhere") is None
    assert machine._git_sha(tmp_path) is None
