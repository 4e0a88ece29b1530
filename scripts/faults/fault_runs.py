"""Starts runs of the program, watches their events, and injects faults into them."""

from __future__ import annotations

import argparse
import hashlib
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from dlrm_hybrid.checkpoint.folder import CHECKPOINTS
from dlrm_hybrid.checkpoint.manifest import folder_name
from dlrm_hybrid.checkpoint.reader import open_checkpoint
from dlrm_hybrid.telemetry import events
from dlrm_hybrid.telemetry.events import Event, Kind

POLL_SECONDS = 0.01
HANG_SECONDS = 600.0  # kernels may have to be compiled first, on a busy machine
ROWS = (
    *("model=dlrm_small", "data.rows=7000", "data.processes=1", "train.batch_size=16"),
    *("telemetry.every=1", "telemetry.tensorboard=false"),
)


class HangError(Exception):
    """Nothing has happened for `HANG_SECONDS`."""


@dataclass(frozen=True, slots=True)
class Program:
    """A run of the program as a process of its own.

    Attributes:
        process: supervisor, or launcher of all.
        folder: of the run.
    """

    process: subprocess.Popen[bytes]
    folder: Path

    def wait_for(self, start: int, step: int) -> list[Event]:
        """The record once the start of this number has come to a step, or the program has ended.

        Raises:
            HangError: neither comes.
        """
        last, since = -1, time.monotonic()
        while True:
            ended = self.process.poll() is not None
            record = read(self.folder)
            begun = sum(event.kind is Kind.STARTED for event in record)
            if ended or (begun >= start and record[-1].step >= step):
                return record
            if len(record) != last:
                last, since = len(record), time.monotonic()
            elif time.monotonic() - since > HANG_SECONDS:
                self.process.kill()
                raise HangError(f"{self.folder}: no event in {HANG_SECONDS:g} s")
            time.sleep(POLL_SECONDS)

    def pids(self) -> dict[str, int]:
        """Process ids of the ranks by role."""
        paths = (self.folder / "log").glob("*.pid")
        return {path.stem: int(path.read_text(encoding="ascii")) for path in paths}

    def end(self) -> int:
        """Wait for the exit code; HangError if it does not come."""
        self.wait_for(sys.maxsize, 0)
        return self.process.wait()


def start(folder: Path, overrides: Sequence[str]) -> Program:
    """Begin, or go on with, the run in this folder; its output goes to a file beside it."""
    command = [sys.executable, "-m", "dlrm_hybrid", "train", *ROWS]
    command += [f"data.prepared={folder.parent / 'rows'}", f"hydra.run.dir={folder}", *overrides]
    folder.parent.mkdir(parents=True, exist_ok=True)
    with folder.with_suffix(".txt").open("ab") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output, start_new_session=True)
        return Program(process, folder)


def unharmed(folder: Path, overrides: Sequence[str]) -> Path:
    """The folder of a run that nothing is done to; SystemExit if it fails."""
    if start(folder, overrides).end():
        raise SystemExit(f"{folder}: the run that nobody has harmed failed")
    return folder


def arguments(about: str | None, **counts: int) -> argparse.ArgumentParser:
    """What scripts of faults take: a folder for all their runs, and numbers with defaults."""
    parser = argparse.ArgumentParser(
        description=about, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path, help="for all runs; they are not removed")
    for name, default in counts.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    return parser


def read(folder: Path) -> list[Event]:
    """The record of a run, as far as it has come."""
    path = folder / "events.jsonl"
    return list(events.read(path)) if path.exists() else []


def digest(folder: Path, step: int) -> str:
    """Of all tensors of a checkpoint, whatever compressors remember left out."""
    checkpoint = open_checkpoint(folder / CHECKPOINTS / folder_name(step))
    tensors = checkpoint.tensors(checkpoint.names("dense", "embeddings"))
    found = hashlib.blake2b(digest_size=8)
    for title in sorted(tensors):
        found.update(title.encode())
        found.update(tensors[title].numpy().data)
    return found.hexdigest()


def alive(pid: int) -> bool:
    """Whether a process is there; one that has ended and waits for its parent is not."""
    try:
        status = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8")
    except OSError:
        return False
    return status.rpartition(")")[2].split()[0] != "Z"


def wait_gone(pids: Sequence[int], seconds: float) -> list[int]:
    """Those of these processes that are still there after so long."""
    until = time.monotonic() + seconds
    left = [pid for pid in pids if alive(pid)]
    while left and time.monotonic() < until:
        time.sleep(POLL_SECONDS)
        left = [pid for pid in left if alive(pid)]
    return left


def send(pid: int, number: int) -> float:
    """Send a signal; when, by the clock on the wall."""
    os.kill(pid, number)
    return time.time()
