"""A server's tensors: gradients in, versions out, in the order that `parallel.server` says.

The same pushes give the same bits whatever the order in which they arrive: a version is made when
all pushes of its step are there, summed in trainer order.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import final

import numpy as np
import torch
from torch import Tensor

from dlrm_hybrid.parallel import server
from dlrm_hybrid.parallel.master import Learning, Master, copy_into
from dlrm_hybrid.parallel.mean import check_finite, mean_into
from dlrm_hybrid.parallel.outgoing import Outgoing
from dlrm_hybrid.parallel.policy import Policy
from dlrm_hybrid.parallel.sections import (
    Array,
    arrays_of,
    digest_of,
    digest_section,
    flat_views,
    sections_of,
    unit_bytes,
)
from dlrm_hybrid.parallel.topology import DenseTensor, Topology
from dlrm_hybrid.types import DlrmError
from dlrm_hybrid.wire.frame import Frame, Kind


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerOptions:
    """How a server keeps its versions.

    Attributes:
        policy: the workers' policy.
        check_every: versions between two comparisons of the replicas with the published copy.
        attempt: how often the run has been restarted.
    """

    policy: Policy
    check_every: int
    attempt: int


@final
class ParameterServer:
    """One server rank without its loop; owns copies of the values it is given.

    Args:
        topology: of the world.
        index: of this server.
        tensors: all dense tensors of the model; those of this server are taken.
        values: initial value of every dense tensor by name, float32.
        learning: optimizer and learning rates.
        options: policy, digests, attempt.
    """

    def __init__(
        self,
        topology: Topology,
        index: int,
        tensors: Sequence[DenseTensor],
        values: Mapping[str, Tensor],
        learning: Learning,
        options: ServerOptions,
    ) -> None:
        self._topology = topology
        self._rank = topology.server(index)
        self._options = options
        self._units: dict[int, list[DenseTensor]] = {}
        for tensor in tensors:
            if tensor.server == index:
                self._units.setdefault(tensor.stage, []).append(tensor)
        names = [tensor.name for unit in self._units.values() for tensor in unit]
        self._master = Master({name: values[name].detach().clone() for name in names}, learning)
        self._published = flat_views(self._master.weights)
        self._older: dict[int, deque[dict[str, Tensor]]] = {
            stage: deque(self._copy(stage) for _ in range(options.policy.staleness))
            for stage in self._units
        }
        self._means = {name: np.empty_like(array) for name, array in self._published.items()}
        self._pushed: dict[tuple[int, int], list[Array]] = {}
        self._state = self._start(0)

    def handle(self, frame: Frame) -> list[Outgoing]:
        """Take a push; the answers to send before the next call, mostly none.

        Raises:
            DlrmError: the push is not due or does not fit; the message names rank and step.
            DivergedError: a gradient is not finite; names trainer rank, step and tensor.
        """
        if frame.kind is not Kind.PUSH or frame.attempt != self._options.attempt:
            raise DlrmError(
                f"{self._name(frame.sender)}, step {frame.step}: {frame.kind.name} of attempt "
                f"{frame.attempt}, expected PUSH of attempt {self._options.attempt}"
            )
        self._state, actions = server.step(self._state, server.Push(frame.sender, frame.step))
        self._pushed[frame.sender, frame.step] = self._gradients(frame)
        outgoing: list[Outgoing] = []
        for action in actions:
            match action:
                case server.MakeVersion(stage, step):
                    self._learn(stage, step)
                case server.SendVersion(stage, version, to):
                    frame = self._frame(version, self._published, stage)
                    outgoing += self._address(stage, frame, to)
        return outgoing

    def digest(self, stage: int) -> int:
        """Of what is published of a stage, to compare with `Client.digest`."""
        return digest_of(self._units[stage], self._published)

    def tensors(self) -> dict[str, Tensor]:
        """Views of all that a checkpoint must hold.

        Weights by name, the optimizer's memory as `<name>.<slot>`, and with a staleness s the
        versions 1 … s before as `<name>.behind<n>`: a worker may still have to compute with them.
        """
        older = {
            f"{name}.behind{behind}": tensor
            for copies in self._older.values()
            for behind, copy in enumerate(copies, start=1)
            for name, tensor in copy.items()
        }
        return {**self._master.tensors(), **older}

    def weights(self, stage: int) -> dict[str, Tensor]:
        """Views of the weights of one stage, by name; empty if this server owns none of them."""
        weights = self._master.weights
        return {tensor.name: weights[tensor.name] for tensor in self._units.get(stage, [])}

    def made(self, stage: int | None, version: int) -> bool:
        """Whether this version of a stage has been made; None for all stages."""
        return all(
            unit.version >= version
            for unit in self._state.units
            if stage is None or unit.stage == stage
        )

    def restart(self, step: int, values: Mapping[str, Tensor]) -> list[Outgoing]:
        """Go on after `step` steps from the `tensors` of a checkpoint of that step.

        Returns the versions that workers resumed at `step` have not applied yet: none with `sync`.

        Raises:
            DataError: a value is missing or has another shape.
        """
        copy_into(self.tensors(), values)
        self._state = self._start(step)
        self._pushed.clear()
        outgoing: list[Outgoing] = []
        for stage, copies in self._older.items():
            to = self._topology.stage_group(stage)
            for version in range(self._options.policy.version(step) + 1, step + 1):
                behind = step - version
                held = flat_views(copies[behind - 1]) if behind else self._published
                outgoing += self._address(stage, self._frame(version, held, stage), to)
        return outgoing

    def _start(self, step: int) -> server.State:
        groups = {stage: self._topology.stage_group(stage) for stage in self._units}
        return server.start(self._options.policy, groups, step)

    def _gradients(self, frame: Frame) -> list[Array]:
        """Views of the pushed gradients, in the order of the unit's tensors."""
        stage = frame.sender % self._topology.stages
        unit = self._units[stage]
        what = f"push of {self._name(frame.sender)} for step {frame.step}"
        return arrays_of(frame.sections, unit, what)

    def _learn(self, stage: int, step: int) -> None:
        """Make version `step + 1` of a stage."""
        copies = self._older[stage]
        if copies:
            copies.rotate()
            copy_into(copies[0], self._master.weights)
        group = self._topology.stage_group(stage)
        pushes = [self._pushed.pop((worker, step)) for worker in group]
        for tensor, gradients in zip(self._units[stage], zip(*pushes, strict=True), strict=True):
            mean = self._means[tensor.name]
            mean_into(mean, gradients)
            check_finite(
                tensor.name, step, mean, gradients, lambda trainer: self._name(group[trainer])
            )
            self._master.learn(tensor.name, torch.from_numpy(mean).view(tensor.shape), step)

    def _frame(self, version: int, values: Mapping[str, Array], stage: int) -> Frame:
        """One frame for all trainers; after a dense push every element may have changed."""
        unit = self._units[stage]
        sections = sections_of(unit, values)
        if version % self._options.check_every == 0:
            sections.append(digest_section(digest_of(unit, values)))
        return Frame(
            kind=Kind.PARAMETERS,
            sender=self._rank,
            attempt=self._options.attempt,
            step=version,
            boundary=0,
            microbatch=0,
            sections=tuple(sections),
        )

    def _address(self, stage: int, frame: Frame, to: Sequence[int]) -> list[Outgoing]:
        num_bytes = unit_bytes(self._units[stage])
        return [Outgoing(worker, frame, num_bytes) for worker in to]

    def _copy(self, stage: int) -> dict[str, Tensor]:
        weights = self._master.weights
        return {tensor.name: weights[tensor.name].clone() for tensor in self._units[stage]}

    def _name(self, rank: int) -> str:
        known = 0 <= rank < self._topology.size
        return f"{self._topology.name(rank) if known else 'nobody'} (rank {rank})"
