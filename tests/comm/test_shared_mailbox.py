"""Threads that take from one mailbox: each gets its own frames, all learn of a failure."""

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import pytest
from channel_rows import ATTEMPT, Row, frame, in_process, metered, run_ranks_as_threads, zmq
from hypothesis import given, settings
from hypothesis import strategies as st
from patience import HANG_SECONDS

from dlrm_hybrid.comm.channel import Channel
from dlrm_hybrid.comm.in_process import in_process_channels
from dlrm_hybrid.comm.mailbox import (
    ATTENTION_SECONDS,
    GivenUpError,
    Mailbox,
    Receive,
    SharedMailbox,
)
from dlrm_hybrid.comm.metered import MeteredChannel
from dlrm_hybrid.telemetry.spans import SpanClock
from dlrm_hybrid.telemetry.traffic import Counters, Traffic
from dlrm_hybrid.types import DeadlineError, PeerLostError
from dlrm_hybrid.wire.frame import Frame, Kind


def wanted(number: int, thread: int) -> Receive:
    return Receive(Kind.PARAMETERS, 1, number, microbatch=thread)


def answer(number: int, thread: int) -> Frame:
    return frame(1, number, kind=Kind.PARAMETERS, microbatch=thread)


def in_threads(count: int, work: Callable[[int], Any]) -> list[Future[Any]]:
    with ThreadPoolExecutor(count) as pool:
        futures = [pool.submit(work, thread) for thread in range(count)]
        for future in futures:
            future.exception(HANG_SECONDS)  # waits
        return futures


def waiting(threads: int, box: SharedMailbox, act: Callable[[], None]) -> list[Future[Any]]:
    """What becomes of threads that each wait for a frame that never comes, and one that acts."""

    def work(thread: int) -> object:
        if thread == threads:
            act()
            return None
        return box.take(wanted(0, thread), HANG_SECONDS)

    return in_threads(threads + 1, work)[:-1]


@settings(max_examples=40, deadline=None)
@given(data=st.data(), threads=st.integers(1, 4))
def test_each_thread_gets_its_own_frames_in_whatever_order_they_come(
    data: st.DataObject, threads: int
) -> None:
    counts = data.draw(st.lists(st.integers(0, 9), min_size=threads, max_size=threads))
    every = [(number, thread) for thread in range(threads) for number in range(counts[thread])]
    coming = data.draw(st.permutations(every))
    early = data.draw(st.integers(0, len(coming)))
    own, other = in_process_channels(2)
    mailbox = Mailbox(own, ATTEMPT, capacity=len(every) + 1)
    box = SharedMailbox(mailbox)
    for one in coming[:early]:
        other.send(0, answer(*one), 0)

    def work(thread: int) -> list[int]:
        if thread == threads:
            for one in coming[early:]:
                other.send(0, answer(*one), 0)
            return []
        numbers = range(counts[thread])
        return [box.take(wanted(number, thread), HANG_SECONDS).number for number in numbers]

    got = [future.result() for future in in_threads(threads + 1, work)]
    assert got == [[*range(count)] for count in counts] + [[]]
    assert len(mailbox) == 0


@pytest.mark.parametrize(
    "row",
    [Row("metered_in_process", metered(in_process), False), Row("zmq", metered(zmq), True)],
    ids=lambda row: row.name,
)
def test_threads_that_ask_over_one_channel_get_every_answer_once(row: Row, tmp_path: Path) -> None:
    """Each asks and waits; what one thread sends stays in its order."""
    threads, asked = 4, 200

    def program(channel: Channel) -> int:
        if channel.rank == 1:
            due = [0] * threads
            for _ in range(threads * asked):
                question = channel.receive(HANG_SECONDS)
                assert question.number == due[question.microbatch]
                due[question.microbatch] += 1
                channel.send(0, answer(question.number, question.microbatch), 0)
            channel.close()
            return sum(due)
        box = SharedMailbox(Mailbox(channel, ATTEMPT, capacity=threads))

        def work(thread: int) -> int:
            for number in range(asked):
                channel.send(1, frame(0, number, microbatch=thread), 0)
                got = box.take(wanted(number, thread), HANG_SECONDS)
                assert (got.number, got.microbatch) == (number, thread)
            return asked

        answered = sum(future.result() for future in in_threads(threads, work))
        channel.close()
        assert isinstance(channel, MeteredChannel)
        sent = channel.counters.sent.snapshot()[Traffic.GRADIENT_PUSH]
        received = channel.counters.received.snapshot()[Traffic.PARAMETER_PULL]
        assert sent.messages == received.messages == threads * asked
        return answered

    done = run_ranks_as_threads(2, row.opener(2, tmp_path), program)
    assert done == [threads * asked] * 2


def test_a_lost_peer_is_told_to_every_thread(tmp_path: Path) -> None:
    have_met = threading.Event()

    def program(channel: Channel) -> None:
        if channel.rank == 1:
            assert have_met.wait(HANG_SECONDS)  # who is lost before is told by opening
            channel.abandon()
            return
        have_met.set()
        box = SharedMailbox(Mailbox(channel, ATTEMPT, capacity=9))
        for future in waiting(3, box, lambda: None):
            assert isinstance(future.exception(), PeerLostError)
        channel.abandon()

    run_ranks_as_threads(2, zmq(2, tmp_path), program)


def test_all_give_up_when_one_thread_has_failed() -> None:
    own, other = in_process_channels(2)
    box = SharedMailbox(Mailbox(own, ATTEMPT, capacity=9))
    for future in waiting(3, box, box.give_up):
        assert isinstance(future.exception(), GivenUpError)
    other.send(0, answer(0, 0), 0)
    other.send(0, answer(0, 1), 0)
    with pytest.raises(GivenUpError):
        box.take(wanted(0, 1), HANG_SECONDS)


def test_a_frame_that_does_not_come_is_named() -> None:
    own, _ = in_process_channels(2)
    box = SharedMailbox(Mailbox(own, ATTEMPT, capacity=9))
    seconds = 1.5 * ATTENTION_SECONDS

    def work(thread: int) -> object:
        return box.take(wanted(7, thread), seconds)

    for thread, future in enumerate(in_threads(2, work)):
        told = f"parameters 7 from rank 1{', microbatch 1' if thread else ''} did not come within"
        with pytest.raises(DeadlineError, match=told):
            future.result()


def test_what_has_come_is_taken_without_waiting() -> None:
    own, other = in_process_channels(2)
    box = SharedMailbox(Mailbox(own, ATTEMPT, capacity=9))
    assert box.take_now(wanted(1, 0)) is None
    other.send(0, answer(0, 0), 0)
    other.send(0, answer(1, 0), 0)
    assert box.take_now(wanted(1, 0)) is not None
    assert box.take(wanted(0, 0), 0.0).number == 0


@dataclass(frozen=True)
class Slow:
    """A channel that is asked what has come until something else has happened."""

    inner: Channel
    happens: Callable[[], None]

    def receive(self, deadline_seconds: float) -> Frame:
        if not deadline_seconds:
            self.happens()
        return self.inner.receive(deadline_seconds)


def test_who_came_while_another_looked_receives_for_itself() -> None:
    own, other = in_process_channels(2)
    with ThreadPoolExecutor(1) as pool:
        taken: list[Future[Frame]] = []

        def come() -> None:
            taken.append(pool.submit(box.take, wanted(0, 1), HANG_SECONDS))
            while not box._waiting:
                assert not taken[0].done()

        channel = cast(Channel, Slow(own, come))
        box = SharedMailbox(Mailbox(channel, ATTEMPT, capacity=9))
        assert box.take_now(wanted(0, 0)) is None
        other.send(0, answer(0, 1), 0)
        assert taken[0].result(HANG_SECONDS).number == 0


def test_a_clock_counts_its_own_thread_alone() -> None:
    clock = SpanClock()
    channel = MeteredChannel(in_process_channels(1)[0], Counters(), clock)
    clock.switch(True, time.perf_counter())

    def wait() -> None:
        with pytest.raises(DeadlineError):
            channel.receive(0.05)

    thread = threading.Thread(target=wait)
    thread.start()
    thread.join(HANG_SECONDS)
    assert clock.seconds()["wait"] == 0.0
    wait()
    assert clock.seconds()["wait"] > 0.04
