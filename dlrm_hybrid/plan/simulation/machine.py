"""Ranks whose programs are run with costs in place of tensors: what each does, sends and waits for.

A program is that of a worker (`parallel.step`) or of a server (`simulation.servers`). What it
computes and sends between two effects is noted, and takes its time before the effect is carried
out.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple, final

from dlrm_hybrid.comm.mailbox import Key, Receive, key_of
from dlrm_hybrid.comm.metered import traffic_of
from dlrm_hybrid.plan.simulation.fluid import Clock, Cores, Links, Pair, Then
from dlrm_hybrid.telemetry.traffic import Traffic
from dlrm_hybrid.types import DlrmError

LINE_SHARE = 1.048 + 0.022 / 2
"""Bytes on a link for each of a frame: headers of 1,448-byte segments, and acknowledgements."""


COLD_SECONDS, COLD_WORK_SECONDS = 4.2e-3, 3.7e-3
"""CPU time that work takes more at most once caches are cold, and the work that takes half of it:
what a thread touches again is bounded. Measured: `scripts/benchmarks/slow_links.py`."""
COLD_AFTER_SECONDS = 5e-3
"""The wait after which half of what was warm is cold; measured likewise."""
LEAST_WAKE_SECONDS = 50e-6
"""From the arrival of a frame until the thread that waits for it goes on, on an idle machine."""


@dataclass(frozen=True, slots=True)
class Arrival:
    """The next frame in the order of arrival, as a server takes them."""


@dataclass(frozen=True, slots=True)
class Now:
    """The time once all that has been noted is done."""


@dataclass(frozen=True, slots=True)
class Handover:
    """Another thread of the same rank goes on, once it has woken up."""


ANY, NOW, HANDOVER = Arrival(), Now(), Handover()
Wait = Receive | Arrival
Effect = Receive | Arrival | Now | Handover
Program = Generator[Any, Any, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class MessageCosts:
    """CPU seconds of a message, and how long a thread takes to wake up.

    Attributes:
        send: of the thread that sends, for a message.
        send_byte: for each of its bytes.
        carry: of the network's threads, at each end, for a message.
        carry_byte: for each of its bytes.
        wake: how much later a thread goes on whose frame has come, if a core is free; no CPU.
    """

    send: float = 0.0
    send_byte: float = 0.0
    carry: float = 30e-6
    carry_byte: float = 0.5e-9
    wake: float = LEAST_WAKE_SECONDS


@dataclass(frozen=True, slots=True, kw_only=True)
class Hosts:
    """Where ranks are, and what their hosts have.

    Attributes:
        machine: of each rank, whose cores it shares; counted from 0.
        host: of each rank, whose link it shares; on emulated networks many are on one machine.
        cores: of each machine.
        bytes_per_second: of each host's link, each way; None for no bound.
        latency_seconds: from host to host.
        paces: their TCP is BBR; see `fluid.Links`.
        slowness: how many times as long some ranks take for all that they compute.
    """

    machine: tuple[int, ...]
    host: tuple[int, ...]
    cores: float
    bytes_per_second: float | None
    latency_seconds: float = 0.0
    paces: bool = False
    slowness: Mapping[int, float] = field(default_factory=dict[int, float])


class _Work(NamedTuple):
    seconds: float


class _Send(NamedTuple):
    to: int
    key: Key
    num_bytes: float
    is_signal: bool = False


@final
class Machine:
    """All ranks, with the cores and links that they share.

    Args:
        hosts: where they are.
        costs: of messages.

    Attributes:
        clock: of the world.
        cores: of each machine.
        links: of the hosts.
        sent_bytes: frames by class of traffic, without headers of the network.
    """

    def __init__(self, hosts: Hosts, costs: MessageCosts) -> None:
        self.clock = Clock()
        self.cores = [Cores(self.clock, hosts.cores) for _ in range(max(hosts.machine) + 1)]
        rates = [hosts.bytes_per_second] * (max(hosts.host) + 1)
        self.links = Links(self.clock, rates, hosts.latency_seconds, paces=hosts.paces)
        self.sent_bytes: dict[Traffic, float] = defaultdict(float)
        self.costs = costs
        self._hosts = hosts
        self.ranks = [
            Rank(self, rank, hosts.slowness.get(rank, 1.0), Carrier(self.cores_of(rank)))
            for rank in range(len(hosts.host))
        ]

    def cores_of(self, rank: int) -> Cores:
        """The cores that a rank shares."""
        return self.cores[self._hosts.machine[rank]]

    def transmit(self, sender: int, sent: tuple[int, Key, float, bool]) -> None:
        """Hand a frame to the network; its threads at both ends take time of their own."""
        to, key, num_bytes, is_signal = sent
        pair = Pair(sender, to, self._hosts.host[sender], self._hosts.host[to])
        arrive = partial(self.ranks[to].arrive, key)
        if is_signal:
            self.ranks[sender].carrier.run(0.0, partial(self.links.signal, pair, arrive))
            return
        self.sent_bytes[traffic_of(key[0])] += num_bytes
        seconds = self.costs.carry + self.costs.carry_byte * num_bytes
        carry = partial(self.ranks[to].carrier.run, seconds, arrive)
        leave = partial(self.links.send, pair, num_bytes * LINE_SHARE, carry)
        self.ranks[sender].carrier.run(seconds, leave)

    def run(self, programs: Mapping[int, Program], until: Sequence[int]) -> None:
        """Run one program for each rank until those of some ranks are at their end.

        Raises:
            DlrmError: nobody can go on; the message says who waits for what.
        """
        for rank, program in programs.items():
            self.ranks[rank].start(program)
        waiting = [self.ranks[rank] for rank in until]
        while not all(rank.done for rank in waiting):
            if not self.clock.step():
                stuck = {rank.rank: rank.waits for rank in self.ranks if rank.waits is not None}
                raise DlrmError(f"deadlock after {self.clock.now:g} s: {stuck}")


@final
@dataclass(slots=True)
class Carrier:
    """The network's thread of a rank: it takes one message at a time, in their order.

    Attributes:
        cores: that it shares.
        busy_seconds: of it.
    """

    cores: Cores
    busy_seconds: float = 0.0
    _waiting: deque[tuple[float, Then]] = field(default_factory=deque[tuple[float, "Then"]])

    def run(self, seconds: float, then: Then) -> None:
        """Take so much time behind what waits, and then do something."""
        self.busy_seconds += seconds
        self._waiting.append((seconds, then))
        if len(self._waiting) == 1:
            self._next()

    def _next(self) -> None:
        self.cores.run(self._waiting[0][0], self._end)

    def _end(self) -> None:
        _, then = self._waiting.popleft()
        if self._waiting:
            self._next()
        then()


@final
@dataclass(slots=True)
class Caches:
    """How much of what a thread touches is no longer in caches, and what that costs.

    Attributes:
        cold: share of it, from 0 to 1.
    """

    cold: float = 0.0

    def wait(self, seconds: float) -> None:
        """Wait so long, while others use the caches."""
        self.cold = 1 - (1 - self.cold) * COLD_AFTER_SECONDS / (seconds + COLD_AFTER_SECONDS)

    def work(self, seconds: float) -> float:
        """CPU seconds that so much work takes more; less of it is cold the more was done."""
        before = self.cold
        self.cold /= 1 + before * seconds / COLD_WORK_SECONDS
        return COLD_SECONDS * (before - self.cold)


@final
@dataclass(slots=True)
class Rank:
    """One rank: its program, and the frames that have come for it.

    Attributes:
        machine: of the world.
        rank: its number.
        slowness: how many times as long it takes for what it computes.
        carrier: its messages' thread.
        busy_seconds: of its main thread.
        cold_seconds: of these, what it took more after it had waited.
        done: its program is at its end.
        waits: what it waits for.
    """

    machine: Machine
    rank: int
    slowness: float
    carrier: Carrier
    busy_seconds: float = 0.0
    cold_seconds: float = 0.0
    done: bool = False
    waits: Wait | None = None
    _program: Program | None = None
    _since: float = 0.0
    _caches: Caches = field(default_factory=Caches)
    _todo: deque[_Work | _Send] = field(default_factory=deque["_Work | _Send"])
    _come: dict[Key, None] = field(default_factory=dict[Key, None])

    def work(self, seconds: float) -> None:
        """Compute for so long, on a rank that is not slow."""
        seconds *= self.slowness
        cold = self._caches.work(seconds)
        self.cold_seconds += cold
        seconds += cold
        self.busy_seconds += seconds
        if self._todo and isinstance(last := self._todo[-1], _Work):
            self._todo[-1] = _Work(last.seconds + seconds)
        else:
            self._todo.append(_Work(seconds))

    def send(self, to: int, key: Key, num_bytes: float) -> None:
        """Note a frame to send, and the time that its encoding takes the main thread."""
        costs = self.machine.costs
        self.work(costs.send + costs.send_byte * num_bytes)
        self._todo.append(_Send(to, key, num_bytes))

    def signal(self, to: int, key: Key) -> None:
        """Send what no program counts, and what takes no time but on its way."""
        self._todo.append(_Send(to, key, 0.0, is_signal=True))

    def start(self, program: Program) -> None:
        """Run a program from its beginning to its first effect."""
        self._program = program
        self._go_on(None)

    def arrive(self, key: Key) -> None:
        """A frame has come."""
        self._come[key] = None
        effect = self.waits
        if effect is not None and (isinstance(effect, Arrival) or key_of(effect) == key):
            self.waits = None
            waited = self.machine.clock.now - self._since
            self._caches.wait(waited)
            self.machine.clock.after(self.machine.costs.wake, partial(self._answer, effect))

    def _go_on(self, value: Key | float | None) -> None:
        assert self._program is not None
        try:
            effect: Effect | None = self._program.send(value)
        except StopIteration:
            effect = None
        self._do(effect)

    def _do(self, effect: Effect | None) -> None:
        """All that is noted, then the effect."""
        while self._todo:
            one = self._todo.popleft()
            if isinstance(one, _Work):
                self.machine.cores_of(self.rank).run(one.seconds, partial(self._do, effect))
                return
            self.machine.transmit(self.rank, one)
        if effect is None:
            self.done = True
        elif isinstance(effect, Now):
            self.machine.clock.after(0.0, partial(self._go_on, self.machine.clock.now))
        elif isinstance(effect, Handover):
            self.machine.clock.after(self.machine.costs.wake, partial(self._go_on, None))
        elif self._has(effect) or (isinstance(effect, Receive) and not effect.waits):
            # Not at once: a server with much to do would go deeper with each frame.
            self.machine.clock.after(0.0, partial(self._answer, effect))
        else:
            self.waits, self._since = effect, self.machine.clock.now

    def _has(self, effect: Wait) -> bool:
        return bool(self._come) if isinstance(effect, Arrival) else key_of(effect) in self._come

    def _answer(self, effect: Wait) -> None:
        if isinstance(effect, Arrival):
            key = next(iter(self._come))
        else:
            key = key_of(effect)
            if key not in self._come:
                self._go_on(None)
                return
        del self._come[key]
        self._go_on(key)
