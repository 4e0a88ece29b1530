"""Dense weights without servers: trainers send each other their gradients, and update alike.

Each has the masters with their optimizer's state. The same pushes, averaged in trainer order, give
the same bits everywhere. With T trainers a push is sent T - 1 times; nothing is pulled, and nothing
rounds weights on their way.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import final

import numpy as np
from torch import Tensor
from typing_extensions import override

from dlrm_hybrid.comm.mailbox import Receive
from dlrm_hybrid.compress.gradient.compressor import Compressor, Selected, Sent
from dlrm_hybrid.compress.gradient.layout import Indices, Layout, Spec
from dlrm_hybrid.compress.update import Update
from dlrm_hybrid.parallel.dense.bucket import Bucket, Change, ServerOptions
from dlrm_hybrid.parallel.dense.client import Client, LocalClient, run_rounds
from dlrm_hybrid.parallel.dense.published import SparseChange
from dlrm_hybrid.parallel.dense.sections import (
    bucket_bytes,
    digest_of,
    digest_section,
    flat_views,
    split_digest,
)
from dlrm_hybrid.parallel.effects import Port, Program
from dlrm_hybrid.parallel.topology import DenseTensor
from dlrm_hybrid.telemetry.spans import Span, SpanClock
from dlrm_hybrid.types import DlrmError, Version
from dlrm_hybrid.wire.frame import Frame, Kind, sealed
from dlrm_hybrid.wire.gradient_levels import UpdateSender
from dlrm_hybrid.wire.section import Section
from dlrm_hybrid.wire.sparse import Destination, Elements


@final
class PeerClient(Client):
    """The weights of one stage at one of several trainers without servers.

    Args:
        port: port of the worker.
        tensors: all dense tensors of the model; those of this worker's stage are taken.
        replica: this stage's parameters by name, contiguous float32, never moved in memory.
        options: how the masters are updated, and how often replicas are compared.
        compressor: compressor of this stage's tensors, which agrees on nothing with others.
        clock: measures encoding, decoding and applying of gradients.

    Attributes:
        weights: the replica by name; its values are those of the last `pull`.
    """

    def __init__(
        self,
        port: Port,
        tensors: Sequence[DenseTensor],
        replica: Mapping[str, Tensor],
        options: ServerOptions,
        compressor: Compressor,
        clock: SpanClock,
    ) -> None:
        self._port, self._name = port, str(port)
        self._compressor, self._options = compressor, options
        self._encoding = clock.within(Span.ENCODE)
        self._decoding = clock.within(Span.DECODE)
        self._applying = clock.within(Span.APPLY)
        self._tensors = [tensor for tensor in tensors if tensor.stage == port.stage]
        self._names = [tensor.name for tensor in self._tensors]
        self._num_bytes = bucket_bytes(self._tensors)
        self._layout = Layout([Spec(t.id, t.name, t.shape) for t in self._tensors])
        self._bucket = Bucket(self._tensors, replica, options, ())
        self.weights = {name: replica[name].detach() for name in self._names}
        flat = flat_views(self.weights)
        self._destination = Destination([flat[name] for name in self._names])
        self._members = port.topology.stage_group(port.stage)
        shapes = [tensor.shape for tensor in self._tensors]
        self._sender = UpdateSender(shapes) if compressor.sends_levels else None
        self._own: Update | None = None  # what others read in the last push, until it is applied
        self._digest: int | None = None  # of the weights it was computed with, if it is compared
        self._pushed = 0

    @override
    def pull(self) -> Program[None]:
        """Update the weights by the last push of every trainer, unless that is done.

        Raises:
            DlrmError: a push is malformed, or was computed with other weights; names its rank.
            DivergedError: a gradient is not finite; names trainer rank, step and tensor.
        """
        own, number = self._own, self._pushed - 1
        if own is None:
            return
        pushes: list[Update] = []
        for member in self._members:
            if member == self._port.rank:
                pushes.append(own)
            else:
                pushes.append(self._read((yield Receive(Kind.PUSH, member, number))))
        with self._applying:
            self._install(self._bucket.apply(pushes, number, self._title))
        self._own = None

    @override
    def push(self, gradients: Mapping[str, Tensor]) -> Program[None]:
        """Send this trainer's gradients to all others; the next `pull` applies them.

        Raises:
            DivergedError: a gradient is not finite.
        """
        number, self._pushed = self._pushed, self._pushed + 1
        ours = {tensor.name: gradients[tensor.name].contiguous() for tensor in self._tensors}
        encoding = self._compressor.encode(ours, number)
        sent = yield from run_rounds(self._port, number, encoding, self._encoding)
        with self._encoding:
            sections, self._own = self._coded(sent)
        self._digest = None
        if number % self._options.check_every == 0:
            self._digest = digest_of(self._destination.arrays)
            sections = (*sections, digest_section(self._digest))
        frame = Frame(
            kind=Kind.PUSH,
            sender=self._port.rank,
            attempt=self._port.attempt,
            number=number,
            sections=sections,
        )
        peers = [member for member in self._members if member != self._port.rank]
        shared = sealed(frame) if len(peers) > 1 else frame
        for peer in peers:
            self._port.transmit(peer, shared, self._num_bytes)

    def _coded(self, sent: Sent) -> tuple[tuple[Section, ...], Update]:
        """The sections of a push, and what others read in them; valid until the next step."""
        if self._sender is not None:
            elements = sent.elements(self._names)
            return (self._sender.encode(self._tensors[0].id, elements),), elements
        by_name = sent.sections()
        sections = tuple(by_name[name] for name in self._names)
        if isinstance(sent, Selected):
            return sections, sent.elements(self._names)
        return sections, self._bucket.gradients(sections, self._name, self._port.rank)

    def _read(self, frame: Frame) -> Update:
        what = f"{self._name}: push {frame.number} of {self._title_of(frame.sender)}"
        sections, digest = split_digest(frame.sections)
        if digest != self._digest:
            raise DlrmError(f"{what}: was computed with other weights than this trainer's")
        with self._decoding:
            return self._bucket.gradients(sections, what, frame.sender)

    def _install(self, change: Change) -> None:
        """Take over from the masters what an update has changed."""
        if isinstance(change, SparseChange):
            indices = Indices.of_flat(self._layout, change.indices_K)
            Elements(indices.splits_E, indices.local_K, change.weight_K).copy_to(self._destination)
            return
        masters = flat_views(self._bucket.weights())
        for name, array_N in zip(self._names, self._destination.arrays, strict=True):
            np.copyto(array_N, masters[name])

    def _title(self, place: int) -> str:
        return self._title_of(self._members[place])

    def _title_of(self, rank: int) -> str:
        return f"{self._port.topology.name(rank)} (rank {rank})"

    @override
    def settled(self) -> Version:
        return Version(self._pushed)

    def tensors(self) -> dict[str, Tensor]:
        """Views of all that a checkpoint must hold, named as a server's; `pull` before."""
        return {piece.name: piece.view for piece in self._bucket.pieces()}

    @override
    def restart(self, pushed: int, values: Mapping[str, Tensor]) -> None:
        self._bucket.restart(values)
        self._install(None)
        self._own, self._pushed = None, pushed


MasterClient = LocalClient | PeerClient
"""A client whose worker has the masters itself."""
