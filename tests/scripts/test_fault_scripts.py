"""The scripts that inject faults into runs, for a moment; hours are for a person to start."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from emulation_hosts import needs_namespaces

SCRIPTS = Path(__file__).parents[2] / "scripts" / "faults"


def lines(script: str, *arguments: str | Path) -> list[str]:
    """Of the table that a script prints when nothing was wrong."""
    done = subprocess.run(
        [sys.executable, SCRIPTS / script, *arguments], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()[2:]


@pytest.mark.slow
@pytest.mark.parametrize(("parallel", "seed"), [("single", "0"), ("hybrid", "2"), ("served", "5")])
def test_killed_runs_end_equal(parallel: str, seed: str, tmp_path: Path) -> None:
    options = ("--parallel", parallel, "--seed", seed, "--runs", "1", "--kills", "3")
    line, *_ = lines("kill_ranks.py", tmp_path / "runs", *options)
    _, _, _, kills, _, end, _ = (cell.strip() for cell in line.split("|"))
    assert len(kills.split(", ")) == 3
    assert end == "equal"


@pytest.mark.slow
@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to take down a link in a namespace")
@needs_namespaces
def test_a_link_that_is_cut_for_a_moment_or_for_good(tmp_path: Path) -> None:
    options = ("--roles", "worker-0.1", "server-0", "--faults", "link down", "--while", "3")
    found = lines("links.py", tmp_path / "runs", *options, "--last", "6")
    cells = [[cell.strip() for cell in line.split("|")[1:-1]] for line in found]
    assert [(one[0], one[2], one[3]) for one in cells] == [
        *(("worker-0.1", "3 s", "0"), ("worker-0.1", "good", "1")),
        *(("server-0", "3 s", "0"), ("server-0", "good", "1")),
    ]
    assert "(rank " in cells[1][5]
    assert "(rank " in cells[3][5]


@pytest.mark.slow
def test_stopped_runs_end_equal(tmp_path: Path) -> None:
    options = ("--each", "1", "--group", "--phases", "imports", "training", "closing")
    found = lines("terminate.py", tmp_path / "runs", *options)
    assert sum(int(line.split("|")[2]) for line in found) >= 3
    assert all(line.split("|")[4].strip() == "none" for line in found)


@pytest.mark.slow
@pytest.mark.parametrize("parallel", ["single", "hybrid", "served"])
def test_runs_killed_while_they_save_end_equal(parallel: str, tmp_path: Path) -> None:
    options = ("--parallel", parallel, "--runs", "1", "--kills", "4")
    *rows, last = lines("kill_saving.py", tmp_path / "runs", *options)
    assert "supervisor" in [row.split("|")[1].strip() for row in rows]
    assert last.split("|")[3].strip() == "4"


@pytest.mark.slow
def test_a_run_whose_trainers_are_killed_or_leave_learns_all(tmp_path: Path) -> None:
    options = ("--kills", "1", "--leaves", "1", "--steps", "400")
    *rows, last = lines("kill_trainers.py", tmp_path / "runs", *options)
    assert [row.split("|")[1].strip() for row in rows if row] == ["1 kills", "1 leaves"]
    assert last.endswith("; all learned")
