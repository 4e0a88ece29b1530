"""Layout of a planned world: which rank computes and owns what, and the frames of a step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from dlrm_hybrid.comm.metered import traffic_of
from dlrm_hybrid.config.schema import Config
from dlrm_hybrid.model.spec import ModelShape, Partition
from dlrm_hybrid.parallel.topology import DenseTensor, Topology, lay_out
from dlrm_hybrid.run.assembly import build
from dlrm_hybrid.telemetry.traffic import Traffic
from dlrm_hybrid.wire.frame import Kind


class Way(NamedTuple):
    """A class of frames with the same purpose and ends, over all trainers.

    Attributes:
        kind: kind of the frames.
        stage: stage of the worker that sends or receives them.
        server: index of the server at the other end, or 0.
        number: number of the boundary or round, or 0.
    """

    kind: Kind
    stage: int
    server: int = 0
    number: int = 0


class Sent(NamedTuple):
    """Number and size of the frames of a `Way` in a step of all trainers.

    Attributes:
        messages: number of frames.
        num_bytes: mean bytes of a frame.
    """

    messages: float
    num_bytes: float


@dataclass(frozen=True, kw_only=True)
class Layout:
    """A planned world: configuration, tables and traffic.

    Attributes:
        config: configuration of the run.
        spec: the whole model.
        sent: frames of a step.
        exchange: bytes from a trainer to each other one with which it shares tables, for each
            collective of a step in order; the last one follows backward.
    """

    config: Config
    spec: ModelShape
    sent: Mapping[Way, Sent]
    exchange: tuple[float, ...] = ()

    @cached_property
    def partition(self) -> Partition:
        """The stages of the model."""
        return Partition.of(self.spec, self.config.parallel.cuts)

    @cached_property
    def topology(self) -> Topology:
        """Ranks and roles of workers and servers."""
        return build.topology(self.config)

    @cached_property
    def tensors(self) -> tuple[DenseTensor, ...]:
        """Every dense parameter with its stage and server."""
        servers = self.config.parallel.servers
        return lay_out(self.spec.dense_shapes(), self.partition.stage_of, servers)

    def elements(self, stage: int, server: int | None = None) -> int:
        """Number of dense parameters of a stage, or of those that one server owns."""
        of_stage = (tensor for tensor in self.tensors if tensor.stage == stage)
        return sum(tensor.count for tensor in of_stage if server is None or tensor.server == server)

    def matrices(self, stage: int) -> list[tuple[int, int]]:
        """Outputs and inputs of all weight matrices of a stage."""
        shapes = self.spec.dense_shapes()
        names = self.partition.stages[stage].parameter_names
        return [(shape[0], shape[1]) for shape in map(shapes.__getitem__, names) if len(shape) == 2]

    def size(self, kind: Kind, stage: int, server: int = 0, number: int = 0) -> float:
        """Mean bytes of a frame; 0 if there is none."""
        return self.sent.get(Way(kind, stage, server, number), Sent(0.0, 0.0)).num_bytes

    def bytes_by_class(self) -> dict[Traffic, float]:
        """Bytes sent by all ranks in a step of all trainers, without control messages."""
        trainers = self.topology.trainers
        sizes = dict.fromkeys(
            (traffic for traffic in Traffic if traffic is not Traffic.CONTROL), 0.0
        )
        sizes[Traffic.EMBEDDING] = sum(self.exchange) * trainers * (trainers - 1)
        for way, sent in self.sent.items():
            if (traffic := traffic_of(way.kind)) in sizes:
                sizes[traffic] += sent.messages * sent.num_bytes
        return sizes
