"""A delay line keeps order, lets nothing go early, and loses only what it has no room for."""

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dlrm_hybrid.comm.netem.relay import DelayLine

DELAYS = st.integers(0, 10**10)
PACKETS = st.binary(min_size=1, max_size=50)
# Nanoseconds until something comes, and what; or None where the line is only asked.
STEPS = st.lists(st.tuples(st.integers(0, 10**10), PACKETS | st.none()), max_size=60)


def drained(line: DelayLine, now_ns: int) -> list[bytes]:
    found: list[bytes] = []
    while (packet := line.take(now_ns)) is not None:
        found.append(packet)
    return found


@given(DELAYS, STEPS)
def test_all_come_in_order_each_at_its_time(
    delay_ns: int, steps: Sequence[tuple[int, bytes | None]]
) -> None:
    line = DelayLine(delay_ns=delay_ns, capacity_bytes=10**6)
    now_ns = 0
    waiting: list[tuple[int, bytes]] = []
    for pause_ns, packet in steps:
        now_ns += pause_ns
        if packet is not None:
            assert line.put(packet, now_ns)
            waiting.append((now_ns + delay_ns, packet))
        due = [one for at_ns, one in waiting if at_ns <= now_ns]
        assert drained(line, now_ns) == due
        waiting = waiting[len(due) :]
        assert line.next_ns() == (waiting[0][0] if waiting else None)
        assert line.held_bytes == sum(len(one) for _, one in waiting)
    assert drained(line, now_ns + delay_ns) == [one for _, one in waiting]
    assert (line.held_bytes, line.lost_packets, line.next_ns()) == (0, 0, None)


@given(DELAYS.filter(bool), st.lists(PACKETS, max_size=60), st.integers(0, 500))
def test_only_what_has_no_room_is_lost_and_it_is_counted(
    delay_ns: int, packets: Sequence[bytes], capacity_bytes: int
) -> None:
    line = DelayLine(delay_ns=delay_ns, capacity_bytes=capacity_bytes)
    kept: list[bytes] = []
    for packet in packets:
        has_room = sum(map(len, kept)) + len(packet) <= capacity_bytes
        assert line.put(packet, 0) == has_room
        kept += [packet] * has_room
        assert line.held_bytes <= capacity_bytes
    assert line.lost_packets == len(packets) - len(kept)
    assert drained(line, delay_ns - 1) == []
    assert drained(line, delay_ns) == kept
    assert line.put(b"x" * capacity_bytes, delay_ns), "room has come back"


@pytest.mark.parametrize("delay_ns", [0, 1, 20_000_000])
def test_a_packet_is_due_when_its_delay_has_passed(delay_ns: int) -> None:
    line = DelayLine(delay_ns=delay_ns, capacity_bytes=10)
    assert line.put(b"packet", 5)
    assert line.take(5 + delay_ns - 1) is None
    assert line.take(5 + delay_ns) == b"packet"
