"""Profile of a rank's time: every moment of its main thread belongs to one span."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from threading import get_ident
from typing import ParamSpec, TypeVar, final

# Reasons to wait besides kinds of frames: other trainers, threads in turn, nothing came in time.
COLLECTIVE = "collective"
TURN = "turn"
NOTHING = "nothing"

Params = ParamSpec("Params")
Result = TypeVar("Result")


class Span(StrEnum):
    """Kinds of work a rank spends its time on.

    compute: forward and backward of the dense layers, and work of no other span.
    embedding: looking up and updating tables, packing rows and ids for the exchange.
    encode, decode: gradients, weights and activations, to sections of frames and back.
    apply: a server's mean and optimizer, or a replica taking over weights.
    send: making frames and handing them to the network.
    wait: for frames, and parsing them, and for collectives; by reason, see `SpanClock.waiting`.
    read: reading the rows of the next batch.
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
class _ClockState:
    """State shared by a clock and its spans.

    Attributes:
        now: reads the time.
        since: when the innermost span was last charged.
        counts: whether the clock counts.
        spans: open spans, innermost last.
        thread: the thread whose time is counted.
    """

    now: Callable[[], float]
    since: float
    counts: bool
    spans: list[Within]
    thread: int


@final
class SpanClock:
    """Adds up wall seconds by span, of the thread that makes it, while it is switched on.

    Other threads that enter its spans are not counted. The time of a nested span belongs to the
    inner one only, so the spans add up to the time that passed.
    """

    def __init__(self, now: Callable[[], float] = time.perf_counter) -> None:
        self._state = _ClockState(now, now(), counts=False, spans=[], thread=get_ident())
        self._spans = {span: Within(self._state, span is Span.WAIT) for span in Span}
        self._waits = {NOTHING: self._spans[Span.WAIT]}
        self._state.spans.append(self._spans[Span.REST])

    def within(self, span: Span) -> Within:
        """A context whose time belongs to `span`; it may be entered inside itself."""
        return self._spans[span]

    def waiting(self, reason: str) -> Within:
        """A context whose time belongs to the span `wait`, with a reason.

        Args:
            reason: the kind of frame awaited, or another reason such as `COLLECTIVE`.
        """
        within = self._waits.get(reason)
        if within is None:
            within = self._waits[reason] = Within(self._state, is_wait=True)
        return within

    def arrival(self) -> Arrival:
        """A context of waiting for whatever frame comes next."""
        return Arrival(self._state, self.waiting)

    def timed(self, span: Span, function: Callable[Params, Result]) -> Callable[Params, Result]:
        """Wrap a function so that its time belongs to `span`."""
        within = self._spans[span]

        def call(*arguments: Params.args, **named: Params.kwargs) -> Result:
            with within:
                return function(*arguments, **named)

        return call

    def switch(self, counts: bool, now: float) -> None:
        """Start or stop counting at `now`."""
        state = self._state
        if state.counts:
            state.spans[-1].seconds += now - state.since
        state.since, state.counts = now, counts

    def seconds(self, now: float | None = None) -> dict[str, float]:
        """Seconds by span until `now`, by default this moment."""
        state = self._state
        self.switch(state.counts, state.now() if now is None else now)
        spent = {span.value: within.seconds for span, within in self._spans.items()}
        return {**spent, Span.WAIT.value: sum(within.seconds for within in self._waits.values())}

    def wait_seconds(self) -> dict[str, float]:
        """Seconds of `wait` by reason until the last call of `seconds`; only those above 0."""
        return {
            reason: within.seconds
            for reason, within in sorted(self._waits.items())
            if within.seconds
        }


@final
class Within:
    """A span of a clock, as a context; see `SpanClock.within`.

    Attributes:
        is_wait: whether it belongs to the span `wait`.
        seconds: seconds spent in it so far, while the clock counted.
    """

    __slots__ = ("_state", "is_wait", "seconds")

    def __init__(self, state: _ClockState, is_wait: bool) -> None:
        self._state = state
        self.is_wait = is_wait
        self.seconds = 0.0

    def __enter__(self) -> None:
        state = self._state
        if get_ident() != state.thread:
            return
        if state.counts:
            now = state.now()
            state.spans[-1].seconds += now - state.since
            state.since = now
        state.spans.append(self)

    def __exit__(self, *_: object) -> None:
        state = self._state
        if get_ident() != state.thread:
            return
        state.spans.pop()
        if state.counts:
            now = state.now()
            self.seconds += now - state.since
            state.since = now


@final
class Arrival:
    """Waiting for whatever comes next, as a context for one thread at a time.

    Inside a wait, whose reason is known, it does nothing. Else its time belongs to what came, which
    `of` names. See `SpanClock.arrival`.
    """

    __slots__ = ("_is_open", "_state", "_unknown", "_waiting")

    def __init__(self, state: _ClockState, waiting: Callable[[str], Within]) -> None:
        self._state = state
        self._waiting = waiting
        self._unknown = waiting(NOTHING)
        self._is_open = False

    def __enter__(self) -> None:
        state = self._state
        if get_ident() == state.thread and not state.spans[-1].is_wait:
            self._is_open = True
            self._unknown.__enter__()

    def of(self, reason: str) -> None:
        """Name what has come, as the reason of the wait."""
        if self._is_open:
            self._state.spans[-1] = self._waiting(reason)

    def __exit__(self, *_: object) -> None:
        if self._is_open:
            self._is_open = False
            self._state.spans[-1].__exit__()
