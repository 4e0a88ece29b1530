"""Time in a world whose cores and links are shared: discrete events between fluid rates.

Tasks of a host take its cores in turns. Messages of a pair of ranks go one after the other, as in
one TCP connection; pairs share the links of both hosts max-min fairly: no pair could be faster
without another one, not a faster one, being slower.
"""

from __future__ import annotations

import heapq
import math
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple, final

Then = Callable[[], None]

LOOPBACK_BYTES_PER_SECOND = 4e9
TURN_SECONDS = 3e-3
"""For which a thread keeps a core that others wait for: Linux' least slice on few cores, and what
is left until its next tick."""
FIRST_WINDOW_BYTES = 10 * 1_514.0
LEAST_TIMEOUT_SECONDS = 0.2
SIGNAL_BYTES = 64.0
QUEUED_BYTES = 4 * 1_514.0
"""Of one connection in the queue of a link: Linux lets two pieces of two packets in."""
BBR_ROUNDS = 10
BBR_GAIN = 2 / math.log(2)
BBR_SHARE = 1 / (BBR_GAIN - 1)
"""Of a round trip, for the last byte behind the first: it sends N bytes in s at N / s = gain N /
(round trip + s), for N come to be acknowledged in a round trip and s."""
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


@dataclass(slots=True)
class _Task:
    left_seconds: float
    then: Then


@final
class Cores:
    """The cores of a host: who comes first has one until it is done, or its turn is over.

    That is what a system does with threads that are alike. Whoever wakes up while all cores are
    taken waits, as long as a turn where threads compute for long.

    Args:
        clock: of the world.
        number: of cores; a fraction makes all of them slower.

    Attributes:
        busy_seconds: of all cores together.
    """

    def __init__(self, clock: Clock, number: float) -> None:
        self.busy_seconds = 0.0
        self._clock = clock
        self._free = math.ceil(number)
        self._speed = number / self._free
        self._ready: deque[_Task] = deque()

    def run(self, seconds: float, then: Then) -> None:
        """Take so much time of a core, and then do something."""
        if seconds <= 0:
            self._clock.after(0.0, then)
            return
        self._ready.append(_Task(seconds, then))
        self._begin()

    def _begin(self) -> None:
        while self._free and self._ready:
            self._free -= 1
            task = self._ready.popleft()
            turn = min(task.left_seconds, TURN_SECONDS)
            self._clock.after(turn / self._speed, partial(self._end, task, turn))

    def _end(self, task: _Task, turn: float) -> None:
        self._free += 1
        self.busy_seconds += turn
        task.left_seconds -= turn
        if task.left_seconds > 0:
            self._ready.append(task)
        self._begin()
        if task.left_seconds <= 0:
            task.then()


def _nothing() -> None:
    """What happens when a part of a message has come."""


class Message(NamedTuple):
    """What is on its way between two ranks.

    Attributes:
        num_bytes: with headers.
        then: what happens when the last one has come.
        pause: seconds from the start of the one before it, at least: acknowledgements have to come.
    """

    num_bytes: float
    then: Then
    pause: float = 0.0


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
    began: float
    rate: float = 0.0
    messages: deque[Message] = field(default_factory=deque[Message])


@dataclass(slots=True)
class _Window:
    """What a connection may have on its way without an answer, and when that was last looked at."""

    num_bytes: float = FIRST_WINDOW_BYTES
    used: float = 0.0


@final
class Links:
    """One link from every host to a switch that never is too slow, with a rate each way.

    Where links have latency, connections are not at once as fast as their links. Most kinds of TCP
    let ten packets pass, and twice as many each time that those are acknowledged; after a pause
    they begin again, at half for each timeout (RFC 5681, RFC 6928, Linux). BBR sends at 2.89 times
    the rate at which its last messages came to be acknowledged, so that each takes about half a
    round trip from its first to its last byte. No packet is lost.

    Args:
        clock: of the world.
        rates: bytes per second of each host's link in each direction; None for no bound.
        latency_seconds: that a message between two hosts takes besides.
        paces: connections do as BBR does.

    Attributes:
        sent_bytes: by host; between ranks of one host nothing.
        received_bytes: by host.
    """

    def __init__(
        self,
        clock: Clock,
        rates: Sequence[float | None],
        latency_seconds: float = 0.0,
        *,
        paces: bool = False,
    ) -> None:
        self.sent_bytes = [0.0] * len(rates)
        self.received_bytes = [0.0] * len(rates)
        self._clock, self._latency, self._paces = clock, latency_seconds, paces
        self._last: dict[Pair, deque[float]] = defaultdict(lambda: deque(maxlen=BBR_ROUNDS))
        self._rates = [LOOPBACK_BYTES_PER_SECOND if rate is None else rate for rate in rates]
        self._flows: dict[Pair, _Flow] = {}
        self._paused: dict[Pair, _Flow] = {}
        self._windows: dict[Pair, _Window] = defaultdict(_Window)
        self._since = 0.0
        self._turn = 0

    def send(self, pair: Pair, num_bytes: float, then: Then) -> None:
        """Send a message behind those of the same pair, and do something when it has come."""
        if pair.from_host == pair.to_host:
            self._clock.after(num_bytes / LOOPBACK_BYTES_PER_SECOND, then)
            return
        pieces = self._pieces(pair, num_bytes, then)
        flow = self._flows.get(pair) or self._paused.get(pair)
        if flow is not None:
            flow.messages.extend(pieces)
            return
        self._go_on(pair, _Flow(0.0, 0.0, messages=deque(pieces)))

    def signal(self, pair: Pair, then: Then) -> None:
        """Send a packet behind what the pair sends, and behind what queues of both links hold."""
        flow = self._flows.get(pair) or self._paused.get(pair)
        if flow is not None:
            flow.messages.append(Message(SIGNAL_BYTES, then))
            return
        seconds = self._latency
        for other in self._flows if pair.from_host != pair.to_host else ():
            if other.from_host == pair.from_host:
                seconds += QUEUED_BYTES / self._rates[pair.from_host]
            elif other.to_host == pair.to_host:
                seconds += QUEUED_BYTES / self._rates[pair.to_host]
        self._clock.after(seconds, then)

    def _pieces(self, pair: Pair, num_bytes: float, then: Then) -> list[Message]:
        """A message as its connection's window lets it pass."""
        if not self._latency:
            return [Message(num_bytes, then)]
        if self._paces:
            self._last[pair].append(num_bytes)
            return [Message(num_bytes, then)]
        round_trip, window = 2 * self._latency, self._windows[pair]
        timeouts = (self._clock.now - window.used) // (LEAST_TIMEOUT_SECONDS + round_trip)
        window.num_bytes = max(window.num_bytes / 2**timeouts, FIRST_WINDOW_BYTES)
        window.used = self._clock.now
        pieces: list[Message] = []
        while num_bytes > window.num_bytes:
            pieces.append(Message(window.num_bytes, _nothing, round_trip * bool(pieces)))
            num_bytes -= window.num_bytes
            window.num_bytes *= 2
        return [*pieces, Message(num_bytes, then, round_trip * bool(pieces))]

    def _go_on(self, pair: Pair, flow: _Flow) -> None:
        """Begin with the first message of a pair."""
        self._paused.pop(pair, None)
        self._advance()
        flow.left_bytes, flow.began = flow.messages[0].num_bytes, self._clock.now
        self._flows[pair] = flow
        self._share()
        self._plan()

    def _advance(self) -> None:
        elapsed = self._clock.now - self._since
        self._since = self._clock.now
        for flow in self._flows.values():
            flow.left_bytes -= elapsed * flow.rate

    def _share(self) -> None:
        """Give every pair its rate: the fullest link first, all of its pairs alike."""
        links: dict[tuple[str, int | Pair], list[Pair]] = defaultdict(list)
        left: dict[tuple[str, int | Pair], float] = {}
        for pair in self._flows:
            for way, host in (("from", pair.from_host), ("to", pair.to_host)):
                links[way, host].append(pair)
                left[way, host] = self._rates[host]
            if self._paces and self._latency:
                links["paced", pair].append(pair)
                most = max(FIRST_WINDOW_BYTES, *self._last[pair])
                left["paced", pair] = most / (BBR_SHARE * 2 * self._latency)
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
                ways = ("from", pair.from_host), ("to", pair.to_host), ("paced", pair)
                for other in ways:
                    if other in links:
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
            self._windows[pair].used = self._clock.now
            done.append(message)
            pause = flow.messages[0].pause - self._clock.now + flow.began if flow.messages else 0.0
            if flow.messages and pause <= 0:
                flow.left_bytes, flow.began = flow.messages[0].num_bytes, self._clock.now
                continue
            del self._flows[pair]
            ended = True
            if flow.messages:
                self._paused[pair] = flow
                self._clock.after(pause, partial(self._go_on, pair, flow))
        if ended:
            self._share()
        self._plan()
        for message in done:
            self._clock.after(self._latency, message.then)
