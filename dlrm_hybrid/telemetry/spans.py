"""Where the time of a rank goes: every moment of its main thread belongs to one span."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from threading import get_ident
from typing import ParamSpec, TypeVar, final

Given = ParamSpec("Given")
Result = TypeVar("Result")


class Span(StrEnum):
    """What a rank does with its time.

    compute: forward and backward of the dense layers, and what belongs to no other span.
    embedding: looking up and updating tables, packing what the trainers exchange.
    encode, decode: of gradients, weights and activations, into sections of frames and back.
    apply: a server's mean and optimizer, a replica that takes over weights.
    send: making frames and handing them to the network.
    wait: for frames, taking them apart included, and for collectives.
    read: rows of the next batch.
    rest: the loop, collectives through the servers, progress.
    """

    COMPUTE = "compute"
    EMBEDDING = "embedding"
    ENCODE = "encode"
    DECODE = "decode"
    APPLY = "apply"
    SEND = "send"
    WAIT = "wait"
    READ = "read"
    REST = "rest"


@dataclass(slots=True)
class _Running:
    """What a clock and its spans share.

    Attributes:
        now: the time.
        since: when `spans` last changed, while the clock counts.
        counts: whether it does.
        spans: that are open, innermost last.
        thread: whose time it is.
    """

    now: Callable[[], float]
    since: float
    counts: bool
    spans: list[Within]
    thread: int


@final
class SpanClock:
    """Wall seconds by span of the thread that makes it, in the times in which it counts.

    What other threads do in its spans is not counted. The time of a span within another belongs to
    the inner one only, so the spans add up to the time that passed.

    Args:
        now: in seconds.
    """

    def __init__(self, now: Callable[[], float] = time.perf_counter) -> None:
        self._running = _Running(now, now(), counts=False, spans=[], thread=get_ident())
        self._spans = {span: Within(self._running) for span in Span}
        self._running.spans.append(self._spans[Span.REST])

    def within(self, span: Span) -> Within:
        """A context whose time belongs to `span`; it may be entered inside itself."""
        return self._spans[span]

    def timed(self, span: Span, function: Callable[Given, Result]) -> Callable[Given, Result]:
        """The same function; its time belongs to `span`."""
        within = self._spans[span]

        def call(*arguments: Given.args, **named: Given.kwargs) -> Result:
            with within:
                return function(*arguments, **named)

        return call

    def switch(self, counts: bool, now: float) -> None:
        """Count what comes from `now` on, or do not."""
        running = self._running
        if running.counts:
            running.spans[-1].seconds += now - running.since
        running.since, running.counts = now, counts

    def seconds(self, now: float | None = None) -> dict[str, float]:
        """Counted by span, until `now` or this moment."""
        running = self._running
        self.switch(running.counts, running.now() if now is None else now)
        return {span.value: within.seconds for span, within in self._spans.items()}


@final
class Within:
    """One span of a clock, as a context; see `SpanClock.within`.

    Attributes:
        seconds: spent here so far, while the clock counted.
    """

    __slots__ = ("_running", "seconds")

    def __init__(self, running: _Running) -> None:
        self._running = running
        self.seconds = 0.0

    def __enter__(self) -> None:
        running = self._running
        if get_ident() != running.thread:
            return
        if running.counts:
            now = running.now()
            running.spans[-1].seconds += now - running.since
            running.since = now
        running.spans.append(self)

    def __exit__(self, *_: object) -> None:
        running = self._running
        if get_ident() != running.thread:
            return
        running.spans.pop()
        if running.counts:
            now = running.now()
            self.seconds += now - running.since
            running.since = now
