"""Time, CPU, memory and traffic of one rank by phase; sums for the points of the loss curve."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, astuple, dataclass, field, fields
from threading import get_ident
from typing import Any, NamedTuple, final

from dlrm_hybrid.telemetry.compression import Counts, merged
from dlrm_hybrid.telemetry.histogram import ByTrainer, Histogram, IdSample
from dlrm_hybrid.telemetry.interface import InterfaceMeter, Series
from dlrm_hybrid.telemetry.machine import peak_rss_bytes
from dlrm_hybrid.telemetry.spans import SpanClock
from dlrm_hybrid.telemetry.traffic import (
    Counters,
    Phase,
    Tally,
    Traffic,
    TrafficCounter,
    Versions,
)

WARMUP_STEPS = 5  # of each attempt, not timed: caches and allocators settle
CPU_WINDOW_SECONDS = 0.1
ANSWERED = (Traffic.PARAMETER_PULL, Traffic.GRADIENT_PUSH)  # classes that servers send to workers
TALLY_NAMES = ("messages", "bytes", "dense_equivalent_bytes")  # for the fields of a `Tally`


@dataclass(frozen=True, slots=True)
class Interval:
    """Sums since the last point of the loss curve; a checkpoint keeps them for the next point.

    Attributes:
        rows: rows trained on, as far as this process knows.
        loss_sum: sum of their losses.
        correct: number of them predicted correctly.
        sent_bytes: bytes sent by all ranks, if counted; known when workers meet.
        dense_equivalent_bytes: bytes of the same messages as plain float32.
        sent_rows: rows trained on while these bytes were sent.
    """

    rows: int = 0
    loss_sum: float = 0.0
    correct: int = 0
    sent_bytes: int = 0
    dense_equivalent_bytes: int = 0
    sent_rows: int = 0
    compression: Counts = field(default_factory=dict[str, dict[str, float]])

    def plus(self, *intervals: Interval) -> Interval:
        """The sums of several workers, or of intervals that follow each other."""
        parts = (self, *intervals)
        compression = merged(part.compression for part in parts)
        names = [f.name for f in fields(Interval) if f.name != "compression"]
        sums = {name: sum(getattr(part, name) for part in parts) for name in names}
        return Interval(**sums, compression=compression)


def _zeros() -> dict[Phase, float]:
    return dict.fromkeys(Phase, 0.0)


class _Timed(NamedTuple):
    """Sums over the steps of an attempt after warm-up."""

    steps: int
    seconds: float
    cpu_seconds: float
    by_span: Mapping[str, float]


@final
@dataclass(slots=True)
class _ThreadCpu:
    """CPU clock of the thread that makes it; any thread may read it."""

    clock: int = field(default_factory=lambda: time.pthread_getcpuclockid(get_ident()))
    _seconds: float = 0.0

    def __post_init__(self) -> None:
        self.take()

    def take(self) -> float:
        """Seconds since the last call."""
        before, self._seconds = self._seconds, time.clock_gettime(self.clock)
        return self._seconds - before


@final
@dataclass(slots=True)
class RankMeter:
    """Measures time and traffic of one rank by phase; made by its main thread.

    Attributes:
        on_phase: called with the counters of every phase that begins; None if nothing is sent.
        clock: clock of the rank's spans, by `time.perf_counter`, which counts while it trains.
        interface: meter of the rank's network interface, if it has one.
        uncounted: classes of traffic that are not counted.
        step: training steps done, over all attempts.
        versions: reads the versions published by servers here in this attempt; None without.
        staleness: reads the staleness of pushes to servers here in this attempt; None without.
        id_sample: sample of the ids looked up here in this attempt; None without.
        answered: classes of traffic that servers send to this rank.
    """

    on_phase: Callable[[Counters], None] | None
    clock: SpanClock
    interface: InterfaceMeter | None = None
    uncounted: frozenset[Traffic] = frozenset()
    step: int = 0
    versions: Callable[[], Versions] | None = None
    staleness: Callable[[], ByTrainer] | None = None
    id_sample: IdSample | None = None
    answered: Collection[Traffic] = ANSWERED
    _phase: Phase = Phase.WARMUP
    _warm_steps: int = 0
    _timed_steps: int = 0
    _wall: float = field(default_factory=time.perf_counter)
    _cpu: float = field(default_factory=time.process_time)
    _seconds: dict[Phase, float] = field(default_factory=_zeros)
    _cpu_seconds: dict[Phase, float] = field(default_factory=_zeros)
    _threads: list[_ThreadCpu] = field(default_factory=lambda: [_ThreadCpu()])
    _most_threads: int = 1
    _thread_seconds: dict[Phase, float] = field(default_factory=_zeros)
    _counters: dict[Phase, Counters] = field(
        default_factory=lambda: {phase: Counters() for phase in Phase}
    )
    _step_nanoseconds: Histogram = field(default_factory=Histogram)
    _step_ended: float = 0.0  # seconds of training at the end of the last step
    _cpu_series: Series = field(default_factory=Series)
    _taken: _Timed = field(default_factory=lambda: _Timed(0, 0.0, 0.0, {}))

    def add_thread(self) -> None:
        """Register the calling thread as one that trains, for `thread_cpu_seconds`."""
        self._threads.append(_ThreadCpu())
        self._most_threads = max(self._most_threads, len(self._threads))

    def drop_threads(self) -> None:
        """Forget all threads but the main one, which are about to end."""
        self._end_window()
        del self._threads[1:]

    def sample_ids(self) -> IdSample:
        """The sample of ids looked up here; made on first use."""
        if self.id_sample is None:
            self.id_sample = IdSample()
        return self.id_sample

    def begin(self, step: int) -> None:
        """Begin warm-up after `step` steps."""
        self.step = step
        self._enter()

    def switch(self, phase: Phase) -> None:
        """Begin a phase, unless it goes on."""
        if phase is self._phase:
            self._end_long_window(time.perf_counter())
            return
        self._end_window()
        self._phase = phase
        self._enter()

    def step_done(self) -> None:
        """Count a training step; the first ones of an attempt are warm-up."""
        self.step += 1
        if self._phase is Phase.TRAIN:
            self._timed_steps += 1
            now = time.perf_counter()
            trained = self._seconds[Phase.TRAIN] + now - self._wall
            self._step_nanoseconds.add(round(1e9 * (trained - self._step_ended)))
            self._step_ended = trained
            self._end_long_window(now)
            return
        self._warm_steps += 1
        if self._warm_steps == WARMUP_STEPS:
            self.switch(Phase.TRAIN)

    @contextmanager
    def within(self, phase: Phase) -> Generator[None, None, None]:
        """Count the `with` block in `phase`, then go back to the phase before."""
        before = self._phase
        self.switch(phase)
        try:
            yield
        finally:
            self.switch(before)

    def train(self) -> None:
        """Go back to training, or its warm-up, from whichever phase."""
        self.switch(Phase.TRAIN if self._warm_steps >= WARMUP_STEPS else Phase.WARMUP)

    def take(self, samples_per_step: int) -> dict[str, Any]:
        """Rows, and wall, CPU and span seconds, of timed steps since the last call."""
        self._end_window()
        now = _Timed(
            self._timed_steps,
            self._seconds[Phase.TRAIN],
            self._cpu_seconds[Phase.TRAIN],
            self.clock.seconds(self._wall),
        )
        before, self._taken = self._taken, now
        return {
            "timed_rows": (now.steps - before.steps) * samples_per_step,
            "timed_seconds": now.seconds - before.seconds,
            "timed_cpu_seconds": now.cpu_seconds - before.cpu_seconds,
            "seconds_by_span": {
                span: seconds - before.by_span.get(span, 0.0)
                for span, seconds in now.by_span.items()
            },
        }

    def steps_traffic(self) -> tuple[int, int]:
        """Bytes of all training steps until now and their dense equivalent, as a worker counts.

        These are what it has sent, and the versions and results of collectives that servers have
        sent it. Added up over all workers that is everything that was sent.
        """
        tallies = [tally for _, tally in self._steps_tallies(self.answered)]
        return (
            sum(tally.num_bytes for tally in tallies),
            sum(tally.dense_equivalent_bytes for tally in tallies),
        )

    def steps_counts(self) -> dict[str, dict[str, int]]:
        """Messages, bytes and their dense equivalent sent in training steps, by class."""
        sums: dict[str, dict[str, int]] = {}
        for traffic, tally in self._steps_tallies():
            if traffic in self.uncounted:
                continue
            counts = sums.setdefault(traffic.value, dict.fromkeys(TALLY_NAMES, 0))
            for name, count in zip(TALLY_NAMES, astuple(tally), strict=True):
                counts[name] += count
        return sums

    def _steps_tallies(self, answered: Collection[Traffic] = ()) -> Iterator[tuple[Traffic, Tally]]:
        for phase in (Phase.WARMUP, Phase.TRAIN):
            yield from self._counters[phase].sent.snapshot().items()
            received = self._counters[phase].received.snapshot()
            yield from ((traffic, received[traffic]) for traffic in answered)

    def values(self) -> dict[str, Any]:
        """All measurements until now, as JSON values."""
        since_1970 = time.time() - time.perf_counter()
        self._end_window()
        counters = None if self.on_phase is None else self._counters
        return {
            "timed_steps": self._timed_steps,
            "step_nanoseconds": _counts(self._step_nanoseconds),
            "seconds": dict(self._seconds),
            "cpu_seconds": dict(self._cpu_seconds),
            "thread_cpu_seconds": dict(self._thread_seconds),
            "threads": self._most_threads,
            "peak_rss_bytes": peak_rss_bytes(),
            "seconds_by_span": self.clock.seconds(self._wall),
            "seconds_by_wait": self.clock.wait_seconds(),
            "cpu_series": self._cpu_series.since(since_1970),
            "versions": None if self.versions is None else asdict(self.versions()),
            "staleness": None if self.staleness is None else _counts(self.staleness()),
            "distinct_ids": None if self.id_sample is None else _counts(self.id_sample.ids),
            "interface": None if self.interface is None else self.interface.values(),
            "traffic": counters
            and {phase: self._tallies(c.sent, TALLY_NAMES) for phase, c in counters.items()},
            # Only senders know the dense equivalent.
            "received": counters
            and {
                phase: self._tallies(c.received, TALLY_NAMES[:2]) for phase, c in counters.items()
            },
        }

    def _tallies(
        self, counter: TrafficCounter, names: Sequence[str]
    ) -> Mapping[str, Mapping[str, int]]:
        """The first fields of each class's tally, as many as there are names."""
        return {
            traffic.value: dict(zip(names, astuple(tally), strict=False))
            for traffic, tally in counter.snapshot().items()
            if traffic not in self.uncounted
        }

    def _enter(self) -> None:
        training = self._phase is Phase.TRAIN
        self.clock.switch(training, self._wall)
        if self.on_phase is not None:
            self.on_phase(self._counters[self._phase])
        if self.interface is not None:
            self.interface.switch(training)

    def _end_long_window(self, now: float) -> None:
        if now - self._wall >= CPU_WINDOW_SECONDS:
            self._end_window()

    def _end_window(self) -> None:
        wall, cpu = time.perf_counter(), time.process_time()
        seconds, cpu_seconds = wall - self._wall, cpu - self._cpu
        self._seconds[self._phase] += seconds
        self._cpu_seconds[self._phase] += cpu_seconds
        # A copy: another thread may be added meanwhile.
        self._thread_seconds[self._phase] += sum(t.take() for t in tuple(self._threads))
        if self._phase is Phase.TRAIN:
            self._cpu_series.add(self._wall, seconds, cpu_seconds)
        self._wall, self._cpu = wall, cpu


def _counts(counted: Histogram | ByTrainer) -> dict[str, Any] | None:
    """A histogram, or one for each trainer, for an event; null if nothing was counted."""
    if isinstance(counted, Histogram):
        return counted.to_json() if counted.count else None
    return {str(trainer): h.to_json() for trainer, h in sorted(counted.items())} or None
