"""Every moment belongs to one span, and only training counts."""

import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dlrm_hybrid.telemetry.rank_meter import RankMeter
from dlrm_hybrid.telemetry.spans import COLLECTIVE, NOTHING, Span, SpanClock
from dlrm_hybrid.telemetry.traffic import Phase


@dataclass
class Time:
    """Passes when told to; in whole ticks, so that sums are exact."""

    ticks: int = 0

    def now(self) -> float:
        return float(self.ticks)


MOVES = st.lists(
    st.one_of(
        st.integers(0, 1000),
        st.sampled_from(Span),
        st.sampled_from(["leave", "count", "stop", "look"]),
    )
)
FRAMES = ("parameters", "rows")
WAITS = st.lists(
    st.one_of(
        st.integers(0, 1000),
        st.sampled_from([Span.COMPUTE, Span.SEND, COLLECTIVE, *FRAMES]),
        st.tuples(st.integers(0, 1000), st.sampled_from([None, *FRAMES])),
        st.sampled_from(["leave"]),
    )
)


@given(MOVES)
def test_the_spans_are_the_time_in_which_the_clock_counts(moves: list[int | Span | str]) -> None:
    passing = Time()
    clock = SpanClock(passing.now)
    doing, counts = [Span.REST], False
    expected = dict.fromkeys(Span, 0.0)
    for move in moves:
        if isinstance(move, Span):
            clock.within(move).__enter__()
            doing.append(move)
        elif isinstance(move, int):
            passing.ticks += move
            expected[doing[-1]] += move if counts else 0
        elif move == "leave" and len(doing) > 1:
            clock.within(doing.pop()).__exit__(None, None, None)
        elif move == "look":
            assert clock.seconds() == expected
        elif move in ("count", "stop"):
            counts = move == "count"
            clock.switch(counts, passing.now())
    assert clock.seconds() == expected


@given(WAITS)
def test_waiting_is_for_what_is_wanted_or_else_for_what_came(
    moves: list[int | str | tuple[int, str | None]],
) -> None:
    """Numbers pass, names are entered; a pair is a wait for anything, and what came in the end."""
    passing = Time()
    clock = SpanClock(passing.now)
    clock.switch(True, passing.now())
    arrival = clock.arrival()
    doing: list[str] = [Span.REST]
    expected: Counter[str] = Counter()
    for move in moves:
        if isinstance(move, int):
            passing.ticks += move
            expected[doing[-1]] += move
        elif isinstance(move, tuple):
            ticks, came = move
            wanted = None if isinstance(doing[-1], Span) else doing[-1]
            with arrival:
                passing.ticks += ticks
                if came is not None:
                    arrival.of(came)
            expected[wanted or came or NOTHING] += ticks
        elif move != "leave":
            (clock.within if isinstance(move, Span) else clock.waiting)(move).__enter__()
            doing.append(move)
        elif len(doing) > 1:
            left = doing.pop()
            (clock.within if isinstance(left, Span) else clock.waiting)(left).__exit__()
    spans, waits = clock.seconds(), clock.wait_seconds()
    assert waits == {name: ticks for name, ticks in expected.items() if ticks and name in waits}
    assert spans.pop(Span.WAIT) == sum(waits.values())
    assert {**spans, **waits} == {**dict.fromkeys(spans, 0.0), **(+expected)}


def test_what_another_thread_waits_for_is_not_counted() -> None:
    passing = Time()
    clock = SpanClock(passing.now)
    clock.switch(True, passing.now())
    arrival = clock.arrival()

    def receive() -> None:
        with clock.waiting("parameters"), arrival:
            passing.ticks += 3
            arrival.of("rows")

    with ThreadPoolExecutor(1) as pool:
        pool.submit(receive).result()
    assert clock.seconds()[Span.REST] == 3
    assert clock.wait_seconds() == {}
    receive()
    clock.seconds()
    assert clock.wait_seconds() == {"parameters": 3}


def test_a_timed_function_is_the_function() -> None:
    passing = Time()
    clock = SpanClock(passing.now)
    clock.switch(True, passing.now())

    def quotient(dividend: int, *, divisor: int) -> float:
        passing.ticks += 3
        return dividend / divisor

    timed = clock.timed(Span.READ, quotient)
    assert timed(6, divisor=2) == 3
    with pytest.raises(ZeroDivisionError):
        timed(6, divisor=0)
    passing.ticks += 1
    seconds = clock.seconds()
    assert (seconds.pop("read"), seconds.pop("rest")) == (6, 1)
    assert set(seconds.values()) == {0}


def test_phases_decide_what_counts_and_spans_add_up_to_training(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    passing = Time()
    monkeypatch.setattr(time, "perf_counter", passing.now)
    meter = RankMeter(None, SpanClock(passing.now))
    computing = meter.clock.within(Span.COMPUTE)
    meter.begin(7)
    for step in range(25):
        with computing:
            passing.ticks += 3
        if step == 15:  # counts as nobody's time
            with meter.within(Phase.CHECKPOINT):
                passing.ticks += 50
        passing.ticks += 1
        meter.step_done()
    with meter.within(Phase.EVALUATE), computing:
        passing.ticks += 1_000
    values = meter.values()
    spans, phases = values["seconds_by_span"], values["seconds"]
    assert (meter.step, values["timed_steps"]) == (32, 20)
    assert (spans["compute"], spans["rest"], sum(spans.values())) == (60, 20, 80)
    assert (phases[Phase.TRAIN], phases[Phase.EVALUATE]) == (80, 1_000)
    times = values["step_nanoseconds"]
    assert (sum(times["counts"].values()), times["total"]) == (20, 80 * 10**9)
    assert times["largest"] == 4 * 10**9
    assert values["traffic"] is values["received"] is values["interface"] is None


def test_what_is_taken_is_of_timed_steps_since_the_last_call(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    passing = Time()
    monkeypatch.setattr(time, "perf_counter", passing.now)
    meter = RankMeter(None, SpanClock(passing.now))
    meter.begin(0)
    for steps, timed in ((4, 0), (3, 2), (1, 1)):
        for _ in range(steps):
            passing.ticks += 3
            meter.step_done()
        with meter.within(Phase.EVALUATE):
            passing.ticks += 1_000
        taken = meter.take(samples_per_step=10)
        assert (taken["timed_rows"], taken["timed_seconds"]) == (10 * timed, 3 * timed)
        assert sum(taken["seconds_by_span"].values()) == 3 * timed
    assert meter.take(10)["timed_rows"] == 0


def test_cpu_time_over_time_adds_up_and_is_of_training_only() -> None:
    meter = RankMeter(None, SpanClock())
    meter.begin(0)
    for phase in (Phase.TRAIN, Phase.EVALUATE, Phase.TRAIN):
        meter.switch(phase)
        sum(range(300_000))
    values = meter.values()
    points = values["cpu_series"]
    for column, name in ((1, "seconds"), (2, "cpu_seconds")):
        total = sum(point[column] for point in points)
        assert total == pytest.approx(values[name][Phase.TRAIN])
    assert len(points) >= 1


def burn(seconds: float) -> None:
    """Use that much CPU time in this thread."""
    end = time.thread_time() + seconds
    while time.thread_time() < end:
        sum(range(1_000))


def test_cpu_time_of_threads_that_learn_is_part_of_that_of_the_process() -> None:
    meter = RankMeter(None, SpanClock())
    meter.begin(0)
    meter.switch(Phase.TRAIN)

    def seconds() -> tuple[float, float]:
        values = meter.values()
        return values["thread_cpu_seconds"][Phase.TRAIN], values["cpu_seconds"][Phase.TRAIN]

    burn(0.02)
    own, all_of_them = seconds()
    assert 0.02 <= own <= all_of_them + 0.01
    with ThreadPoolExecutor(1) as other:
        other.submit(burn, 0.05).result()  # the network, say
    after, all_of_them = seconds()
    assert after < own + 0.04
    assert all_of_them > 0.07
    with ThreadPoolExecutor(1, initializer=meter.add_thread) as learning:
        learning.submit(burn, 0.05).result()
        meter.drop_threads()
        learning.submit(burn, 0.05).result()
    own, all_of_them = seconds()
    assert after + 0.05 <= own < after + 0.09
    assert all_of_them > own + 0.08
    assert meter.values()["threads"] == 2


def test_the_peak_of_memory_is_in_bytes() -> None:
    peak_bytes = RankMeter(None, SpanClock()).values()["peak_rss_bytes"]
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    (peak_kib,) = (int(line.split()[1]) for line in lines if line.startswith("VmHWM:"))
    assert peak_bytes == pytest.approx(1024 * peak_kib, rel=0.05)
