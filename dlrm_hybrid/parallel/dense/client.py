"""A worker's side of its dense weights: what to send after a step, what to wait for before one."""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from typing import Protocol, final

from torch import Tensor

from dlrm_hybrid.compress.gradient.collective import Collective, Sections
from dlrm_hybrid.compress.gradient.compressor import Compressor
from dlrm_hybrid.compress.update import Destination, decode
from dlrm_hybrid.parallel.dense.learner import Learner, holds_means
from dlrm_hybrid.parallel.dense.master import Learning, Master, copy_into
from dlrm_hybrid.parallel.dense.mirror import SUFFIX, adds
from dlrm_hybrid.parallel.dense.options import ClientOptions
from dlrm_hybrid.parallel.dense.sections import (
    check_tensors,
    digest_of,
    flat_views,
    split_digest,
    unit_bytes,
)
from dlrm_hybrid.parallel.effects import Receive
from dlrm_hybrid.parallel.finite import check_finite
from dlrm_hybrid.parallel.outgoing import Outgoing
from dlrm_hybrid.parallel.topology import DenseTensor, Topology
from dlrm_hybrid.telemetry.spans import Span, SpanClock
from dlrm_hybrid.types import DlrmError
from dlrm_hybrid.wire.frame import Frame, Kind
from dlrm_hybrid.wire.section import Section

Pushing = Generator[Collective, Sections, list[Outgoing]]
"""Yields the rounds of a step, is sent their results, and returns what to send."""


class Client(Protocol):
    """How the weights of one stage of one trainer follow the truth."""

    def push(self, step: int, gradients: Mapping[str, Tensor]) -> Pushing:
        """Hand over the gradients of this trainer's mean loss at `step`, all of the stage's.

        Send what comes back before the gradients' memory is used again.
        """
        ...

    def wants(self, step: int) -> list[Receive]:
        """The frames to `apply`, in this order, before `step` is computed."""
        ...

    def apply(self, frame: Frame) -> None:
        """Take over a version, in place."""
        ...


@final
class ServerClient:
    """The replica of one stage, whose truth lies on servers.

    Args:
        topology: of the world.
        rank: of this worker.
        tensors: all dense tensors of the model; those of this worker's stage are taken.
        replica: this stage's parameters by name, contiguous float32, never moved in memory.
        options: policy, attempt, and whether this replica learns.
        compressor: made for those of `tensors` that are of this stage.
        clock: told when versions are decoded.
    """

    def __init__(
        self,
        topology: Topology,
        rank: int,
        tensors: Sequence[DenseTensor],
        replica: Mapping[str, Tensor],
        options: ClientOptions,
        compressor: Compressor,
        clock: SpanClock,
    ) -> None:
        self._topology = topology
        self._rank = rank
        self._stage = rank % topology.stages
        self._policy = options.policy
        self._attempt = options.attempt
        self._compressor = compressor
        self._decoding = clock.within(Span.DECODE)
        self._units: dict[int, list[DenseTensor]] = {}
        for tensor in tensors:
            if tensor.stage == self._stage:
                owner = topology.server(tensor.server)
                self._units.setdefault(owner, []).append(tensor)
        self._units = dict(sorted(self._units.items()))
        self._unit_bytes = {owner: unit_bytes(unit) for owner, unit in self._units.items()}
        names = [tensor.name for unit in self._units.values() for tensor in unit]
        self._replica = {name: replica[name].detach() for name in names}
        flat = flat_views(self._replica)
        self._flat = {
            owner: [flat[tensor.name] for tensor in unit] for owner, unit in self._units.items()
        }
        learning = options.learning
        self._learner = None if learning is None else Learner(self._replica, learning)
        self._copies = {owner: Destination(arrays) for owner, arrays in self._flat.items()}
        self._applied = dict.fromkeys(self._units, 0)
        self._pushed = 0

    def push(self, step: int, gradients: Mapping[str, Tensor]) -> Pushing:
        """One frame for each server that owns something of this stage, after the method's rounds.

        Raises:
            DlrmError: `step` is not due, or the replica is not of the version it needs.
            DivergedError: a gradient is not finite.
        """
        needed = self._policy.version(step)
        if step != self._pushed or any(have != needed for have in self._applied.values()):
            raise DlrmError(
                f"{self._name}: push of step {step} with versions {self._applied} by server rank; "
                f"step {self._pushed} is due, with version {needed}"
            )
        self._pushed += 1
        own = {name: gradients[name].contiguous() for name in self._replica}
        sections = yield from self._compressor.encode(own, step)
        return [self._push(owner, step, sections) for owner in self._units]

    def wants(self, step: int) -> list[Receive]:
        """Every version not yet applied up to the one that `step` is computed with."""
        return [
            Receive(Kind.PARAMETERS, sender=owner, step=version, boundary=0, microbatch=0)
            for owner, applied in self._applied.items()
            for version in range(applied + 1, self._policy.version(step) + 1)
        ]

    def apply(self, frame: Frame) -> None:
        """Overwrite what has changed, or learn; compares the replica with the digest, if one came.

        Raises:
            DlrmError: the version is not the next one, does not fit, or the replica is not what
                the server published; the message names rank, stage and step.
        """
        unit = self._units.get(frame.sender)
        due = self._applied.get(frame.sender, 0) + 1
        what = f"{self._name}: {frame.kind.name} {frame.step} of rank {frame.sender}"
        if unit is None or frame.kind is not Kind.PARAMETERS:
            raise DlrmError(f"{what}: not a version of anything of stage {self._stage}")
        if frame.step != due or frame.attempt != self._attempt:
            raise DlrmError(
                f"{what}, attempt {frame.attempt}: version {due} of attempt {self._attempt} is due"
            )
        sections, digest = split_digest(frame.sections)
        check_tensors(sections, unit, what)
        if self._learner is not None and holds_means(sections):
            self._learner.follow(unit, sections, frame.step - 1, what)
        else:
            with self._decoding:
                update = decode(sections, what)
            apply = update.add_to if adds(sections) else update.copy_to
            apply(self._copies[frame.sender])
        self._applied[frame.sender] = due
        if digest is not None and digest != self.digest(frame.sender):
            raise DlrmError(
                f"{self._name}: stage {self._stage} differs from what "
                f"{self._topology.name(frame.sender)} published as version {frame.step}"
            )

    def digest(self, server: int) -> int:
        """Of the replica of what the server with this rank owns of the stage."""
        return digest_of(self._flat[server])

    def restart(self, step: int, values: Mapping[str, Tensor]) -> None:
        """Go on after `step` steps from the servers' `tensors` in a checkpoint of that step.

        Takes the version that `step` is computed with, which may be an older one.

        Raises:
            DataError: a value is missing or has another shape.
        """
        version = self._policy.version(step)
        end = f".behind{step - version}" if version < step else ""
        if not end and any(f"{name}{SUFFIX}" in values for name in self._replica):
            end = SUFFIX
        copy_into(self._replica, {name: values[name + end] for name in self._replica})
        if self._learner is not None:
            self._learner.restart(values)
        self._applied = dict.fromkeys(self._units, version)
        self._pushed = step

    @property
    def _name(self) -> str:
        return f"{self._topology.name(self._rank)} (rank {self._rank})"

    def _push(self, owner: int, step: int, sections: Mapping[str, Section]) -> Outgoing:
        unit = self._units[owner]
        frame = Frame(
            kind=Kind.PUSH,
            sender=self._rank,
            attempt=self._attempt,
            step=step,
            boundary=0,
            microbatch=0,
            sections=tuple(sections[tensor.name] for tensor in unit),
        )
        return Outgoing(owner, frame, self._unit_bytes[owner])


@final
class LocalClient:
    """The only trainer of a world without servers: its own weights are the truth.

    Args:
        name: of the worker, for messages.
        weights: this stage's parameters by name, learned in place.
        learning: optimizer and learning rates.
    """

    def __init__(self, name: str, weights: Mapping[str, Tensor], learning: Learning) -> None:
        self._name = name
        self._master = Master(weights, learning)

    def push(self, step: int, gradients: Mapping[str, Tensor]) -> Pushing:
        """Learn at once, nothing to send; raises DivergedError if a gradient is not finite."""
        yield from ()
        for name in self._master.weights:
            gradient = gradients[name]
            array = gradient.detach().contiguous().view(-1).numpy()
            check_finite(name, step, array, [array], lambda _: self._name)
            self._master.learn(name, gradient, step)
        return []

    def wants(self, step: int) -> list[Receive]:
        """Nothing."""
        return []

    def apply(self, frame: Frame) -> None:
        """Refused: nobody else has versions."""
        raise DlrmError(f"{frame.kind.name} {frame.step} of rank {frame.sender}: no servers here")

    def tensors(self) -> dict[str, Tensor]:
        """Views of all that a checkpoint must hold, named as a server's."""
        return self._master.tensors()

    def restart(self, values: Mapping[str, Tensor]) -> None:
        """Go on from the `tensors` of a checkpoint; raises DataError as `ServerClient.restart`."""
        copy_into(self._master.tensors(), values)
