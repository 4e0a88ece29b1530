"""Stage boundaries: activations and their gradients, encoded, sent, received and decoded.

Shapes: b rows of a micro-batch, N input width of the stage, M output width.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Literal, final

import torch
from torch import Tensor

from dlrm_hybrid.comm.mailbox import Receive
from dlrm_hybrid.compress.activation.codec import ActivationCodec, Key, Mask, Sections
from dlrm_hybrid.compress.host import fetched
from dlrm_hybrid.model.spec import StagePart
from dlrm_hybrid.parallel.effects import Port, Program
from dlrm_hybrid.telemetry.spans import Span, SpanClock
from dlrm_hybrid.types import BatchNumber
from dlrm_hybrid.wire.frame import EVALUATION, Kind

Underway = Callable[[Literal["F", "B"], int, int], Iterable[tuple[BatchNumber, int]]]
"""(op, sending stage, receiving stage) to the (batch, micro-batch) messages still on the way."""


@final
class Boundaries:
    """Moves activations and gradients across a stage's boundaries; None past either end.

    Args:
        port: port of the worker; the neighbouring stages of its trainer are rank - 1 and rank + 1.
        part: the stage.
        codecs: codec per boundary number.
        clock: measures encoding and decoding.

    Attributes:
        port: port of the worker.
    """

    def __init__(
        self,
        port: Port,
        part: StagePart,
        codecs: Mapping[int, ActivationCodec],
        clock: SpanClock,
    ) -> None:
        self.port = port
        self._part = part
        self._codecs = codecs
        self._encoding = clock.within(Span.ENCODE)
        self._decoding = clock.within(Span.DECODE)
        # Masks kept from forward to backward, by batch and micro-batch.
        self._sent: dict[tuple[BatchNumber, int], Mask] = {}
        self._received: dict[tuple[BatchNumber, int], Mask] = {}
        # Received for a checkpoint, before an op has asked for them.
        self._ahead: dict[tuple[Kind, BatchNumber, int], Tensor] = {}

    def receive_activations(
        self, batch: BatchNumber, microbatch: int, rows: int
    ) -> Program[Tensor | None]:
        """Receive and decode the stage's input, (b, N); None at the first stage."""
        if self._part.is_first:
            return None
        if (ahead := self._ahead.pop((Kind.ACTIVATION, batch, microbatch), None)) is not None:
            return ahead
        key = self._before(batch, microbatch)
        frame = yield self._from(self.port.rank - 1, Kind.ACTIVATION, key)
        shape = torch.Size((rows, self._part.input_width))
        with self._decoding:
            entered_bN, mask = self._codecs[key.boundary].decode(frame.sections, shape, key)
        self._received[batch, microbatch] = mask
        return entered_bN

    def send_activations(self, left_bM: Tensor | None, batch: BatchNumber, microbatch: int) -> None:
        """Encode the stage's output, (b, M), and send it to the next stage; None sends nothing."""
        if left_bM is None:
            return
        key = self._after(batch, microbatch)
        with self._encoding:
            codec = self._codecs[key.boundary]
            sections, mask = codec.encode(_reachable(left_bM, codec), key)
        self._sent[batch, microbatch] = mask
        self._send(self.port.rank + 1, Kind.ACTIVATION, key, sections, left_bM)

    def receive_gradient(
        self, batch: BatchNumber, microbatch: int, rows: int
    ) -> Program[Tensor | None]:
        """Receive and decode the gradient of the stage's output, (b, M); None at the last stage."""
        if self._part.is_last:
            return None
        ahead = self._ahead.pop((Kind.ACTIVATION_GRADIENT, batch, microbatch), None)
        if ahead is not None:
            return ahead
        key = self._after(batch, microbatch)
        frame = yield self._from(self.port.rank + 1, Kind.ACTIVATION_GRADIENT, key)
        mask = self._sent.pop((batch, microbatch))
        shape = torch.Size((rows, self._part.output_width))
        with self._decoding:
            return self._codecs[key.boundary].decode_gradient(frame.sections, shape, mask, key)

    def send_gradient(
        self, gradient_bN: Tensor | None, batch: BatchNumber, microbatch: int
    ) -> None:
        """Encode the gradient of the stage's input and send it back; None sends nothing."""
        if gradient_bN is None:
            return
        key = self._before(batch, microbatch)
        mask = self._received.pop((batch, microbatch))
        with self._encoding:
            codec = self._codecs[key.boundary]
            sections = codec.encode_gradient(_reachable(gradient_bN, codec), mask, key)
        self._send(self.port.rank - 1, Kind.ACTIVATION_GRADIENT, key, sections, gradient_bN)

    def confirm(self, batch: BatchNumber) -> None:
        """Confirm to the stage before that its activations arrived; no gradient will follow."""
        if not self._part.is_first:
            del self._received[batch, EVALUATION]
            self._send(self.port.rank - 1, Kind.RECEIVED, self._before(batch, EVALUATION))

    def receive_confirmation(self, batch: BatchNumber) -> Program[None]:
        """Wait until the next stage has the activations."""
        del self._sent[batch, EVALUATION]
        yield self._from(self.port.rank + 1, Kind.RECEIVED, self._after(batch, EVALUATION))

    def receive_ahead(
        self, underway: Underway, rows: Callable[[BatchNumber], int]
    ) -> Program[None]:
        """Receive what neighbours have sent ahead of this stage's ops, so that `state_dict` has it.

        Args:
            underway: finds those messages: `Pipeline.underway` at the current tick.
            rows: rows per micro-batch of a batch.
        """
        stage = self._part.index
        if not self._part.is_first:
            for key in underway("F", stage - 1, stage):
                entered_bN = yield from self.receive_activations(*key, rows(key[0]))
                assert entered_bN is not None
                self._ahead[Kind.ACTIVATION, *key] = entered_bN
        if not self._part.is_last:
            for key in underway("B", stage + 1, stage):
                gradient_bM = yield from self.receive_gradient(*key, rows(key[0]))
                assert gradient_bM is not None
                self._ahead[Kind.ACTIVATION_GRADIENT, *key] = gradient_bM

    def state_dict(self) -> dict[str, Tensor]:
        """Masks kept for backward (None as an empty matrix), and tensors received ahead."""
        kept = {
            f"{name}.{batch}.{microbatch}": (
                torch.empty(0, 0) if mask is None else torch.from_numpy(mask)
            )
            for name, masks in (("sent", self._sent), ("received", self._received))
            for (batch, microbatch), mask in masks.items()
        }
        ahead = {
            f"ahead.{kind.name}.{batch}.{microbatch}": tensor
            for (kind, batch, microbatch), tensor in self._ahead.items()
        }
        return kept | ahead

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Replace masks and tensors received ahead by those that `state_dict` returned."""
        self._sent.clear()
        self._received.clear()
        self._ahead.clear()
        for name, tensor in state.items():
            what, *kind, batch, microbatch = name.split(".")
            key = BatchNumber(int(batch)), int(microbatch)
            if kind:
                self._ahead[Kind[kind[0]], *key] = tensor
                continue
            masks = self._sent if what == "sent" else self._received
            masks[key] = tensor.numpy() if tensor.dim() == 1 else None

    def _before(self, batch: BatchNumber, microbatch: int) -> Key:
        return Key(batch, self._part.index - 1, microbatch)

    def _after(self, batch: BatchNumber, microbatch: int) -> Key:
        return Key(batch, self._part.index, microbatch)

    def _from(self, sender: int, kind: Kind, key: Key) -> Receive:
        return Receive(kind, sender, key.batch, boundary=key.boundary, microbatch=key.microbatch)

    def _send(
        self, to: int, kind: Kind, key: Key, sections: Sections = (), of: Tensor | None = None
    ) -> None:
        self.port.send(
            to,
            kind,
            key.batch,
            sections,
            boundary=key.boundary,
            microbatch=key.microbatch,
            dense_bytes=0 if of is None else 4 * of.numel(),
        )


def _reachable(tensor: Tensor, codec: ActivationCodec) -> Tensor:
    """A stage's tensor where the codec can read it, which may be the host alone."""
    return tensor if tensor.is_cpu or codec.selects_anywhere else fetched([tensor])[0]
