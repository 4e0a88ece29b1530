"""Where the time of a rank goes: every moment of its main thread belongs to one span."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import ParamSpec, TypeVar, final

Given = ParamSpec("Given")
Result = TypeVar("Result")


class Span(StrEnum):
    """What a rank does with its time.

    compute: forward and backward of the dense layers, and the glue between all else.
    embedding: looking up tables and learning them, packing what the trainers exchange.
    encode, decode: of gradients, weights and activations, into sections of frames and back.
    apply: a server's mean and optimizer, a replica that takes over weights.
    send: making frames and handing them to the network.
    wait: for frames, taking them apart included, and for collectives.
    read: rows of the next batch.
    rest: the loop, agreements, progress.
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
class _Doing:
    """What is going on, innermost last, and since when."""

    now: Callable[[], float]
    since: float
    within: list[Within]


@final
class SpanClock:
    """Wall seconds by span, of the times in which it counts; not for use by two threads.

    The time of a span within another belongs to the inner one only, so the spans add up to the
    time that passed.

    Args:
        now: in seconds.
    """

    def __init__(self, now: Callable[[], float] = time.perf_counter) -> None:
        self._doing = _Doing(now, now(), [])
        self._spans = {span: Within(self._doing) for span in Span}
        self._doing.within.append(self._spans[Span.REST])
        self._counts = False
        self._seconds = dict.fromkeys(Span, 0.0)

    def within(self, span: Span) -> Within:
        """A context whose time belongs to `span`; entered as often as one likes.

        Ask for it once, not each time: an enumeration's hash costs as much as the clock.
        """
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
        if counts != self._counts:
            self._book(now)
            self._counts = counts

    def seconds(self, now: float | None = None) -> dict[str, float]:
        """Counted by span, until `now` or this moment."""
        self._book(self._doing.now() if now is None else now)
        return {span.value: seconds for span, seconds in self._seconds.items()}

    def _book(self, now: float) -> None:
        doing = self._doing
        doing.within[-1].seconds += now - doing.since
        doing.since = now
        for span, within in self._spans.items():
            if self._counts:
                self._seconds[span] += within.seconds
            within.seconds = 0.0


@final
class Within:
    """One span of a clock, as a context; see `SpanClock.within`.

    Attributes:
        seconds: spent here since the clock looked last.
    """

    __slots__ = ("_doing", "seconds")

    def __init__(self, doing: _Doing) -> None:
        self._doing = doing
        self.seconds = 0.0

    def __enter__(self) -> None:
        doing = self._doing
        now, within = doing.now(), doing.within
        within[-1].seconds += now - doing.since
        doing.since = now
        within.append(self)

    def __exit__(self, *_: object) -> None:
        doing = self._doing
        now = doing.now()
        doing.within.pop().seconds += now - doing.since
        doing.since = now
