"""A server's tensors: gradients in, versions out, in the order that `parallel.server` says.

The same pushes give the same bits whatever the order in which they arrive: a version is made when
all pushes of its step are there, summed in trainer order.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from typing import final

import numpy as np
import torch
from torch import Tensor

from dlrm_hybrid.parallel import server
from dlrm_hybrid.parallel.aggregate import Aggregate
from dlrm_hybrid.parallel.changes import Array, Changes, changes_of, whole
from dlrm_hybrid.parallel.master import Learning, Master, copy_into
from dlrm_hybrid.parallel.mean import check_finite
from dlrm_hybrid.parallel.outgoing import Outgoing
from dlrm_hybrid.parallel.published import Published
from dlrm_hybrid.parallel.sections import (
    check_tensors,
    digest_of,
    digest_section,
    sections_of,
    unit_bytes,
)
from dlrm_hybrid.parallel.server_options import ServerOptions
from dlrm_hybrid.parallel.topology import DenseTensor, Topology
from dlrm_hybrid.telemetry.spans import Span, SpanClock
from dlrm_hybrid.types import DlrmError
from dlrm_hybrid.wire.frame import Frame, Kind
from dlrm_hybrid.wire.section import Section


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
        clock: told when gradients are decoded and versions encoded.
    """

    def __init__(
        self,
        topology: Topology,
        index: int,
        tensors: Sequence[DenseTensor],
        values: Mapping[str, Tensor],
        learning: Learning,
        options: ServerOptions,
        clock: SpanClock,
    ) -> None:
        self._topology = topology
        self._rank = topology.server(index)
        self._options = options
        self._decoding = clock.within(Span.DECODE)
        self._encoding = clock.within(Span.ENCODE)
        self._units: dict[int, list[DenseTensor]] = {}
        for tensor in tensors:
            if tensor.server == index:
                self._units.setdefault(tensor.stage, []).append(tensor)
        names = [tensor.name for unit in self._units.values() for tensor in unit]
        self._master = Master({name: values[name].detach().clone() for name in names}, learning)
        self._published = Published(self._master.weights, options.pull)
        self._older: dict[int, deque[dict[str, Array]]] = {
            stage: deque(self._copy(stage) for _ in range(options.policy.staleness))
            for stage in self._units
        }
        self._means = {name: Aggregate(values[name].numel()) for name in names}
        self._pushed: dict[tuple[int, int], list[Changes]] = {}
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
        with self._decoding:
            self._pushed[frame.sender, frame.step] = self._gradients(frame)
        outgoing: list[Outgoing] = []
        changed: list[Section] = []
        for action in actions:
            match action:
                case server.MakeVersion(stage, step):
                    changed = self._learn(stage, step)
                case server.SendVersion(stage, version, to):
                    told = self._frame(version, changed, stage, self._published.values)
                    outgoing += self._address(stage, told, to)
        return outgoing

    def digest(self, stage: int) -> int:
        """Of what is published of a stage, to compare with `Client.digest`."""
        return digest_of(self._units[stage], self._published.values)

    def tensors(self) -> dict[str, Tensor]:
        """Views of all that a checkpoint must hold.

        Weights by name, the optimizer's memory as `<name>.<slot>`; where workers are told rounded
        values, what they were told as `<name>.published`; and with a staleness s that of the
        versions 1 … s before as `<name>.behind<n>`: a worker may still have to compute with them.
        """
        weights = self._master.weights
        older = {
            f"{name}.behind{behind}": torch.from_numpy(array).view(weights[name].shape)
            for copies in self._older.values()
            for behind, copy in enumerate(copies, start=1)
            for name, array in copy.items()
        }
        return {**self._master.tensors(), **self._published.tensors(), **older}

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
                held = copies[behind - 1] if behind else self._published.values
                sections = sections_of(self._units[stage], held)
                outgoing += self._address(stage, self._frame(version, sections, stage, held), to)
        return outgoing

    def _start(self, step: int) -> server.State:
        groups = {stage: self._topology.stage_group(stage) for stage in self._units}
        return server.start(self._options.policy, groups, step)

    def _gradients(self, frame: Frame) -> list[Changes]:
        """The pushed gradients, in the order of the unit's tensors."""
        stage = frame.sender % self._topology.stages
        what = f"push of {self._name(frame.sender)} for step {frame.step}"
        check_tensors(frame.sections, self._units[stage], what)
        return [changes_of(section, what) for section in frame.sections]

    def _learn(self, stage: int, step: int) -> list[Section]:
        """Make version `step + 1` of a stage; the sections that say what has changed."""
        copies = self._older[stage]
        if copies:
            copies.rotate()
            for name, array in copies[0].items():
                np.copyto(array, self._published.values[name])
        group = self._topology.stage_group(stage)
        pushes = [self._pushed.pop((worker, step)) for worker in group]
        return [
            self._learn_tensor(tensor, gradients, step)
            for tensor, gradients in zip(self._units[stage], zip(*pushes, strict=True), strict=True)
        ]

    def _learn_tensor(
        self, tensor: DenseTensor, gradients: Sequence[Changes], step: int
    ) -> Section:
        group = self._topology.stage_group(tensor.stage)
        mean = self._means[tensor.name].mean(gradients)
        check_finite(
            tensor.name,
            step,
            mean.values_K,
            [gradient.values_K for gradient in gradients],
            lambda trainer: self._name(group[trainer]),
        )
        indices_K = mean.indices_K
        if indices_K is not None and self._master.moves_all:
            mean, indices_K = whole(mean, tensor.count), None
        gradient_K = torch.from_numpy(mean.values_K)
        if indices_K is None:
            self._master.learn(tensor.name, gradient_K.view(tensor.shape), step)
        elif len(indices_K):
            index_K = torch.from_numpy(indices_K).long()
            self._master.learn_at(tensor.name, index_K, gradient_K, step)
        with self._encoding:
            return self._published.tell(tensor, indices_K)

    def _frame(
        self, version: int, sections: list[Section], stage: int, values: Mapping[str, Array]
    ) -> Frame:
        """One frame for all trainers; `values` are what a replica then holds."""
        if version % self._options.check_every == 0:
            digest = digest_of(self._units[stage], values)
            sections = [*sections, digest_section(digest)]
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

    def _copy(self, stage: int) -> dict[str, Array]:
        values = self._published.values
        return {tensor.name: values[tensor.name].copy() for tensor in self._units[stage]}

    def _name(self, rank: int) -> str:
        known = 0 <= rank < self._topology.size
        return f"{self._topology.name(rank) if known else 'nobody'} (rank {rank})"
