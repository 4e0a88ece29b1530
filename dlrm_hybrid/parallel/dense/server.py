"""One parameter server: pushes in, versions out, when the sync policy says so.

With a deterministic policy the same pushes give the same bits whatever the order in which they
arrive: they are summed in trainer order. With others, the same order gives the same bits. A pull
makes a replica equal to the weights of that moment, bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from typing import Any, final

from torch import Tensor

from dlrm_hybrid.comm.channel import Channel
from dlrm_hybrid.compress.update import Update
from dlrm_hybrid.model.tensors import Piece
from dlrm_hybrid.parallel.dense.bucket import Bucket, Change, ServerOptions
from dlrm_hybrid.parallel.dense.sections import digest_section
from dlrm_hybrid.parallel.effects import Outgoing
from dlrm_hybrid.parallel.sync import Action, Average, BucketState, Pull, Push, resumed_version
from dlrm_hybrid.parallel.topology import DenseTensor, Topology
from dlrm_hybrid.telemetry.histogram import ByTrainer, Histogram
from dlrm_hybrid.telemetry.spans import Span, SpanClock
from dlrm_hybrid.telemetry.traffic import Versions
from dlrm_hybrid.types import DlrmError, Version
from dlrm_hybrid.wire.frame import DIFFERENCES, EVERYTHING, Frame, Kind, sealed
from dlrm_hybrid.wire.section import Section

# A server may hear nothing for long; the channel notices the loss of other ranks.
IDLE_SECONDS = 86_400.0

Handle = Callable[[Frame], Iterable[Outgoing]]
"""Handles one frame; the frames it returns must be sent before anything else."""


@final
class ParameterServer:
    """One parameter server without its receive loop; it copies the values it is given.

    Args:
        topology: ranks and roles of the world.
        index: which server this is.
        tensors: all dense tensors of the model; those of this server are taken.
        values: initial value of every dense tensor by name, float32.
        options: how versions are made and published.
        clock: measures decoding of gradients and encoding of versions.

    Attributes:
        kinds: kinds of the frames that it handles.
    """

    kinds = (Kind.PUSH, Kind.PULL)

    def __init__(
        self,
        topology: Topology,
        index: int,
        tensors: Sequence[DenseTensor],
        values: Mapping[str, Tensor],
        options: ServerOptions,
        clock: SpanClock,
    ) -> None:
        self._topology = topology
        self._rank = topology.server(index)
        self._options = options
        self._names = {
            rank: f"{topology.name(rank)} (rank {rank})" for rank in range(topology.size)
        }
        self._decoding = clock.within(Span.DECODE)
        self._encoding = clock.within(Span.ENCODE)
        owned: dict[int, list[DenseTensor]] = {}
        for tensor in tensors:
            if tensor.server == index:
                owned.setdefault(tensor.stage, []).append(tensor)
        self._buckets = {
            stage: Bucket(tensors, values, options, self._followers(stage))
            for stage, tensors in owned.items()
        }
        self._pushed: dict[Push, Update] = {}
        self._staleness: dict[int, Histogram] = {}
        self._states = self._settled((0,) * topology.stages)

    def handle(self, frame: Frame) -> list[Outgoing]:
        """Handle a PULL or a possibly empty PUSH; returns the frames to send before the next call.

        Raises:
            DlrmError: the frame is not due or does not fit; the message names rank and number.
            DivergedError: a gradient is not finite; names trainer rank, step and tensor.
        """
        what = f"{frame.kind.name.lower()} {frame.number} of {self._name(frame.sender)}"
        if frame.kind not in self.kinds or frame.attempt != self._options.attempt:
            raise DlrmError(
                f"{what}: {frame.kind.name} of attempt {frame.attempt}, expected PUSH or PULL of "
                f"attempt {self._options.attempt}"
            )
        stage = frame.sender % self._topology.stages
        if stage not in self._states or frame.sender >= self._topology.num_workers:
            raise DlrmError(f"{what}: this server owns nothing of that rank's stage")
        take = self._take_push if frame.kind is Kind.PUSH else self._take_pull
        return take(stage, frame, what)

    def _take_push(self, stage: int, frame: Frame, what: str) -> list[Outgoing]:
        push, state = Push(frame.sender, frame.number), self._states[stage]
        if frame.is_pass:
            self._states[stage], actions = state.on_pass(push)
            return self._act(stage, actions)
        self._states[stage], actions = state.on_push(push)
        with self._decoding:
            bucket = self._buckets[stage]
            self._pushed[push] = bucket.gradients(frame.sections, what, frame.sender)
        return self._act(stage, actions)

    def leave(self, worker: int) -> list[Outgoing]:
        """Remove a worker, which may rejoin; returns the frames for workers that waited for it."""
        stage = worker % self._topology.stages
        if stage not in self._states:
            return []
        self._states[stage], actions = self._states[stage].on_leave(worker)
        return self._act(stage, actions)

    def _act(self, stage: int, actions: Sequence[Action]) -> list[Outgoing]:
        bucket = self._buckets[stage]
        outgoing: list[Outgoing] = []
        change, number = None, 0
        for action in actions:
            if isinstance(action, Average):
                change, number = self._average(stage, action), action.number
                continue
            with self._encoding:
                sections = bucket.publish(change, number, action.to[0])
            outgoing += self._publish(stage, action.version, sections, action.to, behind=0)
        return outgoing

    def _take_pull(self, stage: int, frame: Frame, what: str) -> list[Outgoing]:
        """Answer with the newest weights, and their digest."""
        if frame.round not in (EVERYTHING, DIFFERENCES) or frame.sections:
            raise DlrmError(f"{what}: round {frame.round} with {len(frame.sections)} sections")
        worker = frame.sender
        self._states[stage] = self._states[stage].on_pull(Pull(worker, frame.number))
        bucket = self._buckets[stage]
        with self._encoding:
            sections = bucket.equalize(worker, everything=frame.round == EVERYTHING)
        digest = digest_section(bucket.digest(0, worker))
        answer = replace(
            frame, kind=Kind.PARAMETERS, sender=self._rank, sections=(*sections, digest)
        )
        return [Outgoing(worker, answer, bucket.num_bytes)]

    def digest(self, stage: int, trainer: int = 0) -> int:
        """Digest of a stage as sent to a trainer, to compare with `ServerClient.digest`."""
        return self._buckets[stage].digest(0, self._topology.worker(trainer, stage))

    def pieces(self) -> list[Piece]:
        """Views of all that a checkpoint must hold.

        Weights by name, and the optimizer state as `<name>.<slot>`. Where versions are rounded or
        sparse, the workers' weights as `<name>.published`, and if sparse `<name>.threshold` and its
        `<name>.life`. With a history of h versions, the n-th before the newest, n = 1 … h, as
        `<name>.behind<n>`: a worker may still have to compute with it.
        """
        return [piece for bucket in self._buckets.values() for piece in bucket.pieces()]

    def tensors(self) -> dict[str, Tensor]:
        """The views of `pieces` by name."""
        return {piece.name: piece.view for piece in self.pieces()}

    def versions(self) -> Versions:
        """Counters of what was published in this attempt; a version for all workers counts once."""
        published = (bucket.versions for bucket in self._buckets.values())
        return reduce(Versions.plus, published, Versions())

    def staleness(self) -> ByTrainer:
        """Staleness in updates of this attempt's pushes; empty if the policy fixes it."""
        return self._staleness

    def weights(self, stage: int) -> dict[str, Tensor]:
        """Views of the weights of one stage, by name; empty if this server owns none of them."""
        bucket = self._buckets.get(stage)
        return {} if bucket is None else bucket.weights()

    def has_made(self, version: int, request: Mapping[str, Any]) -> bool:
        """Whether the versions that a request waits for are there.

        Args:
            version: that of the request's `stage`, or else of every stage.
            request: may have one for each stage instead, `pushed`.
        """
        stage, pushed = request.get("stage"), request.get("pushed")
        return all(
            state.version >= (version if pushed is None else pushed[owned])
            for owned, state in self._states.items()
            if stage is None or owned == stage
        )

    def restart(self, pushed: int | Sequence[int], values: Mapping[str, Tensor]) -> list[Outgoing]:
        """Resume from the `tensors` of a checkpoint made after `pushed` pushes of each worker.

        With versions per worker: of all workers together, with replicas equal to the weights.

        Args:
            pushed: pushes since the run began, per stage, or one number for all stages.
            values: tensors by name.

        Returns:
            the versions that workers resumed there have not applied yet: none with `sync`.

        Raises:
            DataError: a value is missing or has another shape.
        """
        pushed_S = (pushed,) * self._topology.stages if isinstance(pushed, int) else pushed
        self._states = self._settled(pushed_S)
        self._pushed.clear()
        for bucket in self._buckets.values():
            bucket.restart(values)
        policy = self._options.policy
        outgoing: list[Outgoing] = []
        for stage, bucket in self._buckets.items():
            to, newest = self._topology.stage_group(stage), policy.settled(pushed_S[stage])
            for number in range(resumed_version(policy, pushed_S[stage]) + 1, newest + 1):
                sections = bucket.sections(newest - number)
                outgoing += self._publish(stage, Version(number), sections, to, newest - number)
        return outgoing

    def _settled(self, pushed_S: Sequence[int]) -> dict[int, BucketState]:
        policy, topology = self._options.policy, self._topology
        return {
            stage: policy.bucket(topology.stage_group(stage), pushed_S[stage])
            for stage in self._buckets
        }

    def _followers(self, stage: int) -> tuple[int, ...]:
        """Workers of a stage that are each sent versions of their own."""
        policy = self._options.policy
        return () if policy.shares_versions else self._topology.stage_group(stage)

    def _average(self, stage: int, action: Average) -> Change:
        updates = [self._pushed.pop(push) for push in action.pushes]
        if action.staleness is not None:
            for push in action.pushes:
                trainer = push.sender // self._topology.stages
                self._staleness.setdefault(trainer, Histogram()).add(action.staleness)
        return self._buckets[stage].apply(
            updates, action.number, lambda index: self._name(action.pushes[index].sender)
        )

    def _publish(
        self, stage: int, version: Version, sections: list[Section], to: Sequence[int], behind: int
    ) -> list[Outgoing]:
        """One frame for all of `to`, of the version `behind` versions before the newest."""
        bucket = self._buckets[stage]
        if version % self._options.check_every == 0:
            sections = [*sections, digest_section(bucket.digest(behind, to[0]))]
        frame = Frame(
            kind=Kind.PARAMETERS,
            sender=self._rank,
            attempt=self._options.attempt,
            number=version,
            sections=tuple(sections),
        )
        shared = sealed(frame) if len(to) > 1 else frame
        return [Outgoing(worker, shared, bucket.num_bytes) for worker in to]

    def _name(self, rank: int) -> str:
        return self._names.get(rank) or f"nobody (rank {rank})"


def serve(
    channel: Channel,
    handlers: Mapping[Kind, Handle],
    workers: Collection[int],
    deadline_seconds: float,
    away: Collection[int] = (),
) -> int:
    """Handle frames until each of `workers` has said goodbye; returns their number of ticks.

    A worker that has left and may rejoin is not waited for.

    Args:
        channel: channel of this rank; the caller closes it.
        handlers: handlers of all kinds of frames that may come, but goodbyes.
        workers: ranks that will say goodbye.
        deadline_seconds: longest silence.
        away: away of `workers` that have already left.

    Raises:
        DlrmError: what a handler and the channel raise; a kind without a handler, a goodbye from
            another rank, or a frame after one.
    """
    here, gone = set(workers) - set(away), set(away)
    ticks = 0
    while here:
        frame = channel.receive(deadline_seconds)
        what = f"{frame.kind.name} {frame.number} of rank {frame.sender}"
        if frame.kind is Kind.LEFT:
            gone |= {*workers} & {frame.sender}  # also one that said goodbye and then failed
            here.discard(frame.sender)
        elif frame.sender in gone:  # it has rejoined
            gone.remove(frame.sender)
            here.add(frame.sender)
        elif frame.sender not in here:
            raise DlrmError(f"{what}, which has said goodbye or never had business here")
        if frame.kind is Kind.GOODBYE:
            here.remove(frame.sender)
            ticks = frame.number
            continue
        handle = handlers.get(frame.kind)
        if handle is None:
            if frame.kind is Kind.LEFT:
                continue
            raise DlrmError(f"{what}: a server takes no such frames")
        for outgoing in handle(frame):
            channel.send(*outgoing)
    return ticks


@final
@dataclass(frozen=True, slots=True)
class HandlerTable:
    """Handler table of a `Mailbox` for the frames that nobody waits for.

    Attributes:
        channel: where answers go.
        handlers: one per frame kind.
    """

    channel: Channel
    handlers: Mapping[Kind, Handle]

    def __call__(self, frame: Frame) -> bool:
        """Handle a frame and send the answers; False if its kind has no handler."""
        handle = self.handlers.get(frame.kind)
        if handle is None:
            return False
        for outgoing in handle(frame):
            self.channel.send(*outgoing)
        return True
