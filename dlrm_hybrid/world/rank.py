"""A rank of a world: it carries out its program's orders, and answers."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator, Mapping
from contextlib import closing
from dataclasses import asdict, dataclass, field
from itertools import chain
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, final

from typing_extensions import override

from dlrm_hybrid.comm.metered import MeteredChannel, traffic_of
from dlrm_hybrid.comm.rendezvous import share_folder
from dlrm_hybrid.config.model import spec_of
from dlrm_hybrid.config.outside import load_chosen
from dlrm_hybrid.config.validate import validate
from dlrm_hybrid.data.loader import Batch
from dlrm_hybrid.model.spec import DataShape
from dlrm_hybrid.model.tensors import parts
from dlrm_hybrid.outside import imported
from dlrm_hybrid.parallel.messages import message, piece_message, tensors_of
from dlrm_hybrid.run.assembly import model as build_model
from dlrm_hybrid.run.rank.facts import Source
from dlrm_hybrid.run.rank.job import Job
from dlrm_hybrid.run.rank.main import run_one_of_many
from dlrm_hybrid.run.rank.process import Report
from dlrm_hybrid.run.rank.serving import at_end, leave_servers
from dlrm_hybrid.run.rank.training import resume
from dlrm_hybrid.run.request import TrainTask
from dlrm_hybrid.telemetry.rank_meter import TALLY_NAMES, RankMeter
from dlrm_hybrid.telemetry.traffic import Phase, Traffic
from dlrm_hybrid.train.engine import ignore
from dlrm_hybrid.train.follower import Act, Answer, Due, Follower, Link, Order, WorkerShards
from dlrm_hybrid.train.signals import StopRequest
from dlrm_hybrid.train.worker_rank import WorkerRank
from dlrm_hybrid.wire.frame import EVALUATION, Frame, Kind, decode, encode, encoded_bytes
from dlrm_hybrid.world.backend import added, job_of, save, weights
from dlrm_hybrid.world.batches import batch_of
from dlrm_hybrid.world.settings import Settings

FLOAT_BYTES = 4
ANSWERS = (Kind.PARAMETERS, Kind.RESULT, Kind.ROWS)


def world_rank(argument: str, report: Report, stop: StopRequest) -> None:
    """Run the rank of a world that the argument describes, until its program ends it."""
    arguments: dict[str, Any] = json.loads(argument)
    load_chosen(arguments["values"])
    task, config = TrainTask(**arguments["task"]), validate(arguments["values"])
    data = DataShape(**{name: tuple(of_rows) for name, of_rows in arguments["of_rows"].items()})
    spec = spec_of(config.model, data)
    settings = Settings(spec=spec, values=arguments["values"], config=config)
    build_model.prepare_torch(config)
    job = job_of(settings, task, report, stop)

    def obey(worker: WorkerRank, channel: MeteredChannel, meter: RankMeter) -> None:
        answers, shards = _Answers(), WorkerShards(worker, job.make_writer(), meter)
        channel.watch = answers.watch
        if not worker.leads:
            shards.answer()
        resume(job, worker, Source.of(job))
        meter.step = worker.step
        orders = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        orders.connect(arguments["orders"])
        with (
            at_end(lambda: leave_servers(job, channel, worker.step)),
            closing(Connection(orders.detach())) as connection,
        ):
            link = _ProgramLink(job, worker, meter, answers, shards, connection)
            Follower(rank=worker, link=link, meter=meter).run()

    rendezvous = share_folder(Path(task.rendezvous), stop.check)
    run_one_of_many(job, rendezvous, obey)


@final
@dataclass(slots=True)
class _Answers:
    """Counts servers' answers to a worker in training steps, which nobody else counts."""

    counts: dict[str, dict[str, int]] = field(default_factory=dict[str, dict[str, int]])

    def watch(self, frame: Frame, dense_bytes: int) -> None:
        if frame.kind in ANSWERS and frame.microbatch != EVALUATION:
            has_size = frame.kind is not Kind.ROWS  # the size of ROWS only their sender knows
            values = (1, encoded_bytes(frame), dense_bytes if has_size else 0)
            tally: dict[str, int] = dict(zip(TALLY_NAMES, values, strict=True))
            self.counts = added([self.counts, {traffic_of(frame.kind).value: tally}])


@final
@dataclass(slots=True)
class _ProgramLink(Link):
    """The link of a worker to the program of its world, and its acts beside training."""

    job: Job
    rank: WorkerRank
    meter: RankMeter
    answers: _Answers
    shards: WorkerShards
    connection: Connection
    _ids: int = 0

    @override
    def acts(self) -> Mapping[str, Act]:
        return {
            "begin_evaluation": self._begin_evaluation,
            "predict": self._predict,
            "save": self._save,
            "state": self._state,
            "counts": self._counts,
            "ask": self._ask,
            "end": ignore,
        }

    @override
    def read(self, order: Order) -> Iterator[Due]:
        """Yield the batch that an order to train brings along."""
        batch = self._batch(order)
        self._ids += batch.bags.num_ids
        yield Due(batch, is_last=True)

    def _batch(self, order: Order) -> Batch:
        return batch_of(tensors_of(order.frame), len(self.job.layout.spec.columns))

    @override
    def take(self) -> Frame:
        return decode(self.connection.recv_bytes())

    @override
    def take_now(self) -> Frame | None:
        return self.take() if self.connection.poll() else None

    @override
    def report(self, done: int, answer: Answer) -> None:
        values = {
            "learned": self.rank.step,
            "metrics": asdict(answer.metrics),
            "value": answer.value,
        }
        rank = self.rank.messenger.rank
        report = message(Kind.REPORT, rank, 0, done, values, answer.tensors)
        self.connection.send_bytes(encode(report))

    def _begin_evaluation(self, order: Order) -> Answer:
        with self.meter.within(Phase.EVALUATE):
            self.rank.begin_evaluation(range(self.rank.topology.trainers))
        return Answer()

    def _predict(self, order: Order) -> Answer:
        with self.meter.within(Phase.EVALUATE):
            logit_B = self.rank.predict(order.values["number"], self._batch(order))
        return Answer(tensors={} if logit_B is None else {"logits": logit_B})

    def _ask(self, order: Order) -> Answer:
        function = imported(order.values["order"])
        return Answer(value=function(self.rank.worker, **order.values["values"]))

    def _save(self, order: Order) -> Answer:
        if self.rank.leads:
            return Answer(value=str(save(self.job, self.rank, self.meter)))
        self.shards.wait_until_taken()
        return Answer()

    def _state(self, order: Order) -> Answer:
        rank, number = self.rank.messenger.rank, order.frame.number
        with self.meter.within(Phase.EVALUATE):
            pieces = [piece for piece in weights(self.rank) if not piece.is_copy]
            of_servers = self.rank.server_pieces() if self.rank.leads else ()
            for piece in chain(chain.from_iterable(map(parts, pieces)), of_servers):
                part = piece_message(Kind.WEIGHTS, rank, 0, number, piece, {})
                self.connection.send_bytes(encode(part))
        return Answer()

    def _counts(self, order: Order) -> Answer:
        with self.meter.within(Phase.EVALUATE):
            # Servers answer in order: once these have come, all earlier answers have too.
            self.rank.masters(range(self.rank.topology.trainers))
        counts = added([self.meter.steps_counts(), self.answers.counts])
        if self.rank.topology.table_servers and self.rank.worker.tables is not None:
            # One row of float32 per id looked up.
            elements = self.job.layout.spec.widths.mean_elements(self._ids)
            counts[Traffic.EMBEDDING]["dense_equivalent_bytes"] += FLOAT_BYTES * elements
        return Answer(value=counts)
