"""Attacks by signals: to the whole process group, and to processes the program starts."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

from .base import SMALL, TIMEOUT_SECONDS, Attack, BrokenError, expect, members, start, wait

POLL_SECONDS = 0.005
LONG = (*SMALL, "train.epochs=500", "telemetry.every=1", "hydra.run.dir=run")
WORLD = ("parallel=hybrid", "parallel.trainers=1", "parallel.cuts=[bottom.1]")
Phase = Callable[[Path, int], bool]


def await_phase(phase: Phase, program: subprocess.Popen[bytes], folder: Path) -> None:
    """Return as soon as the program is in a phase."""
    until = time.monotonic() + TIMEOUT_SECONDS
    while not phase(folder / "run", program.pid):
        expect(program.poll() is None, f"it ended with {program.returncode} before the attack")
        if time.monotonic() > until:
            raise BrokenError("the phase did not come")
        time.sleep(POLL_SECONDS)


def composes(run: Path, session: int) -> bool:
    """The run has a folder."""
    return run.exists()


def imports(run: Path, session: int) -> bool:
    """The forkserver is there."""
    return _forkserver(session) is not None


def starts_ranks(run: Path, session: int) -> bool:
    """Ranks have been asked for."""
    return (run / "log").exists()


def trains(run: Path, session: int) -> bool:
    """A step is on record."""
    record = run / "events.jsonl"
    return record.exists() and '"kind": "progress"' in record.read_text(encoding="utf-8")


def _steps(run: Path) -> int:
    summary = run / "summary.json"
    return json.loads(summary.read_text(encoding="utf-8"))["steps"] if summary.exists() else 0


def _forkserver(session: int) -> int | None:
    for one in members(session):
        if any("forkserver" in word for word in one.cmdline()):
            return one.pid
    return None


def _signal_group(
    folder: Path, number: signal.Signals, phase: Phase, code: int, more: tuple[str, ...]
) -> str:
    program = start(["train", *LONG, *more], folder)
    await_phase(phase, program, folder)
    os.killpg(program.pid, number)
    ended = wait(program, folder)
    expect(ended.code == code, f"exit code {ended.code}: {ended.errors[-300:]}")
    saved = (folder / "run" / "checkpoints" / "latest").exists()
    # Ranks that have not met have no step to lose.
    expect(saved or code != 75 or not _steps(folder / "run"), "steps, and no checkpoint")
    return f"exit {code}, {'a' if saved else 'no'} checkpoint"


def _kill_forkserver(folder: Path, phase: Phase) -> str:
    program = start(["train", *SMALL, "hydra.run.dir=run", "checkpoint.max_restarts=3"], folder)
    await_phase(phase, program, folder)
    pid = _forkserver(program.pid)
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    ended = wait(program, folder)
    expect(ended.code == 0, f"exit code {ended.code}: {ended.errors[-300:]}")
    restarts = ended.output.count("; restart ")
    expect(restarts > 0 or phase is imports, ended.output[-300:])  # another may be made unseen
    return f"{restarts} restarts, complete"


ATTACKS = (
    *(
        Attack(
            f"group-{number.name.lower()}-{phase.__name__}{'-world' if more else ''}",
            f"exit {code}",
            partial(_signal_group, number=number, phase=phase, code=code, more=more),
        )
        for number, code in ((signal.SIGTERM, 75), (signal.SIGINT, 130))
        for phase in (composes, imports, starts_ranks, trains)
        for more in ((), WORLD)
    ),
    *(
        Attack(
            f"forkserver-killed-{phase.__name__}",
            "a restart, exit 0",
            partial(_kill_forkserver, phase=phase),
        )
        for phase in (imports, trains)
    ),
)
