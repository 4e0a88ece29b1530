"""Kills ranks, and whole programs, while they save; the newest valid checkpoint must load.

    python scripts/faults/kill_saving.py FOLDER --runs 4 --kills 50 --seed 0
    python scripts/faults/kill_saving.py FOLDER --runs 2 --kills 25 --parallel hybrid

A run of a tiny model saves every other step. While a checkpoint is being written a process is
stopped after a random time, and killed if it is still being written: every tenth time the
supervisor, else a rank. Then the program resumes from `latest`, by itself or started again, and
refuses damaged files. Prints a Markdown table by phase; exit code 1 if a run did not resume or
ended with other weights than an undisturbed run.
"""

from __future__ import annotations

import signal
import sys
import time
from collections import Counter
from pathlib import Path

import numpy as np
from fault_runs import HangError, Program, arguments, digest, send, start, unharmed, wait_gone

from dlrm_hybrid.checkpoint.folder import (
    BEST_FILE,
    CHECKPOINTS,
    LATEST_FILE,
    MANIFEST_FILE,
    complete,
    find,
    partial_folders,
)
from dlrm_hybrid.checkpoint.manifest import PREFIX
from dlrm_hybrid.checkpoint.reader import open_checkpoint
from dlrm_hybrid.report.table import Table
from dlrm_hybrid.rng import fold

KEEP = 2
SUPERVISOR = "supervisor"
WORLDS = {
    "single": ("parallel=single",),
    "hybrid": ("parallel=hybrid", "parallel.trainers=1", "parallel.cuts=[top.1]"),
    "served": (
        *("parallel=hybrid", "parallel.trainers=1", "parallel.cuts=[]", "embedding=served"),
        *("parallel.table_servers=1", "embedding.staleness=3", "embedding.storage=mmap"),
    ),
}
ROLES = {
    "single": ("worker-0",),
    "hybrid": ("worker-0.0", "worker-0.1", "server-0"),
    "served": ("worker-0.0", "server-0", "tables-0"),
}
EVERY_TENTH = 10
LONGEST_SECONDS = 0.1
GONE_SECONDS = 10.0
PATIENCE_SECONDS = 180.0  # the start of the program included
POLL_SECONDS = 0.0002


def main() -> None:
    """Make the runs, print the table."""
    parser = arguments(__doc__, runs=2, kills=10, seed=0)
    parser.add_argument("--parallel", choices=tuple(WORLDS), default="single")
    options = parser.parse_args()
    draw = np.random.default_rng(fold(options.seed, "saving"))
    kills: int = options.kills
    steps = 15 * kills
    given = [*WORLDS[options.parallel], f"train.steps={steps}", "train.epochs=100"]
    given += ["checkpoint.every=2", f"checkpoint.keep={KEEP}", "train.evaluate_every=0"]
    given += [f"checkpoint.max_restarts={kills}"]
    whole = unharmed(options.folder / f"unbroken-{options.parallel}-{kills}", given)
    found: Counter[tuple[str, str]] = Counter()
    faults: list[str] = []
    for number in range(options.runs):
        folder = options.folder / f"saving-{options.parallel}-{options.seed}-{number}"
        try:
            found += _harmed(folder, given, kills, ROLES[options.parallel], draw)
            if digest(folder, steps) != digest(whole, steps):
                faults.append(f"{folder}: other weights")
        except HangError as error:
            faults.append(str(error))
        print(f"run {number}: {found.total()} kills {faults}", file=sys.stderr)
    rows = [[role, doing, str(count)] for (role, doing), count in sorted(found.items())]
    rows.append(["all", "", str(found.total())])
    print(Table(("killed", "while", "times"), rows, "llr").markdown(), end="")
    for fault in faults:
        print(f"\n{fault}")
    sys.exit(bool(faults) or not found)


def _harmed(
    folder: Path, given: list[str], kills: int, roles: tuple[str, ...], draw: np.random.Generator
) -> Counter[tuple[str, str]]:
    found: Counter[tuple[str, str]] = Counter()
    program = start(folder, given)
    for attempt in range(kills):
        role = SUPERVISOR if attempt % EVERY_TENTH == 0 else str(draw.choice(roles))
        doing = _strike(program, role, attempt, draw)
        if doing is None:
            break  # it came to its end first
        found[role, doing] += 1
        if role == SUPERVISOR:
            program.process.wait()
            left = wait_gone(list(program.pids().values()), GONE_SECONDS)
            if left:
                raise HangError(f"{folder}: left {left}")
            _read_latest(folder)
            program = start(folder, [*given, "checkpoint.resume=auto"])
    if program.end():
        raise HangError(f"{folder}: exit code {program.process.returncode}")
    return found


def _strike(program: Program, role: str, attempt: int, draw: np.random.Generator) -> str | None:
    """Kill a process in the middle of a save of this attempt; what was going on."""
    root = program.folder / CHECKPOINTS
    until = time.monotonic() + PATIENCE_SECONDS
    saves: set[Path] = set()
    wait_for = int(draw.integers(1, 5))
    while program.process.poll() is None:
        if time.monotonic() > until:
            raise HangError(f"{program.folder}: nothing to strike in {PATIENCE_SECONDS:g} s")
        saves.update(_under_way(root, attempt))
        if len(saves) >= wait_for:
            saves.clear()
            time.sleep(draw.uniform(0.0, LONGEST_SECONDS) ** 2 / LONGEST_SECONDS)  # mostly soon
            pid = program.process.pid if role == SUPERVISOR else program.pids()[role]
            send(pid, signal.SIGSTOP)
            doing = _doing(root, attempt)
            if doing is not None:
                send(pid, signal.SIGKILL)
                return doing
            send(pid, signal.SIGCONT)
        time.sleep(POLL_SECONDS)
    return None


def _under_way(root: Path, attempt: int) -> list[Path]:
    return [one for one in partial_folders(root) if one.suffixes[0] == f".{attempt}"]


def _doing(root: Path, attempt: int) -> str | None:
    """How far the save is, or None between two of them."""
    try:
        for partial in _under_way(root, attempt):
            sealed = (partial / MANIFEST_FILE).exists()
            return "its folder waits for its name" if sealed else "ranks write"
        folders = complete(root)
        latest = root / LATEST_FILE
        named = latest.read_text(encoding="ascii").strip() if latest.exists() else ""
        if folders and folders[-1].name != named:
            return "latest has not moved"
        if any((root / f".{file}.partial").exists() for file in (LATEST_FILE, BEST_FILE)):
            return "latest moves"
        if len([one for one in root.iterdir() if one.name.startswith(PREFIX)]) > KEEP:
            return "older ones go"
    except FileNotFoundError:  # another rank goes on
        return None
    return None


def _read_latest(folder: Path) -> None:
    """Every byte of the checkpoint that a run would go on from."""
    root = folder / CHECKPOINTS
    if (root / LATEST_FILE).exists():
        checkpoint = open_checkpoint(find(root))
        for name in checkpoint.manifest.tensors:
            checkpoint.tensor(name)


if __name__ == "__main__":
    main()
