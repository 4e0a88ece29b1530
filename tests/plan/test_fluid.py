"""Laws of shared cores and links, and cases that can be done by hand."""

from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dlrm_hybrid.plan.simulation.fluid import Clock, Cores, Links, Pair

TIMES = st.floats(1e-4, 10.0)


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


def test_three_tasks_share_two_cores() -> None:
    ends, machine = finish(2, [1.0, 1.0, 2.0])
    # All have 2/3 of a core until the short ones end at 1.5 s; then one core for the last second.
    assert ends == pytest.approx([1.5, 1.5, 2.5])
    assert machine.busy_seconds == pytest.approx(4.0)


@given(st.floats(0.25, 8), st.lists(TIMES, min_size=1, max_size=9))
def test_work_is_conserved_and_more_cores_are_never_slower(
    cores: float, tasks: list[float]
) -> None:
    ends, machine = finish(cores, tasks)
    assert machine.busy_seconds == pytest.approx(sum(tasks))
    assert max(ends) >= max(sum(tasks) / cores, max(tasks) / min(1, cores)) * (1 - 1e-9)
    more, _ = finish(2 * cores, tasks)
    assert all(fast <= slow * (1 + 1e-9) for fast, slow in zip(more, ends, strict=True))


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
