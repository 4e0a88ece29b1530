"""Laws of shared cores and links, and cases that can be done by hand."""

import math
from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dlrm_hybrid.plan.simulation.fluid import (
    BBR_SHARE,
    FIRST_WINDOW_BYTES,
    QUEUED_BYTES,
    SIGNAL_BYTES,
    TURN_SECONDS,
    Clock,
    Cores,
    Links,
    Pair,
)

TIMES = st.floats(1e-6, 0.05)


def ended(clock: Clock) -> None:
    while clock.step():
        pass


def finish(cores: float, tasks: list[float]) -> tuple[list[float], Cores]:
    """When tasks that begin together end."""
    clock = Clock()
    machine = Cores(clock, cores)
    ends = [0.0] * len(tasks)

    def note(task: int) -> None:
        ends[task] = clock.now

    for number, seconds in enumerate(tasks):
        machine.run(seconds, partial(note, number))
    ended(clock)
    return ends, machine


def test_three_tasks_take_turns_on_two_cores() -> None:
    ends, machine = finish(2, [2 * TURN_SECONDS, 2 * TURN_SECONDS, 2 * TURN_SECONDS])
    # The third begins when the turns of the others are over, the first goes on at once beside it.
    assert ends == pytest.approx([2 * TURN_SECONDS, 3 * TURN_SECONDS, 3 * TURN_SECONDS])
    assert machine.busy_seconds == pytest.approx(6 * TURN_SECONDS)


def test_what_is_short_is_done_before_who_comes_later() -> None:
    ends, _ = finish(1, [TURN_SECONDS / 2, 2 * TURN_SECONDS, TURN_SECONDS / 2])
    assert ends == pytest.approx([one * TURN_SECONDS for one in (0.5, 3.0, 2.0)])


@given(st.floats(0.25, 8), st.lists(TIMES, min_size=1, max_size=9))
def test_work_is_conserved_and_no_core_is_idle_while_somebody_waits(
    cores: float, tasks: list[float]
) -> None:
    ends, machine = finish(cores, tasks)
    assert machine.busy_seconds == pytest.approx(sum(tasks))
    speed = cores / math.ceil(cores)
    assert max(ends) >= max(sum(tasks) / cores, max(tasks) / speed) * (1 - 1e-9)
    assert max(ends) <= (sum(tasks) / cores + max(tasks) / speed) * (1 + 1e-9)


def arrivals(
    rates: list[float | None], messages: list[tuple[int, int, float]], latency: float = 0.0
) -> tuple[list[float], Links]:
    """When messages (from host, to host, bytes) that are sent together come."""
    clock = Clock()
    links = Links(clock, rates, latency)
    come = [0.0] * len(messages)

    def note(number: int) -> None:
        come[number] = clock.now

    for number, (sender, receiver, size) in enumerate(messages):
        links.send(Pair(sender, receiver, sender, receiver), size, partial(note, number))
    ended(clock)
    return come, links


def test_messages_of_a_pair_follow_each_other() -> None:
    come, _ = arrivals([100.0, 100.0], [(0, 1, 100.0), (0, 1, 50.0)], latency=0.25)
    assert come == pytest.approx([1.25, 1.75])


def test_a_late_link_lets_a_new_connection_pass_twice_as_much_each_time() -> None:
    rate, latency = 1e9, 0.02
    for windows, trips in ((0.9, 0), (1.1, 1), (2.9, 1), (3.1, 2), (7.1, 3)):
        size = windows * FIRST_WINDOW_BYTES
        come, links = arrivals([rate] * 2, [(0, 1, size)], latency)
        assert come == pytest.approx([(2 * trips + 1) * latency], abs=1e-3)
        assert links.sent_bytes[0] == pytest.approx(size)


def test_paced_connections_take_half_a_round_trip_from_first_to_last_byte() -> None:
    clock, latency = Clock(), 0.02
    links, came = Links(clock, [1e9] * 2, latency, paces=True), dict[float, float]()

    def send(start: float, size: float) -> None:
        links.send(Pair(0, 1, 0, 1), size, lambda: came.update({start: clock.now - start}))

    for start, size in ((0.0, 100_000.0), (1.0, 100_000.0), (2.0, 1_000.0)):
        clock.after(start, partial(send, start, size))
    ended(clock)
    half = BBR_SHARE * 2 * latency
    assert half == pytest.approx(0.53 * 2 * latency, rel=0.01)
    assert list(came.values()) == pytest.approx(
        [latency + half, latency + half, latency + half / 100]
    )


def test_what_signals_wait_for_is_what_queues_hold() -> None:
    clock, came = Clock(), list[float]()
    links = Links(clock, [1e6] * 3)
    links.send(Pair(0, 1, 0, 1), 1e5, lambda: came.append(clock.now))
    links.signal(Pair(0, 1, 0, 1), lambda: came.append(clock.now))
    links.signal(Pair(0, 2, 0, 2), lambda: came.append(clock.now))
    links.signal(Pair(2, 0, 2, 0), lambda: came.append(clock.now))
    ended(clock)
    # The other way is free; beside a message is a queue; behind it is the end of it.
    assert came == pytest.approx([0.0, QUEUED_BYTES / 1e6, 0.1, 0.1 + SIGNAL_BYTES / 1e6])


def test_a_connection_that_was_used_lets_more_pass_until_it_pauses_for_long() -> None:
    clock, size, latency = Clock(), 6 * FIRST_WINDOW_BYTES, 0.02
    links, came = Links(clock, [1e9] * 2, latency), list[float]()

    def send() -> None:
        start = clock.now
        links.send(Pair(0, 1, 0, 1), size, lambda: came.append(clock.now - start))

    for begin in (0.0, 0.2, 2.0):
        clock.after(begin, send)
    ended(clock)
    assert came == pytest.approx([5 * latency, 3 * latency, 5 * latency], abs=1e-3)


def test_two_senders_share_the_receivers_link_and_a_third_pair_has_what_is_left() -> None:
    # 0 and 1 to 2 have 50 each; 0 to 3 the other 50 of host 0 until 2 is free at 2 s.
    come, links = arrivals([100.0] * 4, [(0, 2, 100.0), (1, 2, 100.0), (0, 3, 150.0)])
    assert come == pytest.approx([2.0, 2.0, 2.5])
    assert links.received_bytes == pytest.approx([0, 0, 200, 150])


def test_both_directions_of_a_link_are_full() -> None:
    come, _ = arrivals([100.0, 100.0], [(0, 1, 100.0), (1, 0, 100.0)])
    assert come == pytest.approx([1.0, 1.0])


MESSAGES = st.lists(
    st.tuples(st.integers(0, 3), st.integers(0, 3), st.floats(1, 1e6)), min_size=1, max_size=12
)


@given(MESSAGES, st.floats(1e3, 1e6))
def test_every_byte_arrives_and_no_link_is_above_its_rate(
    messages: list[tuple[int, int, float]], rate: float
) -> None:
    come, links = arrivals([rate] * 4, messages)
    over = [one for one in messages if one[0] != one[1]]
    assert sum(links.sent_bytes) == pytest.approx(sum(size for _, _, size in over))
    assert sum(links.received_bytes) == pytest.approx(sum(links.sent_bytes))
    busiest = max(links.sent_bytes + links.received_bytes)
    if over:
        last = max(at for at, one in zip(come, messages, strict=True) if one[0] != one[1])
        assert last >= busiest / rate * (1 - 1e-6)
        # Max-min fairness keeps some link full all the time; sums over pairs bound it.
        assert last <= sum(size for _, _, size in over) / rate * (1 + 1e-6)
