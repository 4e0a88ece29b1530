"""The job of a run's process: task, configuration, rows, plan and layout."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dlrm_hybrid.checkpoint.folder import CHECKPOINTS
from dlrm_hybrid.checkpoint.writer import ShardWriter
from dlrm_hybrid.config.schema import Config
from dlrm_hybrid.data.shards import Shards
from dlrm_hybrid.model.row_storage import RowStorage
from dlrm_hybrid.model.spec import ModelShape
from dlrm_hybrid.run.assembly import build
from dlrm_hybrid.run.assembly import model as build_model
from dlrm_hybrid.run.assembly import world as build_world
from dlrm_hybrid.run.rank.process import Report
from dlrm_hybrid.run.request import TrainTask
from dlrm_hybrid.telemetry.spans import SpanClock
from dlrm_hybrid.train.progress import Plan
from dlrm_hybrid.train.signals import StopRequest


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One process's job in a run.

    Attributes:
        report: called with events.
        stop: stop request of signals.
    """

    task: TrainTask
    values: Mapping[str, Any]
    config: Config
    prepared: Shards | None
    plan: Plan
    layout: build_world.Layout
    report: Report
    stop: StopRequest
    names: Mapping[int, str]
    storage: RowStorage

    @classmethod
    def of(
        cls,
        task: TrainTask,
        values: Mapping[str, Any],
        config: Config,
        plan: Plan,
        spec: ModelShape,
        prepared: Shards | None,
        report: Report,
        stop: StopRequest,
    ) -> Job:
        """Make the job of a process; a program of its own batches has no prepared rows."""
        return cls(
            report=report,
            stop=stop,
            task=task,
            values=values,
            config=config,
            prepared=prepared,
            plan=plan,
            layout=build_world.layout(config, spec, plan.steps, task.attempt, task.rank),
            names=dict(enumerate(build.rank_names(config))),
            storage=build_model.row_storage(config, Path(task.run_folder)),
        )

    @property
    def shards(self) -> Shards:
        """The prepared rows; not to be used if a program hands batches over."""
        assert self.prepared is not None, "batches of a program's own"
        return self.prepared

    @property
    def clock(self) -> SpanClock:
        """The clock of the process."""
        return self.layout.clock

    @property
    def role(self) -> str:
        """Name of this process in events."""
        return self.names[self.task.rank] if len(self.names) > 1 else "worker"

    @property
    def checkpoints(self) -> Path:
        """The folder that holds all checkpoints of the run."""
        return Path(self.task.run_folder) / CHECKPOINTS

    def make_writer(self) -> ShardWriter:
        """Make the writer of this process's shards of checkpoints."""
        return ShardWriter(
            root=self.checkpoints,
            rank=self.names[self.task.rank],
            attempt=self.task.attempt,
            storage=self.storage,
            # Who hands batches over has a world, which saves into a folder of its own first.
            place="TMPDIR" if self.prepared is None else None,
        )
