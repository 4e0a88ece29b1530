"""Base of all attacks: their type, and how they run the program."""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

TIMEOUT_SECONDS = 120.0
SMALL = (
    *("model=dlrm_small", "data.rows=7000", "data.processes=1", "train.batch_size=64"),
    "telemetry.tensorboard=false",
)


class BrokenError(Exception):
    """The program did not withstand an attack."""


class NotHereError(Exception):
    """This machine cannot run the attack; the message says what it lacks."""


@dataclass(frozen=True, slots=True)
class Attack:
    """Something hostile or unlucky that the program must withstand.

    Attributes:
        name: unique, e.g. `truncated-checkpoint`.
        expected: what must come of it, in one line.
        run: does it in an empty folder of its own and returns in a few words what was seen; raises
            BrokenError where that is not what was expected, NotHereError where it cannot be done.
    """

    name: str
    expected: str
    run: Callable[[Path], str]


@dataclass(frozen=True, slots=True)
class Ended:
    """A run of the program that has ended.

    Attributes:
        code: exit code; negative for a signal.
        output: what it wrote to stdout.
        errors: what it wrote to stderr.
    """

    code: int
    output: str
    errors: str


def expect(holds: bool, message: str) -> None:
    """Raise BrokenError with this message unless it holds."""
    if not holds:
        raise BrokenError(message)


def start(
    arguments: Sequence[str], cwd: Path, environ: Mapping[str, str] | None = None
) -> subprocess.Popen[bytes]:
    """Start `python -m dlrm_hybrid` in a session of its own, its output in files of `cwd`.

    Args:
        arguments: after `python -m dlrm_hybrid`.
        cwd: where it runs; gets `stdout` and `stderr`.
        environ: variables besides those of this process.
    """
    with (cwd / "stdout").open("wb") as output, (cwd / "stderr").open("wb") as errors:
        return subprocess.Popen(
            [sys.executable, "-m", "dlrm_hybrid", *arguments],
            cwd=cwd,
            env={**os.environ, **(environ or {})},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=errors,
            start_new_session=True,
        )


def wait(program: subprocess.Popen[bytes], cwd: Path, seconds: float = TIMEOUT_SECONDS) -> Ended:
    """Wait until a program that `start` has started ends, and see that nobody is left.

    Raises:
        BrokenError: it hangs, shows a traceback, or leaves a process behind.
    """
    try:
        code = program.wait(seconds)
    except subprocess.TimeoutExpired:
        os.killpg(program.pid, signal.SIGKILL)
        program.wait()
        raise BrokenError(f"still running after {seconds:g} s") from None
    left = wait_gone(program.pid)
    output, errors = (
        (cwd / name).read_text(encoding="utf-8", errors="replace") for name in ("stdout", "stderr")
    )
    expect("Traceback" not in errors, f"traceback: {errors[-400:]}")
    expect(not left, f"left behind: {left}")
    return Ended(code, output, errors)


def program(
    arguments: Sequence[str],
    cwd: Path,
    environ: Mapping[str, str] | None = None,
    seconds: float = TIMEOUT_SECONDS,
) -> Ended:
    """Run `python -m dlrm_hybrid` to its end, see `start` and `wait`."""
    return wait(start(arguments, cwd, environ), cwd, seconds)


def wait_gone(session: int, seconds: float = 5.0) -> list[str]:
    """Wait for the processes of a session to end; returns those that have not, and kills them."""
    _, alive = psutil.wait_procs(members(session), timeout=seconds)
    names = [f"{one.pid} {one.name()}" for one in alive if one.is_running()]
    for one in alive:
        one.kill()
    return names


def members(session: int) -> list[psutil.Process]:
    """The living processes of a session that `start` has begun, zombies left out."""
    found: list[psutil.Process] = []
    for one in psutil.process_iter(["status"]):
        try:
            if os.getsid(one.pid) == session and one.info["status"] != psutil.STATUS_ZOMBIE:
                found.append(one)
        except (ProcessLookupError, psutil.NoSuchProcess):
            continue
    return found


@dataclass(frozen=True, slots=True)
class Case:
    """Inputs that the code makes, the commands that read them, and how the last one must end.

    Attributes:
        name: unique.
        make: writes the inputs into an empty folder.
        commands: in that folder, after `python -m dlrm_hybrid`; all but the last end with 0.
        code: exit code of the last one.
        told: regular expression found in what it says.
    """

    name: str
    make: Callable[[Path], object]
    commands: Sequence[str]
    code: int
    told: str

    def attack(self) -> Attack:
        """The case as an attack."""
        return Attack(self.name, f"exit {self.code}, {self.told}", self._run)

    def _run(self, folder: Path) -> str:
        self.make(folder)
        *before, last = (shlex.split(command) for command in self.commands)
        for command in before:
            ended = program(command, folder)
            expect(ended.code == 0, f"{command}: exit code {ended.code}: {ended.errors[-300:]}")
        ended = program(last, folder)
        said = " ".join((ended.output + ended.errors).split())
        expect(ended.code == self.code, f"exit code {ended.code}: {said[-300:]}")
        found = re.search(self.told, said)
        expect(found is not None, said[-300:])
        assert found is not None
        return f"exit {ended.code}: {found.group()}"
