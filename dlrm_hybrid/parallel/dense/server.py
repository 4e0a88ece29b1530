"""A server's tensors: gradients in, versions out, in the order that `parallel.server` says.

The same pushes give the same bits whatever the order in which they arrive: a version is made when
all pushes of its step are there, summed in trainer order.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import reduce
from typing import final

from torch import Tensor

from dlrm_hybrid.compress.update import Update
from dlrm_hybrid.parallel.dense.bucket import Keeping, Unit
from dlrm_hybrid.parallel.dense.master import Learning, copy_into
from dlrm_hybrid.parallel.dense.options import ServerOptions
from dlrm_hybrid.parallel.dense.sections import digest_section
from dlrm_hybrid.parallel.outgoing import Outgoing
from dlrm_hybrid.parallel.sync import lockstep as server
from dlrm_hybrid.parallel.topology import DenseTensor, Topology
from dlrm_hybrid.telemetry.spans import Span, SpanClock
from dlrm_hybrid.telemetry.traffic import Versions
from dlrm_hybrid.types import DlrmError
from dlrm_hybrid.wire.frame import Frame, Kind, sealed
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
        options: of its versions.
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
        owned: dict[int, list[DenseTensor]] = {}
        for tensor in tensors:
            if tensor.server == index:
                owned.setdefault(tensor.stage, []).append(tensor)
        keeping = Keeping(
            staleness=options.policy.staleness,
            pull=options.pull,
            tells_levels=options.tells_levels,
        )
        self._units = {
            stage: Unit(unit, values, learning, keeping) for stage, unit in owned.items()
        }
        self._pushed: dict[tuple[int, int], Update] = {}
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
                    outgoing += self._tell(stage, version, changed, to, behind=0)
        return outgoing

    def digest(self, stage: int) -> int:
        """Of what is published of a stage, to compare with `Client.digest`."""
        return self._units[stage].digest(behind=0)

    def tensors(self) -> dict[str, Tensor]:
        """Views of all that a checkpoint must hold.

        Weights by name, the optimizer's memory as `<name>.<slot>`; where workers are told rounded
        values, what they were told as `<name>.published`; and with a staleness s that of the
        versions 1 … s before as `<name>.behind<n>`: a worker may still have to compute with them.
        """
        return {
            name: view for unit in self._units.values() for name, view in unit.tensors().items()
        }

    def versions(self) -> Versions:
        """What it has told in this attempt, to every worker once."""
        return reduce(Versions.plus, (unit.versions for unit in self._units.values()), Versions())

    def weights(self, stage: int) -> dict[str, Tensor]:
        """Views of the weights of one stage, by name; empty if this server owns none of them."""
        unit = self._units.get(stage)
        return {} if unit is None else unit.weights()

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
        for stage, unit in self._units.items():
            to = self._topology.stage_group(stage)
            for version in range(self._options.policy.version(step) + 1, step + 1):
                behind = step - version
                outgoing += self._tell(stage, version, unit.sections(behind), to, behind)
        return outgoing

    def _start(self, step: int) -> server.State:
        groups = {stage: self._topology.stage_group(stage) for stage in self._units}
        return server.start(self._options.policy, groups, step)

    def _gradients(self, frame: Frame) -> Update:
        stage = frame.sender % self._topology.stages
        what = f"push of {self._name(frame.sender)} for step {frame.step}"
        return self._units[stage].gradients(frame.sections, what)

    def _learn(self, stage: int, step: int) -> list[Section]:
        """Make version `step + 1` of a stage; the sections that say what has changed."""
        group = self._topology.stage_group(stage)
        pushes = [self._pushed.pop((worker, step)) for worker in group]
        unit = self._units[stage]
        learned = unit.learn(pushes, step, lambda trainer: self._name(group[trainer]))
        with self._encoding:
            return unit.tell(learned)

    def _tell(
        self, stage: int, version: int, sections: list[Section], to: Sequence[int], behind: int
    ) -> list[Outgoing]:
        """One frame for all trainers; it makes the version that many before the last one."""
        unit = self._units[stage]
        if version % self._options.check_every == 0:
            sections = [*sections, digest_section(unit.digest(behind))]
        frame = Frame(
            kind=Kind.PARAMETERS,
            sender=self._rank,
            attempt=self._options.attempt,
            step=version,
            boundary=0,
            microbatch=0,
            sections=tuple(sections),
        )
        told = sealed(frame) if len(to) > 1 else frame
        return [Outgoing(worker, told, unit.num_bytes) for worker in to]

    def _name(self, rank: int) -> str:
        known = 0 <= rank < self._topology.size
        return f"{self._topology.name(rank) if known else 'nobody'} (rank {rank})"
