"""What one rank of a run measures, sends and spends, apart for each phase; sums between points."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, astuple, dataclass, field
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

WARMUP_STEPS = 5  # of each attempt: caches and allocators settle in them, so they are not timed
CPU_WINDOW_SECONDS = 0.1
ANSWERED = (Traffic.PARAMETER_PULL, Traffic.GRADIENT_PUSH)  # what servers send workers
TALLY_NAMES = ("messages", "bytes", "dense_equivalent_bytes")  # of the fields of a `Tally`


@dataclass(frozen=True, slots=True)
class Interval:
    """Sums since the last point of the loss curve; a checkpoint keeps them for the next point.

    Attributes:
        rows: trained on, as far as this process knows; so are the next two.
        loss_sum: over the rows.
        correct: of the rows.
        sent_bytes: by all ranks, where they are counted; known when workers meet.
        dense_equivalent_bytes: of these.
        sent_rows: trained on while these were sent.
        compression: what it let through.
    """

    rows: int = 0
    loss_sum: float = 0.0
    correct: int = 0
    sent_bytes: int = 0
    dense_equivalent_bytes: int = 0
    sent_rows: int = 0
    compression: Counts = field(default_factory=dict[str, dict[str, float]])

    def plus(self, *others: Interval) -> Interval:
        """The sums of several workers, or of intervals that follow each other."""
        several = (self, *others)
        return Interval(
            rows=sum(one.rows for one in several),
            loss_sum=sum(one.loss_sum for one in several),
            correct=sum(one.correct for one in several),
            sent_bytes=sum(one.sent_bytes for one in several),
            dense_equivalent_bytes=sum(one.dense_equivalent_bytes for one in several),
            sent_rows=sum(one.sent_rows for one in several),
            compression=merged(one.compression for one in several),
        )


def _zeros() -> dict[Phase, float]:
    return dict.fromkeys(Phase, 0.0)


def _counters() -> dict[Phase, Counters]:
    return {phase: Counters() for phase in Phase}


class _Timed(NamedTuple):
    """Sums over the steps of an attempt that are not warm-up."""

    steps: int
    seconds: float
    cpu_seconds: float
    by_span: Mapping[str, float]


@final
@dataclass(slots=True)
class _ThreadCpu:
    """CPU time of one thread since it was last asked for, by any thread."""

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
    """Clock and counters of one rank; its main thread makes it.

    Attributes:
        on_phase: gets the counters of every phase that begins; None where nothing is sent.
        clock: of the rank's spans, in `time.perf_counter`; counts while it trains.
        interface: the rank's, if it has one of its own.
        uncounted: classes of traffic left out, since they are not counted.
        step: training steps done, over all attempts.
        versions: what servers here have published in this attempt; None where there are none.
        staleness: of pushes to servers here in this attempt; None where there are none.
        id_sample: of the batches looked up here in this attempt; None where there are none.
    """

    on_phase: Callable[[Counters], None] | None
    clock: SpanClock
    interface: InterfaceMeter | None = None
    uncounted: frozenset[Traffic] = frozenset()
    step: int = 0
    versions: Callable[[], Versions] | None = None
    staleness: Callable[[], ByTrainer] | None = None
    id_sample: IdSample | None = None
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
    _counters: dict[Phase, Counters] = field(default_factory=_counters)
    _step_nanoseconds: Histogram = field(default_factory=Histogram)
    _step_ended: float = 0.0  # of the seconds of training
    _cpu_series: Series = field(default_factory=Series)
    _taken: _Timed = field(default_factory=lambda: _Timed(0, 0.0, 0.0, {}))

    def add_thread(self) -> None:
        """The calling thread learns, too: its CPU time is part of `thread_cpu_seconds`."""
        self._threads.append(_ThreadCpu())
        self._most_threads = max(self._most_threads, len(self._threads))

    def drop_threads(self) -> None:
        """All threads but the main one are about to end."""
        self._end_window()
        del self._threads[1:]

    def sample_ids(self) -> IdSample:
        """What counts the ids of batches that are looked up here."""
        if self.id_sample is None:
            self.id_sample = IdSample()
        return self.id_sample

    def begin(self, step: int) -> None:
        """What comes now is warm-up, after so many steps."""
        self.step = step
        self._enter()

    def switch(self, phase: Phase) -> None:
        """What comes now belongs to `phase`."""
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
        """What happens inside belongs to `phase`, what follows to the phase before."""
        before = self._phase
        self.switch(phase)
        try:
            yield
        finally:
            self.switch(before)

    def take(self, samples_per_step: int) -> dict[str, Any]:
        """Rows, wall, CPU and span seconds of timed steps since the last call, for an event."""
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
        """Bytes and their dense equivalent, of all training steps until now.

        Of a worker: what it has sent, and what servers have answered it, versions and results of
        collectives. Over all workers that is everything that was sent.
        """
        tallies = [one for _, one in self._steps_tallies(ANSWERED)]
        return (
            sum(one.num_bytes for one in tallies),
            sum(one.dense_equivalent_bytes for one in tallies),
        )

    def steps_counts(self) -> dict[str, dict[str, int]]:
        """Messages, bytes and dense equivalent that it has sent in training steps, by class."""
        sums: dict[str, dict[str, int]] = {}
        for traffic, tally in self._steps_tallies():
            if traffic in self.uncounted:
                continue
            own = sums.setdefault(traffic.value, dict.fromkeys(TALLY_NAMES, 0))
            for name, count in zip(TALLY_NAMES, astuple(tally), strict=True):
                own[name] += count
        return sums

    def _steps_tallies(self, answered: Collection[Traffic] = ()) -> Iterator[tuple[Traffic, Tally]]:
        for phase in (Phase.WARMUP, Phase.TRAIN):
            yield from self._counters[phase].sent.snapshot().items()
            received = self._counters[phase].received.snapshot()
            yield from ((traffic, received[traffic]) for traffic in answered)

    def values(self) -> dict[str, Any]:
        """Everything until now, as JSON values."""
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
            and {phase: self._tallies(one.sent, TALLY_NAMES) for phase, one in counters.items()},
            # What messages would have been as float32 is known to their senders.
            "received": counters
            and {
                phase: self._tallies(one.received, TALLY_NAMES[:2])
                for phase, one in counters.items()
            },
        }

    def _tallies(
        self, counter: TrafficCounter, names: Sequence[str]
    ) -> Mapping[str, Mapping[str, int]]:
        """The first sums of a tally, as many as there are names, by class of traffic."""
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
        """Book the time since the last window."""
        wall, cpu = time.perf_counter(), time.process_time()
        seconds, cpu_seconds = wall - self._wall, cpu - self._cpu
        self._seconds[self._phase] += seconds
        self._cpu_seconds[self._phase] += cpu_seconds
        # A copy: another thread may be added meanwhile.
        self._thread_seconds[self._phase] += sum(one.take() for one in tuple(self._threads))
        if self._phase is Phase.TRAIN:
            self._cpu_series.add(self._wall, seconds, cpu_seconds)
        self._wall, self._cpu = wall, cpu


def _counts(found: Histogram | ByTrainer) -> dict[str, Any] | None:
    """What an event says of it; null where nothing was counted."""
    if isinstance(found, Histogram):
        return found.to_json() if found.count else None
    return {str(trainer): one.to_json() for trainer, one in sorted(found.items())} or None
