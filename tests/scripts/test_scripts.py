"""Every script says how it is used; what was measured can be measured again."""

import json
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path

import pytest
from patience import HANG_SECONDS

from dlrm_hybrid.config.compose import values_of
from dlrm_hybrid.config.validate import validate

SCRIPTS = Path(__file__).parents[2] / "scripts"
EXAMPLES = {"own_batches.py", "serve.py", "serve_run.py", "tune.py"}  # they take no options
NAMES = [
    str(path.relative_to(SCRIPTS))
    for path in sorted(SCRIPTS.rglob("*.py"))
    if path.parent.name != "attacks" and path.name not in EXAMPLES
]


@pytest.mark.parametrize("name", NAMES)
def test_every_script_says_how_it_is_used(
    name: str, script: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    assert script(name, "--help") == 0
    is_program = 'if __name__ == "__main__"' in (SCRIPTS / name).read_text(encoding="utf-8")
    assert bool(capsys.readouterr().out) == is_program


def worlds() -> list[Sequence[str]]:
    """What benchmarks train, each once."""
    lists, plan, slow_ranks = map(import_module, ("lists", "plan", "slow_ranks"))
    listed = (
        (*one.common, *words, *beside)
        for one in lists.LISTS.values()
        for beside in (one.speed, one.scores)
        for words in one.worlds.values()
        if beside
    )
    found = [
        *listed,
        *((*slow_ranks.TRAINER_RUN, *words) for words in slow_ranks.POLICIES.values()),
        *(world.words for world in plan.WORLDS[:3]),
    ]
    return [*dict.fromkeys(map(tuple, found))]


@pytest.mark.slow
def test_worlds_of_benchmarks_are_valid() -> None:
    for words in worlds():
        validate(values_of(list(words)))


def rows_of(name: str, *arguments: object) -> list[list[str]]:
    """Cells of the table that a script prints, below its headings."""
    command = [sys.executable, str(SCRIPTS / name), *map(str, arguments)]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=HANG_SECONDS, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    lines = [line for line in done.stdout.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines[2:]]


@pytest.mark.slow
@pytest.mark.parametrize(("parallel", "seed"), [("single", "0"), ("hybrid", "2"), ("served", "5")])
def test_killed_runs_end_equal(parallel: str, seed: str, tmp_path: Path) -> None:
    options = ("--parallel", parallel, "--seed", seed, "--runs", "1", "--kills", "3")
    (row, *_) = rows_of("faults/kill_ranks.py", tmp_path / "runs", *options)
    assert (len(row[2].split(", ")), row[4]) == (3, "equal")


@pytest.mark.slow
def test_a_folder_is_followed_through_kills(tmp_path: Path) -> None:
    rows = rows_of("faults/kill_following.py", tmp_path, "--kills", "3", "--files", "3")
    assert {row[2] for row in rows} == {"equal"}


@pytest.mark.slow
def test_a_model_of_yesterday_is_worth_something(tmp_path: Path) -> None:
    rows = rows_of("rows/second_day.py", tmp_path, "--days", "3", "--rows", "4000")
    grown, fixed, alone, _, best = ([float(cell) for cell in row[1:4]] for row in rows)
    assert grown[0] == fixed[0] == alone[0]  # on the first day all learn the same
    assert best[1] < grown[1] < alone[1]
    assert int(rows[0][6]) > 0 == int(rows[1][6])


@pytest.mark.slow
def test_stopped_runs_end_equal(tmp_path: Path) -> None:
    options = ("--each", "1", "--group", "--phases", "imports", "training", "closing")
    rows = rows_of("faults/terminate.py", tmp_path / "runs", *options)
    assert sum(int(row[1]) for row in rows) >= 3
    assert {row[3] for row in rows} == {"none"}


@pytest.mark.slow
@pytest.mark.parametrize("parallel", ["single", "hybrid", "served"])
def test_runs_killed_while_they_save_end_equal(parallel: str, tmp_path: Path) -> None:
    options = ("--parallel", parallel, "--runs", "1", "--kills", "4")
    *rows, last = rows_of("faults/kill_saving.py", tmp_path / "runs", *options)
    assert "supervisor" in [row[0] for row in rows]
    assert last[2] == "4"


def test_an_attack_is_withstood(script: Callable[..., int], tmp_path: Path) -> None:
    assert script("faults/attack.py", tmp_path, "--only", "unknown-key") == 0


CHECK = SCRIPTS / "gpu/check.sh"
MEASURED = {"Dct", "TopK", "Sidco", "Dgc", "Gaussian", "RedSync", "TernGrad"}


@pytest.mark.slow
def test_the_measures_of_a_gpu_run_with_the_cpu_in_its_place(tmp_path: Path) -> None:
    options = ("--device", "cpu", "--sizes", "3000", "--figure", "5000", "--seconds", "600")
    rows = rows_of("gpu/measure.py", tmp_path, *options)
    by_size = {(row[0], row[1]): row for row in rows if " to " in row[3] and row[0] in MEASURED}
    assert len(by_size) == 2 * 6 + 1 and {name for name, _ in by_size} == MEASURED
    assert all(float(row[2]) > 0 and 0 < float(row[7]) <= 1 for row in by_size.values())
    figure = {row[0]: row[1:7] for row in rows if re.match("above|below", row[-1])}
    assert len(figure) == 4 and all(float(cell) >= 0 for row in figure.values() for cell in row)
    written = json.loads((tmp_path / "gpu_cpu.json").read_text("utf-8"))
    assert (tmp_path / "gpu_cpu.md").exists() and written["figure"]["card"][2]["density"] == 0.1


def test_a_check_of_the_gpu_finds_its_laws() -> None:
    laws = re.findall(r"^laws \d+ (\S+)", CHECK.read_text("utf-8"), flags=re.MULTILINE)
    folders = re.findall('PYTHONPATH="([^"]+)"', CHECK.read_text("utf-8"))[0].split(":")
    assert len(laws) == 3 and all((SCRIPTS.parent / law).exists() for law in laws)
    assert all(Path(one.replace("$PWD", str(SCRIPTS.parent))).is_dir() for one in folders)


def test_folders_of_scripts_are_small() -> None:
    counts = Counter(path.parent.name for path in SCRIPTS.rglob("*.py"))
    assert {folder: count for folder, count in counts.items() if count > 15} == {}
