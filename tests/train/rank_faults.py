"""Ranks that suffer a fault at a chosen step; named as entries by the tests."""

import json
import os
import signal
from pathlib import Path

from dlrm_hybrid.cli.rank import train_rank
from dlrm_hybrid.telemetry.events import Event, Kind
from dlrm_hybrid.train.signals import StopWish


def fault_file(run_folder: Path) -> Path:
    """Beside the run folder, which must be empty at the start."""
    return run_folder.with_name(f"{run_folder.name}.fault.json")


def struck_rank(argument: str, report, stop: StopWish) -> None:
    """Train, but receive the signal that the run's fault file names, at its step."""
    path = fault_file(Path(json.loads(argument)["run_folder"]))
    fault = json.loads(path.read_text()) if path.exists() else None

    def strike(event: Event) -> None:
        report(event)
        if fault and event.kind is Kind.PROGRESS and event.step == fault["step"]:
            path.unlink()  # strikes once
            os.kill(os.getpid(), signal.Signals[fault["signal"]])

    train_rank(argument, strike, stop)
