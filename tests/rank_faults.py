"""Ranks that suffer faults at chosen steps; named as entries by the tests."""

import json
import os
import signal
from pathlib import Path

from dlrm_hybrid.run.rank.main import train_rank
from dlrm_hybrid.telemetry.events import Event, Kind
from dlrm_hybrid.train.signals import StopRequest


def plan(run_folder: Path, name: str, *steps: int) -> None:
    """Let the run in this folder receive a signal at each of these steps, once."""
    values = {"signal": name, "steps": sorted(steps)}
    _plan_file(run_folder).write_text(json.dumps(values))


def left(run_folder: Path) -> list[int]:
    """The steps at which nothing has struck yet."""
    return json.loads(_plan_file(run_folder).read_text())["steps"]


def struck_rank(argument: str, report, stop: StopRequest) -> None:
    """Train, but receive the signal that is planned for the run, at its steps."""
    folder = Path(json.loads(argument)["run_folder"])
    path = _plan_file(folder)
    name = json.loads(path.read_text())["signal"] if path.exists() else None

    def strike(event: Event) -> None:
        report(event)
        if name and event.kind is Kind.PROGRESS and event.step in left(folder)[:1]:
            plan(folder, name, *left(folder)[1:])
            os.kill(os.getpid(), signal.Signals[name])

    train_rank(argument, strike, stop)


def _plan_file(run_folder: Path) -> Path:
    """Beside the run folder, which must be empty at the start."""
    return run_folder.with_name(f"{run_folder.name}.fault.json")
