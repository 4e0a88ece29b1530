"""Every script says how it is used; studies read runs; what was measured can be measured again."""

import runpy
import subprocess
import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from itertools import chain
from pathlib import Path

import pytest
from patience import HANG_SECONDS

from dlrm_hybrid.config.compose import values_of
from dlrm_hybrid.config.validate import validate
from dlrm_hybrid.run import training

SCRIPTS = Path(__file__).parents[2] / "scripts"
EXAMPLES = {"own_batches.py", "serve.py", "tune.py"}  # they take no options
NAMES = [
    str(path.relative_to(SCRIPTS))
    for path in sorted(SCRIPTS.rglob("*.py"))
    if path.parent.name != "attacks" and path.name not in EXAMPLES
]
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


@pytest.mark.parametrize("name", NAMES)
def test_every_script_says_how_it_is_used(
    name: str, script: Script, capsys: pytest.CaptureFixture[str]
) -> None:
    assert script(name, "--help") == 0
    is_program = 'if __name__ == "__main__"' in (SCRIPTS / name).read_text(encoding="utf-8")
    assert bool(capsys.readouterr().out) == is_program


@pytest.mark.parametrize(
    ("study", "options", "runs"),
    [
        ("paper_tables", ["--output", "page.md"], ["base_0", "base_1", "dp_0", "dp_1", "mp_0"]),
        ("estimates", ["--output", "page.png"], ["dp_0"]),
        ("buildup", ["--output", "page.png"], ["dp_0"]),
        ("gap", ["--output", "page.png", "--baseline", "RUNS/base_0", "--runs"], ["dp_0", "mp_0"]),
        ("thresholds", ["--output", "page.png", "--names", "activation.1", "--runs"], ["mp_0"]),
    ],
)
def test_studies_read_runs(
    study: str,
    options: list[str],
    runs: list[str],
    paper_runs: Path,
    script: Script,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    given = [one.replace("RUNS", str(paper_runs)) for one in options]
    assert script(f"studies/{study}.py", *given, *(paper_runs / run for run in runs)) == 0
    page = tmp_path / options[1]
    assert page.read_bytes().startswith(b"\x89PNG" if page.suffix == ".png" else b"#")


def worlds() -> list[Sequence[str]]:
    """What benchmarks train, each once."""
    dsp, plan, production, threads = map(import_module, ("dsp", "plan", "production", "threads"))
    stale = ((*world, *dsp.SCHEDULES["4,2,0"]) for world in dsp.WORLDS.values())
    parts = chain.from_iterable(part.values() for part in production.PARTS.values())
    found = [
        *stale,
        *((*production.WORLD, *production.TIMED, *case.words) for case in parts),
        *((*threads.RUN, *threads.of_world(name, 128, 25_600)) for name in threads.WORLDS),
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


def test_an_attack_is_withstood(script: Script, tmp_path: Path) -> None:
    assert script("faults/attack.py", tmp_path, "--only", "unknown-key") == 0
