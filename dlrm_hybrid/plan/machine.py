"""Simulated ranks: programs that take time on shared cores, and send frames over shared links.

What a program computes and sends between two effects is noted, and takes its time before the effect
is carried out.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, final

from dlrm_hybrid.comm.mailbox import Key, Receive, key_of
from dlrm_hybrid.plan.costs import UnitCosts
from dlrm_hybrid.types import DlrmError

Then = Callable[[], None]
Link = tuple[str, int]
Simulated = Generator[Any, Any, Any]
"""Yields `Receive` or one of these three; is sent the key of the frame, the time or nothing."""
ANY, NOW, HANDOVER = "the next frame", "the time", "another thread of the rank goes on"

LOOPBACK_BYTES_PER_SECOND = 4e9
LINE_SHARE = 1.048 + 0.022 / 2
"""Bytes on a link for each of a frame: headers of 1,448-byte segments, and acknowledgements."""
QUEUED_BYTES = 4 * 1_514.0
"""Of one connection in the queue of a link: Linux lets two pieces of two packets in."""
LEAST_PACED_BYTES, PACED_MESSAGES = 10 * 1_514.0, 10
PACED_SHARE = 1 / (2 / math.log(2) - 1)
"""Of a round trip, for the last byte of a message behind its first: BBR sends N bytes in s at N / s
= 2.89 N / (round trip + s), for N come to be acknowledged in a round trip and s."""
COLD_SECONDS, COLD_WORK_SECONDS = 4.2e-3, 3.7e-3
"""CPU time that work takes more at most once caches are cold, and the work that takes half of it:
what a thread touches again is bounded. Measured: `scripts/benchmarks/slow_links.py`."""
COLD_AFTER_SECONDS = 5e-3
"""The wait after which half of what was warm is cold; measured likewise."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Hosts:
    """Where ranks are, and what their hosts have.

    Attributes:
        machine: of each rank, whose cores it shares; counted from 0.
        host: of each rank, whose link it shares; on emulated networks many are on one machine.
        cores: of each machine.
        bytes_per_second: of each host's link, each way; None for no bound.
        latency_seconds: from host to host.
        slowness: how many times as long some ranks take for all that they compute.
    """

    machine: tuple[int, ...]
    host: tuple[int, ...]
    cores: float
    bytes_per_second: float | None
    latency_seconds: float = 0.0
    slowness: Mapping[int, float] = field(default_factory=dict[int, float])


@final
class Clock:
    """What is due, and when; things that are due at one moment are done as they were asked for."""

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
    """The cores of a machine, a fraction of which makes all slower: who comes first has one."""

    def __init__(self, clock: Clock, number: float) -> None:
        self._clock, self._free = clock, math.ceil(number)
        self._speed = number / self._free
        self._ready: deque[tuple[float, Then]] = deque()

    def run(self, seconds: float, then: Then) -> None:
        """Take so much time of a core, and then do something."""
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
    """The messages of a pair of ranks, the first one partly sent, and the links that they take."""

    links: tuple[Link, ...]
    messages: deque[tuple[float, Then]]
    recent: deque[float]
    left_bytes: float
    rate: float = 0.0


@final
class Links:
    """One link from every host to a switch that never is too slow, with a rate each way.

    Messages of a pair go one after the other, as in one TCP connection; pairs share links max-min
    fairly. Where links have latency, connections pace what they send as BBR does, so that a message
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
        """Send a message behind those of the same ranks, and do something when it has come."""
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

    def signal(self, hosts: tuple[int, int], then: Then) -> None:
        """Send a packet behind what others have in the queues of both links."""
        seconds = self._latency if hosts[0] != hosts[1] else 0.0
        for flow in self._flows.values() if hosts[0] != hosts[1] else ():
            shared = [
                host for (_, host), own in zip(flow.links, hosts, strict=False) if host == own
            ]
            seconds += QUEUED_BYTES / self._rates[shared[0]] if shared else 0.0
        self._clock.after(seconds, then)

    def use(self, host: int) -> float:
        """Share of the time in which a link was full in one direction or the other."""
        carried = self._carried_bytes[host] / self._clock.now / self._rates[host]
        return min(1.0, carried) if self._has_rates else 0.0

    def _advance(self) -> None:
        elapsed, self._since = self._clock.now - self._since, self._clock.now
        for flow in self._flows.values():
            flow.left_bytes -= elapsed * flow.rate

    def _plan(self) -> None:
        """Give every flow its rate, and wait for the first end."""
        self._turn += 1
        self._share()
        if self._flows:
            soonest = min(flow.left_bytes / flow.rate for flow in self._flows.values())
            self._clock.after(soonest, partial(self._end, self._turn))

    def _share(self) -> None:
        """The fullest link first, all of its flows alike."""
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
            if flow.left_bytes > 1e-6 + flow.rate * 1e-12:  # rounding may leave some
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
    """All ranks, with the cores and links that they share.

    Args:
        hosts: where they are.
        costs: of messages, and of waking up.
        servers: ranks that serve all trainers, more than are simulated.
        crowd: how many trainers each simulated one stands for.
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

    def transmit(self, sender: int, to: int, key: Key, num_bytes: float, messages: float) -> None:
        """Hand a frame to the network; its threads at both ends take time of their own.

        Args:
            sender: its rank.
            to: rank of the receiver.
            key: of the frame.
            num_bytes: of it.
            messages: as many as it stands for; 0 for a packet that asks for no thread.
        """
        hosts = self.hosts.host[sender], self.hosts.host[to]
        arrive = partial(self.ranks[to].arrive, key)
        if not messages:
            self.ranks[sender].carry(0.0, partial(self.links.signal, hosts, arrive))
            return
        seconds = self.costs.carry * messages + self.costs.carry_byte * num_bytes
        carry = partial(self.ranks[to].carry, seconds, arrive)
        leave = partial(self.links.send, (sender, to), hosts, num_bytes * LINE_SHARE, carry)
        self.ranks[sender].carry(seconds, leave)

    def run(self, programs: Sequence[Simulated], workers: int) -> None:
        """Run one program for each rank until those of the first ranks are at their end.

        Raises:
            DlrmError: nobody can go on; the message says who waits for what.
        """
        for rank, program in zip(self.ranks, programs, strict=True):
            rank.start(program)
        while not all(rank.done for rank in self.ranks[:workers]):
            if not self.clock.step():
                stuck = {rank.rank: rank.waits for rank in self.ranks if rank.waits is not None}
                raise DlrmError(f"deadlock after {self.clock.now:g} s: {stuck}")


@final
class Rank:
    """One rank: its program, and the frames that have come for it.

    Args:
        machine: of the world.
        rank: its number.
        cores: that it shares.
        copies: how many times it does what it does for one trainer; the cores of the trainers that
            are not simulated are not either, so of its time it takes that share of a core.

    Attributes:
        busy_seconds: of its main thread.
        carried_seconds: of its network's thread.
        cold_seconds: of its main thread, what it took more after it had waited.
        done: its program is at its end.
        waits: what it waits for.
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
        self._come: dict[Key, None] = {}
        self._program: Any = None

    def work(self, seconds: float) -> None:
        """Compute for so long, on a rank that is not slow; more where caches are cold."""
        seconds *= self._slowness
        before = self._cold
        self._cold /= 1 + before * seconds / COLD_WORK_SECONDS
        cold = COLD_SECONDS * (before - self._cold)
        self.cold_seconds += cold
        self._todo.append((seconds + cold,))

    def send(self, to: int, what: Receive, num_bytes: float, messages: float = 1.0) -> None:
        """Note a frame to send, and the time that its encoding takes the main thread.

        Args:
            to: rank of the receiver.
            what: the receiver asks for.
            num_bytes: see `Machine.transmit`.
            messages: likewise.
        """
        costs = self._machine.costs
        if messages:
            self.work(costs.send * messages + costs.send_byte * num_bytes)
        self._todo.append((to, key_of(what), num_bytes, messages))

    def start(self, program: Simulated) -> None:
        """Run a program from its beginning to its first effect."""
        self._program = program
        self._go_on(None)

    def carry(self, seconds: float, then: Then) -> None:
        """Let the network's thread take so long behind what waits, and then do something."""
        self.carried_seconds += seconds * self.copies
        self._carrying.append((seconds * self.copies, then))
        if len(self._carrying) == 1:
            self._take(*self._carrying[0], self._carried)

    def arrive(self, key: Key) -> None:
        """A frame has come."""
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
        """Let a thread work so long, a share of it on the cores that are simulated."""
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
        """All that is noted, then the effect."""
        while self._todo:
            one = self._todo.popleft()
            if len(one) == 1:
                self.busy_seconds += one[0]
                self._take(one[0], effect, self._do)
                return
            self._machine.transmit(self.rank, *one)
        if effect is None:
            self.done = True
        elif effect is NOW:
            self._clock.after(0.0, partial(self._go_on, self._clock.now))
        elif effect is HANDOVER:
            self._clock.after(self._machine.costs.wake, partial(self._go_on, None))
        elif self._is_answered(effect):
            # Not at once: a server with much to do would go deeper with each frame.
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
