"""All ranks of a world in one thread: generators in turns, frames as bytes, one set of tables."""

from collections import deque
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dlrm_hybrid.bags import Bags
from dlrm_hybrid.comm.mailbox import Receive
from dlrm_hybrid.compress.activation.codec import ActivationCodec, DenseCodec
from dlrm_hybrid.compress.gradient.compressor import Dense
from dlrm_hybrid.compress.gradient.layout import Layout as FlatLayout
from dlrm_hybrid.compress.gradient.layout import Spec
from dlrm_hybrid.model.columns import ColumnBags
from dlrm_hybrid.model.dlrm import StageModel
from dlrm_hybrid.model.embeddings import Embeddings
from dlrm_hybrid.model.interaction import Cross, Fm
from dlrm_hybrid.model.layers.products import Precision
from dlrm_hybrid.model.optimizer import Constant, Optimizer, Sgd
from dlrm_hybrid.model.sharding import casts
from dlrm_hybrid.model.spec import ModelSpec, Partition
from dlrm_hybrid.model.tables import Fused
from dlrm_hybrid.model.tensors import draw_embeddings
from dlrm_hybrid.parallel.boundaries import Boundaries
from dlrm_hybrid.parallel.dense.bucket import ServerOptions
from dlrm_hybrid.parallel.dense.client import LocalClient, ServerClient
from dlrm_hybrid.parallel.dense.master import OptimizerConfig
from dlrm_hybrid.parallel.dense.server import ParameterServer
from dlrm_hybrid.parallel.effects import GroupCall, Port, StepEffect
from dlrm_hybrid.parallel.policies import Lockstep
from dlrm_hybrid.parallel.schedule import (
    Gpipe,
    OneForwardOneBackward,
    Pipeline,
    Sequential,
    StageOps,
)
from dlrm_hybrid.parallel.stage import Inputs, Stage
from dlrm_hybrid.parallel.step import StepMetrics, drain, train_step
from dlrm_hybrid.parallel.sync import SyncPolicy
from dlrm_hybrid.parallel.tables.shared import AllIds, JointTables, SharedTables
from dlrm_hybrid.parallel.topology import DenseTensor, Topology, lay_out
from dlrm_hybrid.parallel.worker import Worker, flight, load_flight, predict_batch
from dlrm_hybrid.telemetry.spans import SpanClock
from dlrm_hybrid.types import Tick
from dlrm_hybrid.wire.frame import Frame, decode, encode

SMALL = ModelSpec(
    embedding_dim=4, bottom=(13, 32, 16, 8, 4), top=(32, 16, 8, 1), table_rows=(30,) * 26
)
PAPER = ModelSpec(
    embedding_dim=16,
    bottom=(13, 512, 256, 64, 16),
    top=(512, 256, 128, 1),
    table_rows=tuple(2 + 7 * table for table in range(26)),
)
CROSS = replace(SMALL, interaction=Cross(layers=2, rank=5))
MACHINE = replace(SMALL, interaction=Fm(deep=(24, 12)))
DROPPING = replace(MACHINE, dropout=0.5)
LR = 0.1
SEED = 1
ATTEMPT = 3
SGD = Sgd()
SCHEDULES = {one.name: one() for one in (Sequential, Gpipe, OneForwardOneBackward)}
TABLES = Fused()


@dataclass(frozen=True)
class Layout:
    cuts: tuple[str, ...] = ()
    trainers: int = 1
    servers: int = 0
    microbatches: int = 1
    schedule: str | StageOps = "sequential"
    policy: SyncPolicy = Lockstep()

    @property
    def ops(self) -> StageOps:
        return SCHEDULES[self.schedule] if isinstance(self.schedule, str) else self.schedule


@dataclass(frozen=True)
class Sent:
    """A frame on its way, as its receiver sees it, and what its sender said of it."""

    sender: int
    to: int
    frame: Frame
    dense_equivalent_bytes: int


class TinyWorld:
    """Builds every rank of a layout; `step` makes a step of all of them."""

    def __init__(
        self,
        spec: ModelSpec,
        layout: Layout,
        *,
        precision: Precision = Precision.FLOAT32,
        optimizer: Optimizer = SGD,
        lr: float = LR,
        table_lr: float | None = None,
        codec: Callable[[], ActivationCodec] = DenseCodec,
    ) -> None:
        partition = Partition.of(spec, layout.cuts)
        stages = partition.stages
        self.pipeline = Pipeline.of(layout.ops, len(stages), layout.microbatches)
        self.layout = layout
        self.lr = lr
        self.table_lr = lr if table_lr is None else table_lr
        self.topology = Topology(
            trainers=layout.trainers,
            stages=len(stages),
            servers=layout.servers,
            interaction_stage=partition.interaction_stage,
        )
        self.sent: list[Sent] = []
        self.embeddings = Embeddings(spec, TABLES)
        draw_embeddings(self.embeddings.weights(), SEED)
        group = self.topology.interaction_group
        look_up = AllIds(self.embeddings, casts("float32"))
        joint = JointTables(look_up, SpanClock())
        self._queues: list[deque[Frame]] = [deque() for _ in range(self.topology.size)]
        config = OptimizerConfig(optimizer=optimizer, schedule=Constant(base_lr=lr))
        tensors = lay_out(spec.dense_shapes(), partition.stage_of, layout.servers)
        self.workers: list[Worker] = []
        for rank in range(self.topology.num_workers):
            part = stages[rank % len(stages)]
            port = Port(
                topology=self.topology, rank=rank, attempt=ATTEMPT, transmit=self._sender(rank)
            )
            model = StageModel(spec, part, precision, SEED)
            weights = model.dense_parameters()
            client = (
                ServerClient(
                    *(port, tensors, weights, layout.policy),
                    *(uncompressed(tensors, part.index), SpanClock()),
                )
                if layout.servers
                else LocalClient(weights, config, SpanClock())
            )
            codecs = {boundary: codec() for boundary in range(len(stages))}
            self.workers.append(
                Worker(
                    rank=rank,
                    stage=Stage(model, layout.microbatches),
                    pipeline=self.pipeline,
                    boundaries=Boundaries(port, part, codecs, SpanClock()),
                    tables=SharedTables(joint, group) if rank in group else None,
                    columns=ColumnBags.of(spec),
                    embedding_schedule=Constant(base_lr=self.table_lr),
                    client=client,
                )
            )
        options = ServerOptions(
            policy=layout.policy,
            optimizers=[config] * self.topology.stages,
            check_every=1,
            attempt=ATTEMPT,
        )
        whole = StageModel(spec, Partition.of(spec, ()).stages[0], precision, SEED)
        self.servers = [
            ParameterServer(
                *(self.topology, index, tensors), *(whole.dense_parameters(), options, SpanClock())
            )
            for index in range(layout.servers)
        ]

    def step(self, step: int, batches: list[Inputs]) -> list[StepMetrics]:
        """One step of all workers; a batch for each trainer."""
        return self._run(lambda worker, batch: train_step(worker, Tick(step), batch), batches)

    def drain(self, ticks: int) -> list[StepMetrics]:
        """After so many ticks, the ops that are left, by worker."""
        return self._run_programs([drain(worker, ticks) for worker in self.workers])

    def predict(self, number: int, batches: list[Inputs]) -> list[Tensor | None]:
        """The logits of one batch of each trainer, by worker."""
        return self._run(lambda worker, batch: predict_batch(worker, number, batch), batches)

    def save(self, ticks: int, emptied: int = 0) -> dict[str, dict[str, Tensor]]:
        """Copies of all that lasts, after so many ticks; what is in flight too."""
        owners = self.servers or [worker.client for worker in self.workers]
        dense = {name: one for owner in owners for name, one in owner.tensors().items()}
        flights = self._run_programs([flight(worker, ticks, emptied) for worker in self.workers])
        flying = {piece.name: piece.view for pieces in flights for piece in pieces}
        state = {"dense": dense, "tables": self.embeddings.weights(), "flight": flying}
        return {
            group: {name: one.clone() for name, one in held.items()}
            for group, held in state.items()
        }

    def load(self, ticks: int, state: Mapping[str, Mapping[str, Tensor]]) -> None:
        """Go on from `save`."""
        for name, table in self.embeddings.weights().items():
            table.copy_(state["tables"][name])
        pushed = [self.pipeline.pushed(stage, ticks) for stage in range(self.topology.stages)]
        for index, server in enumerate(self.servers):
            for to, frame, num_bytes in server.restart(pushed, state["dense"]):
                self._sender(self.topology.server(index))(to, frame, num_bytes)
        for worker in self.workers:
            worker.client.restart(pushed[worker.part.index], state["dense"])
        self._run_programs(
            [load_flight(worker, ticks, 0, state["flight"]) for worker in self.workers]
        )

    def tensors(self) -> dict[str, Tensor]:
        """Trainer 0's weights, or the servers' where there are some, and the tables."""
        tensors: dict[str, Tensor] = {}
        for worker in self.workers[: self.topology.stages]:
            tensors |= {
                name: weight.detach()
                for name, weight in worker.stage.model.dense_parameters().items()
            }
        for server in self.servers:
            tensors |= {name: value for name, value in server.tensors().items() if name in tensors}
        return tensors | self.embeddings.weights()

    def waiting(self) -> list[Frame]:
        return [frame for queue in self._queues for frame in queue]

    def _sender(self, rank: int) -> Callable[[int, Frame, int], None]:
        def send(to: int, frame: Frame, dense_equivalent_bytes: int) -> None:
            received = decode(bytes(encode(frame)))
            assert received.sender == rank
            self.sent.append(Sent(rank, to, received, dense_equivalent_bytes))
            self._queues[to].append(received)

        return send

    def _run(
        self,
        start: Callable[[Worker, Inputs], Generator[StepEffect, Any, Any]],
        batches: list[Inputs],
    ) -> list[Any]:
        return self._run_programs(
            [
                start(worker, reads(worker, batches[worker.rank // self.topology.stages]))
                for worker in self.workers
            ]
        )

    def _run_programs(self, runs: list[Generator[StepEffect, Any, Any]]) -> list[Any]:
        """Turns until all generators have returned; a round in which nothing moves is a fault."""
        results: dict[int, Any] = {}
        asked: dict[int, StepEffect] = {}
        answers: dict[int, Any] = dict.fromkeys(range(len(runs)))
        while len(results) < len(runs):
            assert answers, f"deadlock: {asked}"
            for rank, answer in answers.items():
                try:
                    asked[rank] = runs[rank].send(answer)
                except StopIteration as done:
                    results[rank] = done.value
            self._serve()
            answers = {**self._frames_for(asked), **self._answer_groups(asked)}
            for rank in answers:
                del asked[rank]
        return [results[rank] for rank in sorted(results)]

    def _serve(self) -> None:
        for server, queue in zip(
            self.servers, self._queues[self.topology.num_workers :], strict=True
        ):
            rank = self.topology.num_workers + self.servers.index(server)
            while queue:
                for to, frame, num_bytes in server.handle(queue.popleft()):
                    self._sender(rank)(to, frame, num_bytes)

    def _frames_for(self, asked: Mapping[int, StepEffect]) -> dict[int, Frame | None]:
        found: dict[int, Frame | None] = {}
        for rank, effect in asked.items():
            if not isinstance(effect, Receive):
                continue
            queue = self._queues[rank]
            frame = next((one for one in queue if is_wanted(one, effect)), None)
            if frame is not None:
                queue.remove(frame)
            if frame is not None or not effect.waits:
                found[rank] = frame
        return found

    def _answer_groups(self, asked: Mapping[int, StepEffect]) -> dict[int, Any]:
        """Answers once all of a group have asked for the same."""
        answers: dict[int, Any] = {}
        for effect in asked.values():
            if not isinstance(effect, GroupCall) or effect.group[0] in answers:
                continue
            others = [asked.get(rank) for rank in effect.group]
            same = [one for one in others if isinstance(one, GroupCall)]
            if len(same) == len(others) and all(one.compute == effect.compute for one in same):
                results = effect.compute([one.value for one in same])
                answers |= zip(effect.group, results, strict=True)
        return answers


def uncompressed(tensors: Sequence[DenseTensor], stage: int) -> Dense:
    """Of all tensors of a stage."""
    specs = [Spec(one.id, one.name, one.shape) for one in tensors if one.stage == stage]
    return Dense(FlatLayout(specs))


def draw_batch(spec: ModelSpec, rows: int, seed: int) -> Inputs:
    """Labels that the features explain, so that weights move."""
    rng = np.random.default_rng(seed)
    dense_BI = np.log1p(rng.pareto(1, (rows, 13))).astype(np.float32)
    ids_FB = np.stack([rng.integers(0, size, rows) for size in spec.table_rows])
    label_B = (dense_BI[:, 0] + rng.random(rows) > 1.2).astype(np.float32)
    return Inputs(
        rows=rows,
        dense_BI=torch.from_numpy(dense_BI),
        bags=Bags(torch.from_numpy(ids_FB)),
        label_B=torch.from_numpy(label_B),
    )


def columns(batch: Inputs) -> tuple[Tensor, Tensor, Tensor]:
    assert batch.dense_BI is not None and batch.bags is not None and batch.label_B is not None
    return batch.dense_BI, batch.bags.values, batch.label_B


def shares(batch: Inputs, trainers: int) -> list[Inputs]:
    """The batches of the trainers, in their order."""
    dense_BI, ids_FB, label_B = columns(batch)
    rows = batch.rows // trainers
    slices = [slice(trainer * rows, (trainer + 1) * rows) for trainer in range(trainers)]
    return [
        Inputs(
            rows=rows,
            dense_BI=dense_BI[one],
            bags=Bags(ids_FB[:, one].contiguous()),
            label_B=label_B[one],
        )
        for one in slices
    ]


def reads(worker: Worker, batch: Inputs) -> Inputs:
    """What the worker's stage reads of a batch, nothing else."""
    part = worker.part
    return Inputs(
        rows=batch.rows,
        dense_BI=batch.dense_BI if part.is_first else None,
        bags=batch.bags if part.has_interaction else None,
        label_B=batch.label_B if part.is_last else None,
    )


def is_wanted(frame: Frame, wanted: Receive) -> bool:
    keys = ("kind", "sender", "number", "boundary", "round", "microbatch")
    return all(getattr(frame, key) == getattr(wanted, key) for key in keys)
