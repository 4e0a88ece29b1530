"""A small DLRM in float64, three stages that run diversely stale with the engine's own parts.

Layers 4-6-3, tables of 5 and 7 rows, layers 5-1; cut after the first layer of each MLP. Weights and
batches are those behind the numbers in `test_diversely_stale.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from typing import Any

import numpy as np
import torch
from tiny_world import is_wanted
from torch import Tensor, nn

from dlrm_hybrid.bags import Bags
from dlrm_hybrid.compress.activation.codec import ActivationCodec, Key, Mask, Sections
from dlrm_hybrid.model.columns import ColumnBags
from dlrm_hybrid.model.optimizer import Constant, Momentum, Optimizer, Sgd
from dlrm_hybrid.model.spec import ModelSpec, Partition, StagePart
from dlrm_hybrid.parallel.boundaries import Boundaries
from dlrm_hybrid.parallel.dense.client import LocalClient
from dlrm_hybrid.parallel.dense.master import OptimizerConfig
from dlrm_hybrid.parallel.effects import Port, Program
from dlrm_hybrid.parallel.schedule import Pipeline, StageOps
from dlrm_hybrid.parallel.stage import Inputs, Stage
from dlrm_hybrid.parallel.step import StepMetrics, train_step
from dlrm_hybrid.parallel.tables.base import Tables
from dlrm_hybrid.parallel.topology import Topology
from dlrm_hybrid.parallel.worker import Worker
from dlrm_hybrid.telemetry.spans import SpanClock
from dlrm_hybrid.types import BatchNumber, Tick
from dlrm_hybrid.wire.dense import array_of, dense
from dlrm_hybrid.wire.frame import Frame, decode, encode

SPEC = ModelSpec(embedding_dim=3, bottom=(4, 6, 3), top=(5, 1), table_rows=(5, 7))
CUTS = ("bottom.1", "top.1")
STAGES = 3
ROWS = 6
NAMES = (("w1", "b1"), ("w2", "b2", "w3", "b3"), ("w4", "b4"))


def initial() -> dict[str, Tensor]:
    """Of all blocks: `w1` and `b1`, …, and the tables `e0` and `e1`."""
    rng = np.random.default_rng(0)
    shapes = {"w1": (6, 4), "b1": (6,), "w2": (3, 6), "b2": (3,), "e0": (5, 3), "e1": (7, 3)}
    shapes |= {"w3": (5, 6), "b3": (5,), "w4": (1, 5), "b4": (1,)}
    return {
        name: torch.from_numpy(0.5 * rng.standard_normal(shape)) for name, shape in shapes.items()
    }


def batch(number: int) -> Inputs:
    rng = np.random.default_rng([1, number])
    dense_BI = rng.standard_normal((ROWS, 4))
    ids_FB = np.stack([rng.integers(0, rows, ROWS) for rows in SPEC.table_rows])
    label_B = (rng.random(ROWS) < 0.3).astype(float)
    return Inputs(
        rows=ROWS,
        dense_BI=torch.from_numpy(dense_BI),
        bags=Bags(torch.from_numpy(ids_FB)),
        label_B=torch.from_numpy(label_B),
    )


class Block(nn.Module):
    """A stage's layers in float64; ours compute in float32."""

    def __init__(self, part: StagePart, values: dict[str, Tensor]) -> None:
        super().__init__()
        self.part = part
        self.own = nn.ParameterDict(
            {name: nn.Parameter(values[name].clone()) for name in NAMES[part.index]}
        )

    def dense_parameters(self) -> dict[str, nn.Parameter]:
        return dict(self.own.items())

    def forward(self, x_BN: Tensor, pooled_BFD: Tensor | None, rows: range | None = None) -> Tensor:
        if self.part.is_first:
            return self._layer(x_BN, 1).relu()
        if self.part.is_last:
            return self._layer(x_BN, 4)
        assert pooled_BFD is not None
        x_BD = self._layer(x_BN, 2).relu()
        z = [x_BD, *pooled_BFD.unbind(1)]
        dots = [(z[i] * z[j]).sum(1, keepdim=True) for i in range(len(z)) for j in range(i)]
        return self._layer(torch.cat([x_BD, *dots], 1), 3).relu()

    def _layer(self, x_BN: Tensor, number: int) -> Tensor:
        return x_BN @ self.own[f"w{number}"].T + self.own[f"b{number}"]


class Bytes(ActivationCodec):
    """float64 as it is."""

    def encode(self, x_BN: Tensor, key: Key) -> tuple[Sections, Mask]:
        return self.encode_gradient(x_BN, None, key), None

    def decode(self, sections: Sections, shape: torch.Size, key: Key) -> tuple[Tensor, Mask]:
        return self.decode_gradient(sections, shape, None, key), None

    def encode_gradient(self, g_BN: Tensor, mask: Mask, key: Key) -> Sections:
        return (dense(0, g_BN.contiguous().numpy().view(np.uint8)),)

    def decode_gradient(
        self, sections: Sections, shape: torch.Size, mask: Mask, key: Key
    ) -> Tensor:
        return torch.from_numpy(array_of(sections[0]).copy().view(np.float64)).view(shape)


class PlainTables(Tables):
    """Tables in float64 with the optimizer of the dense weights."""

    def __init__(self, values: dict[str, Tensor], optimizer: Optimizer, lr: float) -> None:
        self.rows = [values[f"e{table}"].clone() for table in range(len(SPEC.table_rows))]
        self._state = [{k: torch.zeros_like(t) for k in optimizer.state_names} for t in self.rows]
        self._optimizer, self._lr = optimizer, lr
        self._ids: dict[BatchNumber, Tensor] = {}

    def lookup(self, batch: BatchNumber, bags: Bags[Tensor], lr: float) -> Program[Tensor]:
        yield from ()
        self._ids[batch] = ids_FB = bags.values
        return torch.stack([rows[ids] for rows, ids in zip(self.rows, ids_FB, strict=True)], 1)

    def update(self, batch: BatchNumber, gradient_BFD: Tensor) -> Program[None]:
        yield from ()
        ids_FB = self._ids.pop(batch)
        for table, (rows, ids) in enumerate(zip(self.rows, ids_FB, strict=True)):
            gradient = torch.zeros_like(rows).index_add_(0, ids, gradient_BFD[:, table])
            self._optimizer.apply(rows, gradient, self._state[table], self._lr)


class Blocks:
    """Three workers of one trainer; each runs to the end without a clock.

    Attributes:
        waited: by kind of frame and boundary, the most frames that have waited for their receiver.
    """

    def __init__(self, schedule: StageOps, *, lr: float = 0.1, momentum: float = 0.0) -> None:
        values = initial()
        optimizer = Momentum(momentum=momentum) if momentum else Sgd()
        config = OptimizerConfig(optimizer=optimizer, schedule=Constant(base_lr=lr))
        topology = Topology(trainers=1, stages=STAGES, servers=0, interaction_stage=1)
        self.tables = PlainTables(values, optimizer, lr)
        self.mail: list[list[Frame]] = [[] for _ in range(STAGES)]
        self.waited: dict[tuple[str, int], int] = {}
        self.workers: list[Worker] = []
        for rank, part in enumerate(Partition.of(SPEC, CUTS).stages):
            model: Any = Block(part, values)
            port = Port(topology=topology, rank=rank, attempt=0, transmit=self._send)
            self.workers.append(
                Worker(
                    rank=rank,
                    stage=Stage(model, 1),
                    pipeline=Pipeline.of(schedule, STAGES, 1),
                    boundaries=Boundaries(
                        port, part, dict.fromkeys((-1, 0, 1, 2), Bytes()), SpanClock()
                    ),
                    tables=self.tables if part.has_interaction else None,
                    columns=ColumnBags.of(SPEC),
                    embedding_schedule=Constant(base_lr=lr),
                    client=LocalClient(model.dense_parameters(), config, SpanClock()),
                )
            )

    def run(self, batches: int, choose: Callable[[Sequence[int]], int]) -> list[float]:
        """Losses of all batches; whenever several workers can go on, `choose` says which does."""
        losses: list[float] = []
        programs = [self._whole(worker, batches, losses) for worker in self.workers]
        asked = {rank: next(program, None) for rank, program in enumerate(programs)}
        while any(effect is not None for effect in asked.values()):
            ready = [rank for rank, effect in asked.items() if self._frame(rank, effect)]
            assert ready, f"deadlock: {asked}"
            rank = choose(ready)
            frame = self._frame(rank, asked[rank])
            assert frame is not None
            self.mail[rank].remove(frame)
            try:
                asked[rank] = programs[rank].send(frame)
            except StopIteration:
                asked[rank] = None
        return losses

    def weights(self) -> dict[str, Tensor]:
        dense = {
            name: weight.detach()
            for worker in self.workers
            for name, weight in worker.stage.model.dense_parameters().items()
        }
        return dense | {f"e{table}": rows for table, rows in enumerate(self.tables.rows)}

    def _whole(
        self, worker: Worker, batches: int, losses: list[float]
    ) -> Generator[Any, Any, None]:
        for tick in range(batches):
            self._note((yield from train_step(worker, Tick(tick), batch(tick))), losses)
        for tick in range(batches, batches + worker.pipeline.most_in_flight):
            self._note((yield from train_step(worker, Tick(tick), None)), losses)

    def _note(self, metrics: StepMetrics, losses: list[float]) -> None:
        if metrics.loss_sum:
            losses.append(metrics.loss_sum / metrics.rows)

    def _frame(self, rank: int, effect: Any) -> Frame | None:
        if effect is None:
            return None
        return next((one for one in self.mail[rank] if is_wanted(one, effect)), None)

    def _send(self, to: int, frame: Frame, dense_equivalent_bytes: int) -> None:
        self.mail[to].append(decode(bytes(encode(frame))))
        key = (frame.kind.name, frame.boundary)
        waiting = sum((one.kind.name, one.boundary) == key for one in self.mail[to])
        self.waited[key] = max(self.waited.get(key, 0), waiting)
