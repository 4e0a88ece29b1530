"""Ranks of runs that suffer faults while they save or evaluate; named as entries by a test."""

import errno
import json
import os
import signal
from collections.abc import Callable
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

from dlrm_hybrid.checkpoint import writer
from dlrm_hybrid.checkpoint.folder import find
from dlrm_hybrid.checkpoint.writer import ShardWriter
from dlrm_hybrid.disk import Content
from dlrm_hybrid.model.tensors import Piece
from dlrm_hybrid.run.rank.main import train_rank
from dlrm_hybrid.telemetry.events import Event, Kind
from dlrm_hybrid.train.in_process import InProcessEngine
from dlrm_hybrid.train.signals import StopRequest
from dlrm_hybrid.types import ScoredPart

Strike = Callable[[], None]
Entry = Callable[..., None]


def full_disk_rank(argument: str, report, stop: StopRequest) -> None:
    """Be a rank of a world in which the server finds no room at step 20, the first time."""
    task = json.loads(argument)
    real = writer.write

    def write(path: Path, parts: object) -> Content:
        if "server" in path.name and "step_00000020.0" in str(path):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real(path, parts)

    writer.write = write
    train_rank(json.dumps(task), report, stop)


def _striking(is_due: Callable[[InProcessEngine, ScoredPart, int], bool], strike: Strike) -> Entry:
    """Train; in the first attempt something happens in an evaluation, of which it knows how many
    there were with this one."""
    real = InProcessEngine.evaluate

    def rank(argument: str, report, stop: StopRequest) -> None:
        made = count(1)

        def evaluate(engine: InProcessEngine, part: ScoredPart, *rest: Any) -> object:
            if is_due(engine, part, next(made)):
                strike()
            return real(engine, part, *rest)

        if json.loads(argument)["attempt"] == 0:
            InProcessEngine.evaluate = evaluate
        train_rank(argument, report, stop)

    return rank


def _sigterm() -> None:
    os.kill(os.getpid(), signal.SIGTERM)


def _no_memory() -> None:
    raise MemoryError("no memory to evaluate")


evaluation_rank = _striking(lambda engine, part, made: made == 1, _sigterm)
sixth_evaluation_rank = _striking(lambda engine, part, made: made == 6, _sigterm)
testing_rank = _striking(lambda engine, part, made: part is ScoredPart.TEST, _sigterm)
failing_rank = _striking(lambda engine, part, made: engine.step == 20, _no_memory)


def damaging_rank(argument: str, report, stop: StopRequest) -> None:
    """Train; at step 30 damage the newest manifest and be killed."""
    folder = Path(json.loads(argument)["run_folder"])

    def strike(event: Event) -> None:
        report(event)
        if event.kind is Kind.PROGRESS and event.step == 30:
            (find(folder) / "manifest.json").write_text("{}")
            os.kill(os.getpid(), signal.SIGKILL)

    train_rank(argument, strike, stop)


def poisoned_rank(argument: str, report, stop: StopRequest) -> None:
    """Be a rank of a world whose server has a NaN in what it saves at step 20, not in its weights.

    A weight of NaN would end the run sooner, by a gradient.
    """
    real = ShardWriter.begin

    def begin(writer: ShardWriter, step: int, pieces: list[Piece]) -> None:
        if "server" in writer.rank and step == 20:
            first, *others = pieces
            view = first.view.clone()
            view.view(-1)[-1] = float("nan")
            pieces = [replace(first, view=view), *others]
        real(writer, step, pieces)

    ShardWriter.begin = begin
    train_rank(argument, report, stop)
