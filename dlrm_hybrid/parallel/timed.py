"""What a rank works with, each with a clock around it; see `telemetry.spans`."""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from typing import TypeVar, final

import torch
from torch import Tensor

from dlrm_hybrid.comm.channel import Channel
from dlrm_hybrid.compress.activation.codec import ActivationCodec, Key, Saved
from dlrm_hybrid.compress.activation.report import BoundaryReport
from dlrm_hybrid.compress.gradient.collective import Collective, Op, Sections
from dlrm_hybrid.compress.gradient.compressor import Compressor, Encoding, TensorReport
from dlrm_hybrid.compress.gradient.layout import Spec
from dlrm_hybrid.parallel.dense.client import Client, Pushing
from dlrm_hybrid.parallel.effects import Receive
from dlrm_hybrid.telemetry.spans import Span, SpanClock, Within
from dlrm_hybrid.wire.frame import Frame

Result = TypeVar("Result")


@final
class TimedChannel:
    """A `Channel` whose time is that of sending and of waiting."""

    def __init__(self, inner: Channel, clock: SpanClock) -> None:
        self._inner = inner
        self._sending = clock.within(Span.SEND)
        self._waiting = clock.within(Span.WAIT)

    @property
    def rank(self) -> int:
        """See `Channel`."""
        return self._inner.rank

    def send(self, to: int, frame: Frame, dense_equivalent_bytes: int) -> None:
        """See `Channel`."""
        with self._sending:
            self._inner.send(to, frame, dense_equivalent_bytes)

    def receive(self, deadline_seconds: float) -> Frame:
        """See `Channel`."""
        with self._waiting:
            return self._inner.receive(deadline_seconds)

    def close(self) -> None:
        """See `Channel`."""
        self._inner.close()

    def abandon(self) -> None:
        """See `Channel`."""
        self._inner.abandon()


@final
class TimedCodec:
    """An `ActivationCodec` whose time is that of encoding and of decoding."""

    def __init__(self, inner: ActivationCodec, clock: SpanClock) -> None:
        self._inner = inner
        self._encoding = clock.within(Span.ENCODE)
        self._decoding = clock.within(Span.DECODE)

    def encode(self, x_BN: Tensor, key: Key) -> tuple[Sections, Saved]:
        """See `ActivationCodec`."""
        with self._encoding:
            return self._inner.encode(x_BN, key)

    def decode(self, sections: Sections, shape: torch.Size, key: Key) -> tuple[Tensor, Saved]:
        """See `ActivationCodec`."""
        with self._decoding:
            return self._inner.decode(sections, shape, key)

    def encode_gradient(self, g_BN: Tensor, saved: Saved, key: Key) -> Sections:
        """See `ActivationCodec`."""
        with self._encoding:
            return self._inner.encode_gradient(g_BN, saved, key)

    def decode_gradient(self, sections: Sections, saved: Saved, key: Key) -> Tensor:
        """See `ActivationCodec`."""
        with self._decoding:
            return self._inner.decode_gradient(sections, saved, key)

    def tensors(self) -> dict[str, Tensor]:
        """See `ActivationCodec`."""
        return self._inner.tensors()

    def report(self) -> dict[int, BoundaryReport]:
        """See `ActivationCodec`."""
        return self._inner.report()


@final
class TimedCompressor:
    """A `Compressor` whose time is that of encoding."""

    def __init__(self, inner: Compressor, clock: SpanClock) -> None:
        self._inner = inner
        self._encoding = clock.within(Span.ENCODE)

    @property
    def specs(self) -> Sequence[Spec]:
        """See `Compressor`."""
        return self._inner.specs

    @property
    def rounds(self) -> tuple[Op, ...]:
        """See `Compressor`."""
        return self._inner.rounds

    def encode(self, gradients: Mapping[str, Tensor], step: int) -> Encoding:
        """See `Compressor`."""
        return _timed(self._encoding, self._inner.encode(gradients, step))

    def tensors(self) -> dict[str, Tensor]:
        """See `Compressor`."""
        return self._inner.tensors()

    def report(self) -> dict[str, TensorReport]:
        """See `Compressor`."""
        return self._inner.report()


@final
class TimedClient:
    """A `Client` whose own time is that of applying: what it encodes and decodes is apart."""

    def __init__(self, inner: Client, clock: SpanClock) -> None:
        self._inner = inner
        self._applying = clock.within(Span.APPLY)

    def push(self, step: int, gradients: Mapping[str, Tensor]) -> Pushing:
        """See `Client`."""
        return _timed(self._applying, self._inner.push(step, gradients))

    def wants(self, step: int) -> list[Receive]:
        """See `Client`."""
        return self._inner.wants(step)

    def apply(self, frame: Frame) -> None:
        """See `Client`."""
        with self._applying:
            self._inner.apply(frame)


def _timed(
    within: Within, program: Generator[Collective, Sections, Result]
) -> Generator[Collective, Sections, Result]:
    """The same program; what it does between its rounds belongs to a span."""
    result: Sections | None = None
    while True:
        with within:
            try:
                collective = next(program) if result is None else program.send(result)
            except StopIteration as end:
                return end.value
        result = yield collective
