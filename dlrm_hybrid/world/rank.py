"""A rank of a world: it carries out its program's orders, and answers."""

from __future__ import annotations

import json
import socket
from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import asdict, dataclass, field
from itertools import chain
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple, final

from dlrm_hybrid.comm.metered import MeteredChannel, traffic_of
from dlrm_hybrid.comm.rendezvous import share_folder
from dlrm_hybrid.config.methods import load_method
from dlrm_hybrid.config.validate import validate
from dlrm_hybrid.model.tensors import parts
from dlrm_hybrid.parallel.step import StepMetrics
from dlrm_hybrid.run.assembly import build
from dlrm_hybrid.run.assembly import model as build_model
from dlrm_hybrid.run.rank.job import Job
from dlrm_hybrid.run.rank.main import be_one_of_many
from dlrm_hybrid.run.rank.process import Report
from dlrm_hybrid.run.rank.training import resume
from dlrm_hybrid.run.request import TrainTask
from dlrm_hybrid.telemetry.rank_meter import TALLY_NAMES, RankMeter
from dlrm_hybrid.telemetry.traffic import Phase, Traffic
from dlrm_hybrid.train.engine import ignore
from dlrm_hybrid.train.signals import StopRequest
from dlrm_hybrid.train.worker_rank import WorkerRank
from dlrm_hybrid.wire.frame import EVALUATION, Frame, encoded_bytes
from dlrm_hybrid.wire.frame import Kind as FrameKind
from dlrm_hybrid.world.body import added, job_of, save, weights
from dlrm_hybrid.world.orders import (
    DONE,
    PART,
    Arrays,
    Message,
    batch_of,
    connection_of,
    piece_values,
    receive,
    send,
)
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
    job = job_of(settings, task)

    def obey(worker: WorkerRank, channel: MeteredChannel, meter: RankMeter) -> None:
        answers = _Answers()
        channel.watch = answers.watch
        resume(job, worker, ignore)
        meter.step = worker.step
        one = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        one.connect(known["orders"])
        with closing(connection_of(one)) as connection:
            _Worker(job, worker, meter, answers, connection).obey()

    rendezvous = share_folder(Path(task.rendezvous), stop.check)
    be_one_of_many(job, rendezvous, report, stop, obey)


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
    meter: RankMeter
    answers: _Answers
    connection: Connection
    _ids: int = 0

    def obey(self) -> None:
        """Carry out orders until `end`, or until the program is gone."""
        orders: Mapping[str, Callable[[Message], _Answer]] = {
            "learn": self._learn,
            "drain": self._drain,
            "begin_evaluation": self._begin_evaluation,
            "predict": self._predict,
            "save": self._save,
            "state": self._state,
            "counts": self._counts,
        }
        here = {"rank": self.job.task.rank, "steps": self.rank.step}
        send(self.connection, Message("here", 0, here))
        while (order := receive(self.connection)).name != "end":
            answer = orders[order.name](order)
            send(self.connection, Message(DONE, order.number, answer.values, answer.arrays))

    def _learn(self, order: Message) -> _Answer:
        batch = batch_of(order.arrays, len(self.job.layout.spec.table_rows))
        self._ids += batch.bags.num_ids
        metrics = self.rank.learn(batch)
        self.meter.step_done()
        return _Answer(asdict(metrics))

    def _drain(self, order: Message) -> _Answer:
        return _Answer(asdict(self.rank.drain(self.rank.step) or StepMetrics()))

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
        folder = save(self.job, self.rank, self.meter)
        return _Answer({"value": None if folder is None else str(folder)})

    def _state(self, order: Message) -> _Answer:
        with self.meter.within(Phase.EVALUATE):
            own = [piece for piece in weights(self.rank) if not piece.is_copy]
            of_servers = self.rank.server_pieces() if self.rank.leads else ()
            for piece in chain(chain.from_iterable(map(parts, own)), of_servers):
                send(self.connection, Message(PART, order.number, *piece_values(piece)))
        return _Answer({})

    def _counts(self, order: Message) -> _Answer:
        with self.meter.within(Phase.EVALUATE):
            # Servers answer in order, so all that they sent before has arrived then.
            self.rank.masters(range(self.rank.topology.trainers))
        counts = added([self.meter.steps_counts(), self.answers.counts])
        if self.rank.topology.table_servers and self.rank.worker.tables is not None:
            # One row of float32 per id looked up.
            row_bytes = FLOAT_BYTES * self.job.layout.spec.embedding_dim
            counts[Traffic.EMBEDDING]["dense_equivalent_bytes"] += row_bytes * self._ids
        return _Answer({"value": counts})
