"""A rank of a world: it carries out its program's orders, and answers."""

from __future__ import annotations

import json
import socket
from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, final

from dlrm_hybrid.comm.group import GroupOptions
from dlrm_hybrid.comm.metered import traffic_of
from dlrm_hybrid.comm.rendezvous import share_folder
from dlrm_hybrid.config.methods import load_method
from dlrm_hybrid.config.validate import validate
from dlrm_hybrid.data.loader import START
from dlrm_hybrid.parallel.step import StepMetrics
from dlrm_hybrid.parallel.topology import ServerRole, TableServerRole
from dlrm_hybrid.run.assembly import build
from dlrm_hybrid.run.assembly import model as build_model
from dlrm_hybrid.run.assembly import worker as build_worker
from dlrm_hybrid.run.assembly import world as build_world
from dlrm_hybrid.run.rank.job import Job
from dlrm_hybrid.run.rank.main import world_channel
from dlrm_hybrid.run.rank.process import Report
from dlrm_hybrid.run.rank.serving import at_end, leave_servers, serve_dense, serve_tables
from dlrm_hybrid.run.rank.training import checkpoint_writer, resume
from dlrm_hybrid.run.request import TrainTask
from dlrm_hybrid.telemetry.rank_meter import TALLY_NAMES, RankMeter
from dlrm_hybrid.telemetry.traffic import Phase, Traffic
from dlrm_hybrid.train.engine import ignore
from dlrm_hybrid.train.signals import StopRequest
from dlrm_hybrid.train.worker_rank import WorkerRank
from dlrm_hybrid.types import ConfigError, DataError
from dlrm_hybrid.wire.frame import EVALUATION, Frame, encoded_bytes
from dlrm_hybrid.wire.frame import Kind as FrameKind
from dlrm_hybrid.world.body import added, job_of, progress_of, rows_of
from dlrm_hybrid.world.orders import Arrays, Message, batch_of, connection_of, receive, send
from dlrm_hybrid.world.rows.batches import Loader
from dlrm_hybrid.world.rows.feed import Feed
from dlrm_hybrid.world.rows.loaders import NamedLoader
from dlrm_hybrid.world.settings import Settings

FLOAT_BYTES = 4
ANSWERS = (FrameKind.PARAMETERS, FrameKind.RESULT, FrameKind.ROWS)


def world_rank(argument: str, report: Report, stop: StopRequest) -> None:
    """Run the rank of a world that the argument describes, until its program ends it."""
    known: dict[str, Any] = json.loads(argument)
    load_method(known["values"])
    task, config = TrainTask(**known["task"]), validate(known["values"])
    spec = build.model_spec(config, tuple(known["table_rows"]))
    settings = Settings(spec=spec, values=known["values"], config=config)
    build_model.prepare_torch(config)
    topology = build.topology(config)
    feeds: dict[int, Feed] = {}
    if task.rank < topology.num_workers:
        loader: Loader | None = None
        if known["loader"] is not None:
            loader = NamedLoader(**known["loader"]).load()
        trainer = task.rank // topology.stages
        feeds[trainer] = Feed(settings.columns, trainer, topology.trainers, loader)
    job = job_of(settings, task, rows_of(spec, feeds))
    rendezvous = share_folder(Path(task.rendezvous), stop.check)
    with world_channel(job, rendezvous) as (channel, inner):
        meter = RankMeter(lambda counters: setattr(channel, "counters", counters), job.clock)
        meter.begin(0)
        role = topology.role(task.rank)
        if isinstance(role, ServerRole):
            serve_dense(job, role.index, channel, meter)
            return
        if isinstance(role, TableServerRole):
            serve_tables(job, role.index, channel, meter)
            return
        answers = _Answers()
        channel.watch = answers.watch
        group = GroupOptions(
            rendezvous=rendezvous,
            lost_peer=inner.lost_peer,
            address=build_world.address(config),
            deadline_seconds=config.network.patience_seconds,
        )
        with (
            build_worker.worker_rank(
                config, job.layout, job.rows, channel, None, group, meter
            ) as worker,
            at_end(lambda: leave_servers(job, channel, worker.step)),
        ):
            resume(job, worker, ignore)
            meter.step = worker.step
            _Worker(job, worker, feeds[role.trainer], meter, answers).obey(known["orders"])


@final
@dataclass(slots=True)
class _Answers:
    """Counts servers' answers to a worker in training steps, which nobody else counts."""

    counts: dict[str, dict[str, int]] = field(default_factory=dict[str, dict[str, int]])

    def watch(self, frame: Frame, dense_bytes: int) -> None:
        if frame.kind in ANSWERS and frame.microbatch != EVALUATION:
            known = frame.kind is not FrameKind.ROWS  # the size of ROWS only their sender knows
            values = (1, encoded_bytes(frame), dense_bytes if known else 0)
            one: dict[str, int] = dict(zip(TALLY_NAMES, values, strict=True))
            self.counts = added([self.counts, {traffic_of(frame.kind).value: one}])


class _Answer(NamedTuple):
    """A worker's answer to an order."""

    values: Mapping[str, Any]
    arrays: Arrays = {}  # noqa: RUF012 - nobody writes to it


@final
@dataclass(slots=True)
class _Worker:
    """Carries out a program's orders to a worker, one after the other."""

    job: Job
    rank: WorkerRank
    feed: Feed
    meter: RankMeter
    answers: _Answers
    _fault: DataError | None = None

    def obey(self, meeting: str) -> None:
        """Connect to the program, and carry out its orders until `end`, or until it is gone."""
        orders: Mapping[str, Callable[[Message], _Answer]] = {
            "fill": self._fill,
            "skip": self._skip,
            "end_epoch": self._end_epoch,
            "learn": self._learn,
            "drain": self._drain,
            "begin_evaluation": self._begin_evaluation,
            "predict": self._predict,
            "save": self._save,
            "counts": self._counts,
        }
        one = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        one.connect(meeting)
        with closing(connection_of(one)) as connection:
            here = {"rank": self.job.task.rank, "steps": self.rank.step}
            send(connection, Message("here", 0, here))
            while (order := receive(connection)).name != "end":
                try:
                    answer = orders[order.name](order)
                except (DataError, ConfigError) as error:
                    if order.name != "fill":  # before a step, nothing is lost
                        raise
                    answer = _Answer({"fault": str(error)})
                send(connection, Message("done", order.number, answer.values, answer.arrays))
                if order.name == "learn" and not order.arrays:
                    self._fill_ahead()

    def _fill(self, order: Message) -> _Answer:
        if (fault := self._fault) is not None:
            self._fault = None
            raise fault
        checksum = self.feed.checksum() if self.feed.fill() else None
        title = f"epoch {self.feed.epoch}, batch {self.feed.taken - 1}"  # the waiting one
        return _Answer({"checksum": checksum, "title": title})

    def _skip(self, order: Message) -> _Answer:
        if self.feed.trainer in order.values["trainers"]:
            self.feed.skip()
        return _Answer({})

    def _fill_ahead(self) -> None:
        """Take the next batch while the program does other work."""
        try:
            self.feed.fill()
        except DataError as error:
            self._fault = error  # reported when the batch is requested

    def _end_epoch(self, order: Message) -> _Answer:
        return _Answer({"value": self.feed.end_epoch()})

    def _learn(self, order: Message) -> _Answer:
        if order.arrays:
            self.feed.put(batch_of(order.arrays, len(self.job.layout.spec.table_rows)))
        metrics, _ = self.rank.make_step(self.rank.step, START)
        self.meter.step_done()
        return _measured(metrics)

    def _drain(self, order: Message) -> _Answer:
        return _measured(self.rank.drain(self.rank.step) or StepMetrics())

    def _begin_evaluation(self, order: Message) -> _Answer:
        with self.meter.within(Phase.EVALUATE):
            masters = self.rank.masters(range(self.rank.topology.trainers))
            self.rank.evaluation.evaluator.stage.model.fill(masters)
        return _Answer({})

    def _predict(self, order: Message) -> _Answer:
        batch = batch_of(order.arrays, len(self.job.layout.spec.table_rows))
        with self.meter.within(Phase.EVALUATE):
            logit_B = self.rank.evaluation.predict(order.values["number"], batch)
        return _Answer({}, {} if logit_B is None else {"logits": logit_B.numpy()})

    def _save(self, order: Message) -> _Answer:
        writer = checkpoint_writer(self.job, self.rank)
        with self.meter.within(Phase.CHECKPOINT):
            writer.save(progress_of(self.job, self.rank.step, self.rank.emptied))
            saved = writer.finish()
        return _Answer({"value": None if saved is None else str(saved.folder)})

    def _counts(self, order: Message) -> _Answer:
        with self.meter.within(Phase.EVALUATE):
            # Servers answer in order, so all that they sent before has arrived then.
            self.rank.masters(range(self.rank.topology.trainers))
        counts = added([self.meter.steps_counts(), self.answers.counts])
        if self.rank.topology.table_servers and self.rank.worker.tables is not None:
            # One row of float32 per id looked up.
            row_bytes = FLOAT_BYTES * self.job.layout.spec.embedding_dim
            counts[Traffic.EMBEDDING]["dense_equivalent_bytes"] += row_bytes * self.feed.num_ids
        return _Answer({"value": counts})


def _measured(metrics: StepMetrics) -> _Answer:
    return _Answer({"loss_sum": metrics.loss_sum, "correct": metrics.correct, "rows": metrics.rows})
