"""Time in a world whose cores and links are shared: discrete events between fluid rates.

Tasks of a host share its cores evenly; each takes one core at most. Messages of a pair of ranks go
one after the other, as in one TCP connection; pairs share the links of both hosts max-min fairly:
no pair could be faster without another one, not a faster one, being slower.
"""

from __future__ import annotations

import heapq
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple, final

Then = Callable[[], None]

LOOPBACK_BYTES_PER_SECOND = 4e9
_NEVER = float("inf")


@final
class Clock:
    """What is due, and when; things that are due at one moment are done as they were asked for.

    Attributes:
        now: seconds since the beginning.
    """

    def __init__(self) -> None:
        self.now = 0.0
        self._due: list[tuple[float, int, Then]] = []
        self._count = 0

    def after(self, seconds: float, then: Then) -> None:
        """Do something so much later."""
        self._count += 1
        heapq.heappush(self._due, (self.now + max(seconds, 0.0), self._count, then))

    def step(self) -> bool:
        """Do what is due next; False if that is nothing."""
        if not self._due:
            return False
        self.now, _, then = heapq.heappop(self._due)
        then()
        return True


@final
class Cores:
    """The cores of a host, which its tasks share evenly.

    Args:
        clock: of the world.
        number: of cores; a fraction is a part of one.

    Attributes:
        busy_seconds: of all cores together.
    """

    def __init__(self, clock: Clock, number: float) -> None:
        self.busy_seconds = 0.0
        self._clock, self._number = clock, number
        self._since = 0.0
        self._served = 0.0  # seconds that each task has had that was there all along
        self._tasks: list[tuple[float, int, Then]] = []
        self._count = self._turn = 0

    def run(self, seconds: float, then: Then) -> None:
        """Take so much time of a core, and then do something."""
        if seconds <= 0:
            self._clock.after(0.0, then)
            return
        self._advance()
        self._count += 1
        heapq.heappush(self._tasks, (self._served + seconds, self._count, then))
        self._plan()

    @property
    def load(self) -> float:
        """Tasks for each core."""
        return len(self._tasks) / self._number

    def _share(self) -> float:
        return min(1.0, self._number / len(self._tasks)) if self._tasks else 0.0

    def _advance(self) -> None:
        served = (self._clock.now - self._since) * self._share()
        self._served += served
        self.busy_seconds += served * len(self._tasks)
        self._since = self._clock.now

    def _plan(self) -> None:
        self._turn += 1
        if self._tasks:
            left = self._tasks[0][0] - self._served
            self._clock.after(left / self._share(), partial(self._end, self._turn))

    def _end(self, turn: int) -> None:
        if turn != self._turn:
            return  # tasks have come since
        self._advance()
        done: list[Then] = []
        first = self._tasks[0][0]  # it is at its end, whatever rounding says
        while self._tasks and self._tasks[0][0] <= max(self._served, first):
            done.append(heapq.heappop(self._tasks)[2])
        self._plan()
        for then in done:
            then()


class Message(NamedTuple):
    """What is on its way between two ranks.

    Attributes:
        num_bytes: with headers.
        then: what happens when the last one has come.
    """

    num_bytes: float
    then: Then


class Pair(NamedTuple):
    """Two ranks with a connection from the first to the second, and their hosts."""

    sender: int
    receiver: int
    from_host: int
    to_host: int


@dataclass(slots=True)
class _Flow:
    """The messages of a pair, the first one partly sent."""

    left_bytes: float
    rate: float = 0.0
    messages: deque[Message] = field(default_factory=deque[Message])


@final
class Links:
    """One link from every host to a switch that never is too slow, with a rate each way.

    Args:
        clock: of the world.
        rates: bytes per second of each host's link in each direction; None for no bound.
        latency_seconds: that a message between two hosts takes besides.

    Attributes:
        sent_bytes: by host; between ranks of one host nothing.
        received_bytes: by host.
    """

    def __init__(
        self, clock: Clock, rates: Sequence[float | None], latency_seconds: float = 0.0
    ) -> None:
        self.sent_bytes = [0.0] * len(rates)
        self.received_bytes = [0.0] * len(rates)
        self._clock, self._latency = clock, latency_seconds
        self._rates = [LOOPBACK_BYTES_PER_SECOND if rate is None else rate for rate in rates]
        self._flows: dict[Pair, _Flow] = {}
        self._since = 0.0
        self._turn = 0

    def send(self, pair: Pair, num_bytes: float, then: Then) -> None:
        """Send a message behind those of the same pair, and do something when it has come."""
        if pair.from_host == pair.to_host:
            self._clock.after(num_bytes / LOOPBACK_BYTES_PER_SECOND, then)
            return
        message = Message(num_bytes, then)
        flow = self._flows.get(pair)
        if flow is not None:
            flow.messages.append(message)
            return
        self._advance()
        self._flows[pair] = _Flow(num_bytes, messages=deque([message]))
        self._share()
        self._plan()

    def _advance(self) -> None:
        elapsed = self._clock.now - self._since
        self._since = self._clock.now
        for flow in self._flows.values():
            flow.left_bytes -= elapsed * flow.rate

    def _share(self) -> None:
        """Give every pair its rate: the fullest link first, all of its pairs alike."""
        links: dict[tuple[str, int], list[Pair]] = defaultdict(list)
        for pair in self._flows:
            links["from", pair.from_host].append(pair)
            links["to", pair.to_host].append(pair)
        left = {link: self._rates[link[1]] for link in links}
        open_ = {link: len(pairs) for link, pairs in links.items()}
        settled: set[Pair] = set()
        while len(settled) < len(self._flows):
            link = min((one for one in links if open_[one]), key=lambda one: left[one] / open_[one])
            rate = left[link] / open_[link]
            for pair in links[link]:
                if pair in settled:
                    continue
                settled.add(pair)
                self._flows[pair].rate = rate
                for other in (("from", pair.from_host), ("to", pair.to_host)):
                    left[other] -= rate
                    open_[other] -= 1

    def _plan(self) -> None:
        self._turn += 1
        next_ = min((one.left_bytes / one.rate for one in self._flows.values()), default=_NEVER)
        if next_ < _NEVER:
            self._clock.after(next_, partial(self._end, self._turn))

    def _end(self, turn: int) -> None:
        if turn != self._turn:
            return
        self._advance()
        nearest = min(one.left_bytes / one.rate for one in self._flows.values())
        due = max(nearest, 0.0) + 1e-12  # seconds: rounding may leave some bytes
        done: list[Message] = []
        ended = False
        for pair, flow in list(self._flows.items()):
            if flow.left_bytes / flow.rate > due:
                continue
            message = flow.messages.popleft()
            self.sent_bytes[pair.from_host] += message.num_bytes
            self.received_bytes[pair.to_host] += message.num_bytes
            done.append(message)
            if flow.messages:
                flow.left_bytes = flow.messages[0].num_bytes
            else:
                del self._flows[pair]
                ended = True
        if ended:
            self._share()
        self._plan()
        for message in done:
            self._clock.after(self._latency, message.then)
