"""Where the time of a rank goes: every moment of its main thread belongs to one span."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from threading import get_ident
from typing import ParamSpec, TypeVar, final

COLLECTIVE = "collective"  # of gloo
TURN = "turn"  # of threads that take turns
NOTHING = "nothing"  # came in time

Given = ParamSpec("Given")
Result = TypeVar("Result")


class Span(StrEnum):
    """What a rank does with its time.

    compute: forward and backward of the dense layers, and what belongs to no other span.
    embedding: looking up and updating tables, packing what the trainers exchange.
    encode, decode: of gradients, weights and activations, into sections of frames and back.
    apply: a server's mean and optimizer, a replica that takes over weights.
    send: making frames and handing them to the network.
    wait: for frames, taking them apart included, and for collectives; by what for, see
        `SpanClock.waiting`.
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
        self._spans = {span: Within(self._running, span is Span.WAIT) for span in Span}
        self._waits = {NOTHING: self._spans[Span.WAIT]}
        self._running.spans.append(self._spans[Span.REST])

    def within(self, span: Span) -> Within:
        """A context whose time belongs to `span`; it may be entered inside itself."""
        return self._spans[span]

    def waiting(self, reason: str) -> Within:
        """A context whose time belongs to the span `wait`, and in it to this reason.

        Args:
            reason: the kind of frame that is waited for, or what else, such as `COLLECTIVE`.
        """
        within = self._waits.get(reason)
        if within is None:
            within = self._waits[reason] = Within(self._running, is_wait=True)
        return within

    def arrival(self) -> Arrival:
        """A context of waiting for whatever comes."""
        return Arrival(self._running, self.waiting)

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
        spent = {span.value: within.seconds for span, within in self._spans.items()}
        return {**spent, Span.WAIT.value: sum(within.seconds for within in self._waits.values())}

    def wait_seconds(self) -> dict[str, float]:
        """The time of `wait` by reason, until the last call of `seconds`; only what took time."""
        return {
            reason: within.seconds
            for reason, within in sorted(self._waits.items())
            if within.seconds
        }


@final
class Within:
    """One span of a clock, as a context; see `SpanClock.within`.

    Attributes:
        is_wait: it belongs to the span `wait`.
        seconds: spent here so far, while the clock counted.
    """

    __slots__ = ("_running", "is_wait", "seconds")

    def __init__(self, running: _Running, is_wait: bool) -> None:
        self._running = running
        self.is_wait = is_wait
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


@final
class Arrival:
    """Waiting for whatever comes next, as a context; one thread at a time may be in it.

    Inside a wait it does nothing: what is waited for is known there. Else its time belongs to what
    came, of which `of` tells. See `SpanClock.arrival`.
    """

    __slots__ = ("_is_unasked", "_running", "_unknown", "_waiting")

    def __init__(self, running: _Running, waiting: Callable[[str], Within]) -> None:
        self._running = running
        self._waiting = waiting
        self._unknown = waiting(NOTHING)
        self._is_unasked = False

    def __enter__(self) -> None:
        running = self._running
        if get_ident() == running.thread and not running.spans[-1].is_wait:
            self._is_unasked = True
            self._unknown.__enter__()

    def of(self, reason: str) -> None:
        """What has come."""
        if self._is_unasked:
            self._running.spans[-1] = self._waiting(reason)

    def __exit__(self, *_: object) -> None:
        if self._is_unasked:
            self._is_unasked = False
            self._running.spans[-1].__exit__()
