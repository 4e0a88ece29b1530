"""Discrete-event simulation of ranks that share cores and send frames over shared links.

The work and frames of a program between two effects are queued, and take their time before the
effect is carried out.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, final

from dlrm_hybrid.comm.mailbox import FrameKey, Receive, key_of
from dlrm_hybrid.plan.costs import UnitCosts
from dlrm_hybrid.types import DlrmError

Then = Callable[[], None]
Link = tuple[str, int]
Simulated = Generator[Any, Any, Any]
"""A rank's program: yields `Receive`, ANY or NOW; is sent a frame's key, or the time."""
ANY, NOW = "the next frame", "the time"

LOOPBACK_BYTES_PER_SECOND = 4e9
LINE_SHARE = 1.048 + 0.022 / 2
"""Bytes on a link per byte of a frame: headers of 1,448-byte segments, and acknowledgements."""
LEAST_PACED_BYTES, PACED_MESSAGES = 10 * 1_514.0, 10
PACED_SHARE = 1 / (2 / math.log(2) - 1)
"""Round trips from a message's first byte to its last: BBR sends N bytes in time s at the rate
N / s = 2.89 N / (round trip + s), as N bytes are acknowledged in a round trip and s."""
COLD_SECONDS, COLD_WORK_SECONDS = 4.2e-3, 3.7e-3
"""Most additional CPU time of work with cold caches, which is bounded as the data of a thread is,
and the work after which half of it is spent. Measured: `scripts/benchmarks/slow_links.py`."""
COLD_AFTER_SECONDS = 5e-3
"""Wait after which half of a warm cache is cold; measured in the same way."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Hosts:
    """Placement of ranks on machines and hosts, and the resources of these.

    Attributes:
        machine: for each rank, the machine whose cores it shares; from 0.
        host: for each rank, the host whose link it shares; emulated hosts may share a machine.
        cores: cores of each machine.
        bytes_per_second: rate of each host's link, each way; None for no bound.
        latency_seconds: latency from host to host.
        slowness: factors on the computing time of some ranks.
    """

    machine: tuple[int, ...]
    host: tuple[int, ...]
    cores: float
    bytes_per_second: float | None
    latency_seconds: float = 0.0
    slowness: Mapping[int, float] = field(default_factory=dict[int, float])


@final
class Clock:
    """Simulated time with a queue of events; those due at the same time run in order of request."""

    def __init__(self) -> None:
        self.now = 0.0
        self._due: list[tuple[float, int, Then]] = []
        self._count = 0

    def after(self, seconds: float, then: Then) -> None:
        """Schedule `then`."""
        self._count += 1
        heapq.heappush(self._due, (self.now + max(seconds, 0.0), self._count, then))

    def step(self) -> bool:
        """Advance to the next event and run it; False if there is none."""
        if not self._due:
            return False
        self.now, _, then = heapq.heappop(self._due)
        then()
        return True


@final
class Cores:
    """The cores of a machine, first come, first served; 2.5 are 3 at 5/6 of the speed."""

    def __init__(self, clock: Clock, number: float) -> None:
        self._clock, self._free = clock, math.ceil(number)
        self._speed = number / self._free
        self._ready: deque[tuple[float, Then]] = deque()

    def run(self, seconds: float, then: Then) -> None:
        """Occupy a core for some seconds, then run `then`."""
        self._ready.append((seconds, then))
        self._begin()

    def _begin(self) -> None:
        while self._free and self._ready:
            self._free -= 1
            seconds, then = self._ready.popleft()
            self._clock.after(seconds / self._speed, partial(self._end, then))

    def _end(self, then: Then) -> None:
        self._free += 1
        self._begin()
        then()


@dataclass(slots=True)
class _Flow:
    """The messages of a pair of ranks, of which the first is being sent, and their links."""

    links: tuple[Link, ...]
    messages: deque[tuple[float, Then]]
    recent: deque[float]
    left_bytes: float
    rate: float = 0.0


@final
class Links:
    """Links between every host and a switch of unlimited speed, with a rate each way.

    Messages of a pair of ranks go one after the other, as in one TCP connection; pairs share links
    max-min fairly. If links have latency, connections pace what they send like BBR, so a message
    takes half a round trip from its first to its last byte. No packet is lost.
    """

    def __init__(self, clock: Clock, rates: Sequence[float | None], latency_seconds: float) -> None:
        self._carried_bytes = dict.fromkeys(range(len(rates)), 0.0)
        self._clock, self._latency, self._has_rates = clock, latency_seconds, any(rates)
        self._rates = [LOOPBACK_BYTES_PER_SECOND if rate is None else rate for rate in rates]
        self._flows: dict[tuple[int, int], _Flow] = {}
        self._recent: dict[tuple[int, int], deque[float]] = {}
        self._since, self._turn, self._paced = 0.0, 0, 0

    def send(
        self, pair: tuple[int, int], hosts: tuple[int, int], num_bytes: float, then: Then
    ) -> None:
        """Send a message behind earlier ones of the pair; run `then` when it has arrived."""
        if hosts[0] == hosts[1]:
            self._clock.after(num_bytes / LOOPBACK_BYTES_PER_SECOND, then)
            return
        recent = self._recent.setdefault(pair, deque(maxlen=PACED_MESSAGES))
        recent.append(num_bytes)
        if pair in self._flows:
            self._flows[pair].messages.append((num_bytes, then))
            return
        self._advance()
        links: tuple[Link, ...] = ("from", hosts[0]), ("to", hosts[1])
        if self._latency:
            self._paced += 1
            links += ((f"paced {self._paced}", 0),)
        self._flows[pair] = _Flow(links, deque([(num_bytes, then)]), recent, num_bytes)
        self._plan()

    def use(self, host: int) -> float:
        """Share of the time in which a host's link was busy, in either direction."""
        carried = self._carried_bytes[host] / self._clock.now / self._rates[host]
        return min(1.0, carried) if self._has_rates else 0.0

    def _advance(self) -> None:
        elapsed, self._since = self._clock.now - self._since, self._clock.now
        for flow in self._flows.values():
            flow.left_bytes -= elapsed * flow.rate

    def _plan(self) -> None:
        """Give every flow its rate, and schedule the first end of a message."""
        self._turn += 1
        self._share()
        if self._flows:
            soonest = min(flow.left_bytes / flow.rate for flow in self._flows.values())
            self._clock.after(soonest, partial(self._end, self._turn))

    def _share(self) -> None:
        """Max-min fairness: divide the fullest link equally among its flows, then the next."""
        left: dict[Link, float] = {}
        users: dict[Link, int] = {}
        for flow in self._flows.values():
            for link in flow.links:
                left[link] = self._rates[link[1]]
                users[link] = users.get(link, 0) + 1
            if self._latency:
                most = max(LEAST_PACED_BYTES, *flow.recent)
                left[flow.links[2]] = most / (PACED_SHARE * 2 * self._latency)
        open_ = list(self._flows.values())
        while open_:
            fullest = min(users, key=lambda link: left[link] / users[link])
            rate = left[fullest] / users[fullest]
            for flow in open_:
                if fullest in flow.links:
                    flow.rate = rate
                    for link in flow.links:
                        left[link] -= rate
                        users[link] -= 1
            open_ = [flow for flow in open_ if fullest not in flow.links]
            users = {link: number for link, number in users.items() if number}

    def _end(self, turn: int) -> None:
        if turn != self._turn:
            return
        self._advance()
        for pair, flow in list(self._flows.items()):
            if flow.left_bytes > 1e-6 + flow.rate * 1e-12:  # beyond rounding
                continue
            num_bytes, then = flow.messages.popleft()
            for _, host in flow.links[:2]:
                self._carried_bytes[host] += num_bytes
            self._clock.after(self._latency, then)
            if flow.messages:
                flow.left_bytes = flow.messages[0][0]
            else:
                del self._flows[pair]
        self._plan()


@final
class Machine:
    """All simulated ranks, with the cores and links that they share.

    Args:
        hosts: placement of the ranks.
        costs: unit costs.
        servers: ranks that serve all trainers, including those that are not simulated.
        crowd: number of trainers that each simulated one stands for.
    """

    def __init__(
        self, hosts: Hosts, costs: UnitCosts, servers: Sequence[int], crowd: float
    ) -> None:
        self.clock, self.costs, self.hosts = Clock(), costs, hosts
        shared = crowd if len(set(hosts.machine)) == 1 else 1.0
        self.cores = [Cores(self.clock, hosts.cores / shared) for _ in set(hosts.machine)]
        serving, rate = {hosts.host[rank] for rank in servers}, hosts.bytes_per_second
        rates = [rate and rate / (crowd if host in serving else 1) for host in set(hosts.host)]
        self.links = Links(self.clock, rates, hosts.latency_seconds)
        self.ranks = [
            Rank(self, rank, self.cores[machine], crowd if rank in servers else 1.0)
            for rank, machine in enumerate(hosts.machine)
        ]

    def transmit(
        self, sender: int, to: int, key: FrameKey, num_bytes: float, messages: float
    ) -> None:
        """Send a frame through the network threads of both ends.

        Args:
            sender: rank of the sender.
            to: rank of the receiver.
            key: key of the frame.
            num_bytes: size of the frame.
            messages: number of messages it stands for; 0 if main threads send and receive it.
        """
        hosts = self.hosts.host[sender], self.hosts.host[to]
        arrive = partial(self.ranks[to].arrive, key)
        send = partial(self.links.send, (sender, to), hosts, num_bytes * LINE_SHARE)
        if not messages:
            send(arrive)
            return
        seconds = self.costs.carry * messages + self.costs.carry_byte * num_bytes
        carry = partial(self.ranks[to].carry, seconds, arrive)
        self.ranks[sender].carry(seconds, partial(send, carry))

    def run(self, programs: Sequence[Simulated], workers: int) -> None:
        """Run a program for each rank until those of the first `workers` ranks have ended.

        Raises:
            DlrmError: a deadlock; the message says who waits for what.
        """
        for rank, program in zip(self.ranks, programs, strict=True):
            rank.start(program)
        while not all(rank.done for rank in self.ranks[:workers]):
            if not self.clock.step():
                stuck = {rank.rank: rank.waits for rank in self.ranks if rank.waits is not None}
                raise DlrmError(f"deadlock after {self.clock.now:g} s: {stuck}")


@final
class Rank:
    """A simulated rank: its program, and the frames that have arrived for it.

    Args:
        machine: the simulation.
        rank: number of the rank.
        cores: the cores it shares.
        copies: number of trainers for which it repeats the work for a simulated one; as the cores
            of the others are not simulated, it occupies a core for 1 / copies of its time.

    Attributes:
        busy_seconds: time of its main thread.
        carried_seconds: time of its network thread.
        cold_seconds: additional time of its main thread due to cold caches.
        done: whether its program has ended.
        waits: the effect it waits for.
    """

    def __init__(self, machine: Machine, rank: int, cores: Cores, copies: float) -> None:
        self.rank, self.copies = rank, copies
        self.busy_seconds = self.carried_seconds = self.cold_seconds = 0.0
        self.done, self.waits = False, None
        self._machine, self._clock, self._cores = machine, machine.clock, cores
        self._slowness = machine.hosts.slowness.get(rank, 1.0) * copies
        self._carrying: deque[tuple[float, Then]] = deque()
        self._cold, self._since = 0.0, 0.0
        self._todo: deque[tuple[Any, ...]] = deque()
        self._come: dict[FrameKey, None] = {}
        self._program: Any = None

    def work(self, seconds: float) -> None:
        """Queue computing of some seconds; more on a slow rank or with cold caches."""
        seconds *= self._slowness
        before = self._cold
        self._cold /= 1 + before * seconds / COLD_WORK_SECONDS
        cold = COLD_SECONDS * (before - self._cold)
        self.cold_seconds += cold
        self._todo.append((seconds + cold,))

    def send(self, to: int, what: Receive, num_bytes: float, messages: float = 1.0) -> None:
        """Queue a frame, and the time that the main thread takes to send it.

        Args:
            to: rank of the receiver.
            what: the effect with which the receiver waits for it.
            num_bytes: see `Machine.transmit`.
            messages: see `Machine.transmit`.
        """
        costs = self._machine.costs
        if messages:
            self.work(costs.send * messages + costs.send_byte * num_bytes)
        self._todo.append((to, key_of(what), num_bytes, messages))

    def start(self, program: Simulated) -> None:
        """Run a program to its first effect."""
        self._program = program
        self._go_on(None)

    def carry(self, seconds: float, then: Then) -> None:
        """Queue work of the network thread, then run `then`."""
        self.carried_seconds += seconds * self.copies
        self._carrying.append((seconds * self.copies, then))
        if len(self._carrying) == 1:
            self._take(*self._carrying[0], self._carried)

    def arrive(self, key: FrameKey) -> None:
        """Take a frame that has arrived; wakes the program if it waits for it."""
        self._come[key] = None
        effect: Any = self.waits
        if effect is not None and (effect is ANY or key_of(effect) == key):
            self.waits = None
            waited = self._clock.now - self._since
            self._cold = 1 - (1 - self._cold) * COLD_AFTER_SECONDS / (waited + COLD_AFTER_SECONDS)
            self._clock.after(self._machine.costs.wake, partial(self._answer, effect))

    def _carried(self, then: Then) -> None:
        self._carrying.popleft()
        if self._carrying:
            self._take(*self._carrying[0], self._carried)
        then()

    def _take(self, seconds: float, then: Any, end: Callable[[Any], None]) -> None:
        """Let a thread work, for 1 / copies of the time on the simulated cores."""
        rest, ending = seconds * (1 - 1 / self.copies), partial(end, then)
        if not seconds:
            self._clock.after(0.0, ending)
        else:
            late = partial(self._clock.after, rest, ending) if rest else ending
            self._cores.run(seconds - rest, late)

    def _go_on(self, value: Any) -> None:
        try:
            effect = self._program.send(value)
        except StopIteration:
            effect = None
        self._do(effect)

    def _do(self, effect: Any) -> None:
        while self._todo:
            task = self._todo.popleft()
            if len(task) == 1:
                self.busy_seconds += task[0]
                self._take(task[0], effect, self._do)
                return
            self._machine.transmit(self.rank, *task)
        if effect is None:
            self.done = True
        elif effect is NOW:
            self._clock.after(0.0, partial(self._go_on, self._clock.now))
        elif self._is_answered(effect):
            # By the clock: direct calls of a busy server would recurse deeper with each frame.
            self._clock.after(0.0, partial(self._answer, effect))
        else:
            self.waits, self._since = effect, self._clock.now

    def _is_answered(self, effect: Any) -> bool:
        if effect is ANY:
            return bool(self._come)
        return not effect.waits or key_of(effect) in self._come

    def _answer(self, effect: Any) -> None:
        key = next(iter(self._come)) if effect is ANY else key_of(effect)
        has_come = key in self._come
        self._come.pop(key, None)
        self._go_on(key if has_come else None)
