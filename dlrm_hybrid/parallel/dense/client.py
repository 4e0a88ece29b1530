"""A worker's side of its dense weights: pull a version before a step, push gradients after it."""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from typing import Protocol, TypeVar, final

import torch
from torch import Tensor
from typing_extensions import override

from dlrm_hybrid.comm.mailbox import Receive
from dlrm_hybrid.compress.gradient.collective import Collective, Sections
from dlrm_hybrid.compress.gradient.compressor import Compressor, Sent
from dlrm_hybrid.model.placement import Placement
from dlrm_hybrid.parallel.dense.master import MasterWeights, OptimizerConfig, copy_into
from dlrm_hybrid.parallel.dense.published import SUFFIX, adds
from dlrm_hybrid.parallel.dense.sections import (
    BucketReader,
    bucket_bytes,
    check_tensors,
    digest_of,
    flat_views,
    split_digest,
)
from dlrm_hybrid.parallel.effects import Port, Program
from dlrm_hybrid.parallel.sync import AtLeast, SyncPolicy, resumed_version
from dlrm_hybrid.parallel.topology import DenseTensor
from dlrm_hybrid.telemetry.spans import Span, SpanClock, Within
from dlrm_hybrid.types import DlrmError, Version
from dlrm_hybrid.wire.dense import array_of, dense
from dlrm_hybrid.wire.frame import DIFFERENCES, EVERYTHING, Frame, Kind
from dlrm_hybrid.wire.gradient_levels import UpdateSender
from dlrm_hybrid.wire.section import Encoding, Section, SectionError
from dlrm_hybrid.wire.sparse import Destination
from dlrm_hybrid.wire.ternary import mean_of


@final
class TernaryReplica:
    """The optimizer of one worker's replica.

    Args:
        replica: weights by name, contiguous; updated in place.
        optimizer: same as that of the servers.
    """

    def __init__(self, replica: Mapping[str, Tensor], optimizer: OptimizerConfig) -> None:
        self._master = MasterWeights(replica, optimizer)

    def follow(
        self, bucket: Sequence[DenseTensor], sections: Sequence[Section], number: int, what: str
    ) -> None:
        """Apply the mean gradients of a push; overwrite tensors that come as weights.

        Args:
            bucket: tensors of the sections, in their order.
            sections: LEVELS, or DENSE of float32.
            number: push number, which sets the learning rate.
            what: beginning of an error message.

        Raises:
            DlrmError: a section has another encoding or is malformed.
        """
        for tensor, section in zip(bucket, sections, strict=True):
            try:
                if section.encoding is not Encoding.LEVELS:
                    weight = torch.from_numpy(array_of(section).copy()).view(tensor.shape)
                    self._master.weights[tensor.name].copy_(weight)
                    continue
                mean = torch.from_numpy(mean_of(section)).view(tensor.shape)
            except (SectionError, ValueError) as error:
                raise DlrmError(f"{what}: {error}") from error
            self._master.apply_gradient(tensor.name, mean, number)

    def restart(self, values: Mapping[str, Tensor]) -> None:
        """Resume from the servers' `tensors`; raises DataError if a value is missing."""
        copy_into(self._master.tensors(), values)


Result = TypeVar("Result")


class Client(Protocol):
    """Keeps the weights of one stage of one trainer in step with the masters."""

    def pull(self) -> Program[None]:
        """Bring the weights, in place, to a version that the next push may be computed with."""
        ...

    def push(self, gradients: Mapping[str, Tensor]) -> Program[None]:
        """Hand over the stage's gradients, all of them, of this trainer's mean loss."""
        ...

    def settled(self) -> Version:
        """The version that exists once every push made so far has arrived."""
        ...

    def restart(self, pushed: int, values: Mapping[str, Tensor]) -> None:
        """Resume after `pushed` pushes, from the masters' `tensors` in a checkpoint.

        Raises:
            DataError: a value is missing or has another shape.
        """
        ...


@final
class ServerClient(Client):
    """The replica of one stage, whose masters are on servers.

    Args:
        port: port of the worker.
        tensors: all dense tensors of the model; those of this worker's stage are taken.
        replica: this stage's parameters by name, contiguous float32, never moved in memory.
        policy: decides the version that each push is computed with.
        compressor: compressor of this stage's tensors.
        clock: measures encoding of gradients, decoding and applying of versions.
        optimizer: optimizer of servers that publish means; None where they publish weights.

    Attributes:
        pushed: number of pushes, also before it joined; number of the next one.
    """

    def __init__(
        self,
        port: Port,
        tensors: Sequence[DenseTensor],
        replica: Mapping[str, Tensor],
        policy: SyncPolicy,
        compressor: Compressor,
        clock: SpanClock,
        optimizer: OptimizerConfig | None = None,
    ) -> None:
        self._port, self._name = port, str(port)
        self._policy = policy
        self._compressor = compressor
        self._encoding = clock.within(Span.ENCODE)
        self._decoding = clock.within(Span.DECODE)
        self._applying = clock.within(Span.APPLY)
        buckets: dict[int, list[DenseTensor]] = {}
        for tensor in tensors:
            if tensor.stage == port.stage:
                buckets.setdefault(port.topology.server(tensor.server), []).append(tensor)
        self._buckets = dict(sorted(buckets.items()))
        self._num_bytes = {owner: bucket_bytes(bucket) for owner, bucket in self._buckets.items()}
        names = [tensor.name for bucket in self._buckets.values() for tensor in bucket]
        self._replica = {name: replica[name].detach() for name in names}
        flat = flat_views(self._replica)
        self._destinations = {
            owner: Destination([flat[tensor.name] for tensor in bucket])
            for owner, bucket in self._buckets.items()
        }
        self._readers = {owner: BucketReader(bucket) for owner, bucket in self._buckets.items()}
        shapes = {owner: [t.shape for t in bucket] for owner, bucket in self._buckets.items()}
        self._senders = {
            owner: UpdateSender(shapes[owner]) for owner in shapes if compressor.sends_levels
        }
        self._ternary = None if optimizer is None else TernaryReplica(self._replica, optimizer)
        self._applied = dict.fromkeys(self._buckets, Version(0))
        self._first = Version(0)  # version that the replica began with or was last refreshed to
        self.pushed = 0
        self._skipped = 0

    @override
    def pull(self) -> Program[None]:
        """Apply every version up to the one the policy needs, in order.

        Raises:
            DlrmError: see `apply`.
        """
        for receive in self.wanted():
            self.apply((yield receive))
        if isinstance(self._policy.needs(self.pushed), AtLeast):
            for owner in self._buckets:
                while (frame := (yield self._newer(owner))) is not None:
                    self.apply(frame)

    def wanted(self, until: int | None = None) -> list[Receive]:
        """The receives of all versions still to be applied, in order.

        Args:
            until: last version; None for the one that the next push needs.
        """
        until = self._policy.needs(self.pushed).version if until is None else until
        return [
            Receive(Kind.PARAMETERS, owner, version)
            for owner, applied in self._applied.items()
            for version in range(applied + 1, until + 1)
        ]

    @override
    def push(self, gradients: Mapping[str, Tensor]) -> Program[None]:
        """Run the encoding's rounds, then send a PUSH to each server with tensors of this stage.

        Raises:
            DlrmError: the replica is not of a version that the policy allows.
            DivergedError: a gradient is not finite.
        """
        number = self.pushed
        needs = self._policy.needs(number)
        needed = max(needs.version, self._first)
        for version in self._applied.values():
            is_newer = version > needed and not isinstance(needs, AtLeast)
            if version < needed or is_newer:
                raise DlrmError(
                    f"{self._port}: push {number} with versions {self._applied} by server rank; "
                    f"it needs version {needed}"
                )
        self.pushed += 1
        ours = {name: gradients[name].contiguous() for name in self._replica}
        encoding = self._compressor.encode(ours, number)
        update = yield from run_rounds(self._port, number, encoding, self._encoding)
        self._send(number, update)

    def flush(self) -> Program[None]:
        """Push the compressor's whole residual, uncompressed, and apply all answers.

        Only with versions per worker: other servers expect one push per trainer.

        Raises:
            DlrmError: see `apply`.
        """
        with self._encoding:
            residual = self._compressor.flush()
        if residual:
            number, self.pushed = self.pushed, self.pushed + 1
            ids = {spec.name: spec.id for spec in self._compressor.layout.specs}
            sections = {name: dense(ids[name], t.cpu().numpy()) for name, t in residual.items()}
            self._send_sections(number, sections)
        yield from self._receive_answers()

    def _send(self, number: int, update: Sent) -> None:
        if not self._senders:
            with self._encoding:
                sections = update.sections()
            self._send_sections(number, sections)
        for owner, sender in self._senders.items():
            bucket, dense_bytes = self._buckets[owner], self._num_bytes[owner]
            with self._encoding:
                elements = update.elements([tensor.name for tensor in bucket])
                coded = sender.encode(bucket[0].id, elements)
            self._port.send(owner, Kind.PUSH, number, (coded,), dense_bytes=dense_bytes)

    def _send_sections(self, number: int, sections: Mapping[str, Section]) -> None:
        for owner, bucket in self._buckets.items():
            selected = tuple(sections[tensor.name] for tensor in bucket)
            self._port.send(owner, Kind.PUSH, number, selected, dense_bytes=self._num_bytes[owner])

    def skip(self) -> Program[None]:
        """Pull, then send an empty push in place of gradients; raises DlrmError as `apply`."""
        yield from self.pull()
        for owner in self._buckets:
            self._port.send(owner, Kind.PUSH, self.pushed, ())
        self.pushed += 1

    def apply(self, frame: Frame) -> None:
        """Apply a version: overwrite the elements that have changed, or apply the means it holds.

        Compares the replica with the digest, if the frame carries one.

        Raises:
            DlrmError: the version is not the next one, does not fit, or the replica is not what
                the server published; names rank, stage and version.
        """
        self._take(frame, Version(self._applied.get(frame.sender, 0) + 1))

    def refresh(self, whole: bool) -> Program[None]:
        """Fetch the newest masters, bit for bit; only with versions per worker.

        Every worker begins with it. It applies the answers under way first.

        Args:
            whole: fetch every element; else what has changed since the last version, or since the
                initial values that servers and replicas share.

        Raises:
            DlrmError: see `apply`.
        """
        yield from self._receive_answers()
        round_ = EVERYTHING if whole else DIFFERENCES
        for owner in self._buckets:
            self._port.send(owner, Kind.PULL, self.pushed, (), round_=round_)
        for owner in self._buckets:
            frame: Frame = yield Receive(Kind.PARAMETERS, owner, self.pushed, round=round_)
            self._take(frame, Version(self.pushed))
        self._first = Version(self.pushed)

    def _receive_answers(self) -> Program[None]:
        """Receive and apply the answers to all pushes made so far."""
        for owner, applied in self._applied.items():
            for version in range(applied + 1, self.pushed + 1):
                self.apply((yield Receive(Kind.PARAMETERS, owner, version)))

    def _take(self, frame: Frame, due: Version) -> None:
        bucket = self._buckets.get(frame.sender)
        what = f"{self._name}: {frame.kind.name} {frame.number} of rank {frame.sender}"
        if bucket is None or frame.kind is not Kind.PARAMETERS:
            raise DlrmError(f"{what}: not a version of anything of stage {self._port.stage}")
        if frame.number != due or frame.attempt != self._port.attempt:
            raise DlrmError(
                f"{what}, attempt {frame.attempt}: version {due} of attempt "
                f"{self._port.attempt} is due"
            )
        with self._applying:
            sections, digest = split_digest(frame.sections)
            holds_means = any(section.encoding is Encoding.LEVELS for section in sections)
            if self._ternary is not None and holds_means:
                check_tensors(sections, bucket, what)
                self._ternary.follow(bucket, sections, frame.number - 1, what)
            else:
                with self._decoding:
                    update = self._readers[frame.sender].decode(sections, what)
                destination = self._destinations[frame.sender]
                if adds(sections):
                    update.add_to(destination)
                else:
                    update.copy_to(destination)
            self._applied[frame.sender] = due
            if digest is not None and digest != self.digest(frame.sender):
                raise DlrmError(
                    f"{self._port}: stage {self._port.stage} differs from what "
                    f"{self._port.topology.name(frame.sender)} published as version {due}"
                )

    def digest(self, server: int) -> int:
        """Digest of the replica's tensors that the server with this rank owns."""
        return digest_of(self._destinations[server].arrays)

    @override
    def restart(self, pushed: int, values: Mapping[str, Tensor]) -> None:
        """Resume after `pushed` pushes, from the servers' `tensors` in a checkpoint.

        Takes over the version that the next push is computed with, which may be an older one, or
        the weights if `values` have no versions.

        Raises:
            DataError: a value is missing or has another shape.
        """
        version = resumed_version(self._policy, pushed)
        behind = self._policy.settled(pushed) - version
        suffix = f".behind{behind}" if behind else SUFFIX
        if self._ternary is not None:
            self._ternary.restart(values)  # its weights are the newest; the replica's may be older
        older = {name: values.get(name + suffix, values.get(name)) for name in self._replica}
        copy_into(self._replica, {name: one for name, one in older.items() if one is not None})
        self._applied = dict.fromkeys(self._buckets, version)
        self._first = version
        self.pushed = pushed

    def join(self, pushed: int) -> None:
        """Replace a worker that has left, counting on from `pushed`; `refresh` everything next.

        Args:
            pushed: more than the servers have seen of that worker.
        """
        self._applied = dict.fromkeys(self._buckets, Version(pushed))
        self.pushed = self._skipped = pushed

    @override
    def settled(self) -> Version:
        # Servers count only the pushes that a worker has made since it joined.
        return self._policy.settled(self.pushed - self._skipped)

    def _newer(self, owner: int) -> Receive:
        return Receive(Kind.PARAMETERS, owner, self._applied[owner] + 1, waits=False)


def run_rounds(
    port: Port, number: int, encoding: Generator[Collective, Sections, Result], encoded: Within
) -> Program[Result]:
    """Run the rounds of an encoding; returns its result. Without rounds it waits for nothing.

    Args:
        port: port of the worker; rounds go through the server of its stage.
        number: number of the push.
        encoding: generator from `Compressor.encode`.
        encoded: span entered while it computes.

    Raises:
        DlrmError: a result is not what its operation gives; names rank, push and round.
        DivergedError: a gradient is not finite.
    """
    server: int | None = None
    round_ = 0
    result: Sections | None = None
    while True:
        try:
            with encoded:
                collective = next(encoding) if result is None else encoding.send(result)
        except StopIteration as end:
            return end.value
        except SectionError as error:
            raise DlrmError(
                f"{port}: result of rank {server} for push {number}, round {round_ - 1}: {error}"
            ) from error
        server = port.topology.collective_server(port.stage)
        port.send(server, Kind.CONTRIBUTION, number, collective.value, round_=round_)
        frame: Frame = yield Receive(Kind.RESULT, server, number, round=round_)
        result = frame.sections
        round_ += 1


@final
class LocalClient(Client):
    """The only trainer of a world without servers: its own weights are the masters.

    Args:
        weights: this stage's parameters by name, updated in place.
        optimizer: the optimizer, with its learning rates.
        clock: measures updates of weights.
    """

    def __init__(
        self, weights: Mapping[str, Tensor], optimizer: OptimizerConfig, clock: SpanClock
    ) -> None:
        self._master = MasterWeights(weights, optimizer)
        self._applying = clock.within(Span.APPLY)
        self._pushed = 0

    @override
    def pull(self) -> Program[None]:
        """Do nothing: nobody else updates the weights."""
        yield from ()

    @override
    def push(self, gradients: Mapping[str, Tensor]) -> Program[None]:
        """Update the weights at once."""
        yield from ()
        with self._applying:
            self._master.apply_gradients(gradients, self._pushed)
        self._pushed += 1

    @override
    def settled(self) -> Version:
        return Version(self._pushed)

    @property
    def weights(self) -> Mapping[str, Tensor]:
        """The masters by name."""
        return self._master.weights

    def tensors(self) -> dict[str, Tensor]:
        """Views of all that a checkpoint must hold, named as a server's."""
        return self._master.tensors()

    @override
    def restart(self, pushed: int, values: Mapping[str, Tensor]) -> None:
        self._pushed = pushed
        copy_into(self._master.tensors(), values)


@final
class DeviceClient(Client):
    """A client whose weights are on a device; its replica, for messages, stays on the host.

    Args:
        client: client of the replica.
        weights: weights on the device, by name, updated in place.
        replica: weights on the host, by name.
        placement: where the stage computes.
        compresses: whether gradients are compressed on the device.
    """

    def __init__(
        self,
        client: Client,
        weights: Mapping[str, Tensor],
        replica: Mapping[str, Tensor],
        placement: Placement,
        *,
        compresses: bool,
    ) -> None:
        self._client = client
        self._pairs = [(weight.detach(), replica[name]) for name, weight in weights.items()]
        self._placement = placement
        self._compresses = compresses

    @override
    def pull(self) -> Program[None]:
        """Bring the replica to a version, then the weights to the replica."""
        self._placement.wait()  # copies of the replica have arrived before it changes
        yield from self._client.pull()
        for weight, value in self._pairs:
            weight.copy_(value, non_blocking=True)

    @override
    def push(self, gradients: Mapping[str, Tensor]) -> Program[None]:
        if not self._compresses:
            values = self._placement.down([*gradients.values()])
            gradients = dict(zip(gradients, values, strict=True))
        yield from self._client.push(gradients)

    @override
    def settled(self) -> Version:
        return self._client.settled()

    @override
    def restart(self, pushed: int, values: Mapping[str, Tensor]) -> None:
        self._client.restart(pushed, values)
