"""What every channel keeps, over one table of channels."""

import threading
import time
from pathlib import Path

import numpy as np
import pytest
from channel_rows import ROWS, Row, frame, run_ranks_as_threads
from patience import HANG_SECONDS

from dlrm_hybrid.comm.channel import Channel
from dlrm_hybrid.types import DeadlineError, PeerLostError
from dlrm_hybrid.wire.dense import array_of
from dlrm_hybrid.wire.frame import Frame

EVERY_ROW = pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)


def values(one: Frame) -> np.ndarray:
    return array_of(one.sections[0])


@EVERY_ROW
def test_frames_from_any_rank_to_any_rank_keep_the_order_of_their_sender(
    row: Row, tmp_path: Path
) -> None:
    ranks, frames = 4, 60

    def program(channel: Channel) -> list[tuple[int, int]]:
        others = [rank for rank in range(ranks) if rank != channel.rank]
        for step in range(frames):
            for to in others:
                channel.send(to, frame(channel.rank, step, 1 + 97 * (step % 5)), 0)
        got: list[tuple[int, int]] = []
        for _ in range(frames * len(others)):
            one = channel.receive(HANG_SECONDS)
            assert (values(one) == 1000 * one.sender + one.number).all()
            got.append((one.sender, one.number))
        channel.close()
        return got

    for rank, got in enumerate(run_ranks_as_threads(ranks, row.opener(ranks, tmp_path), program)):
        for sender in set(range(ranks)) - {rank}:
            assert [step for one, step in got if one == sender] == list(range(frames))


@EVERY_ROW
def test_many_small_frames_are_all_there(row: Row, tmp_path: Path) -> None:
    frames = 3000

    def program(channel: Channel) -> list[int]:
        got: list[int] = []
        if channel.rank == 0:
            for step in range(frames):
                channel.send(1, frame(0, step), 4)
        else:
            got = [channel.receive(HANG_SECONDS).number for _ in range(frames)]
        channel.close()
        return got

    got = run_ranks_as_threads(2, row.opener(2, tmp_path), program)[1]
    assert got == list(range(frames))


@EVERY_ROW
def test_big_and_empty_frames_travel(row: Row, tmp_path: Path) -> None:
    sizes = [2_000_000, 0, 1, 2_000_001, 0, 16_384, 16_385]

    def program(channel: Channel) -> None:
        for step, size in enumerate(sizes):
            channel.send(1 - channel.rank, frame(channel.rank, step, size), 0)
        for step, size in enumerate(sizes):
            one = channel.receive(HANG_SECONDS)
            assert one.number == step
            assert len(one.sections) == (size > 0)
            if size:
                array = values(one)
                assert array.size == size
                assert array.flags.aligned
                assert array.flags.writeable
                assert (array == 1000 * one.sender + step).all()
        channel.close()

    run_ranks_as_threads(2, row.opener(2, tmp_path), program)


@EVERY_ROW
def test_a_frame_may_change_once_it_is_sent(row: Row, tmp_path: Path) -> None:
    def program(channel: Channel) -> None:
        if channel.rank == 0:
            one = frame(0, 7, 500_000)
            channel.send(1, one, 0)
            values(one)[:] = -1
        else:
            assert (values(channel.receive(HANG_SECONDS)) == 7).all()
        channel.close()

    run_ranks_as_threads(2, row.opener(2, tmp_path), program)


@EVERY_ROW
def test_waiting_ends_at_the_deadline(row: Row, tmp_path: Path) -> None:
    def program(channel: Channel) -> float:
        with pytest.raises(DeadlineError, match=f"rank {channel.rank}: no frame came within 0 s"):
            channel.receive(0.0)
        start = time.monotonic()
        with pytest.raises(DeadlineError, match=r"no frame came within 0\.1 s"):
            channel.receive(0.1)
        elapsed_seconds = time.monotonic() - start
        channel.close()
        return elapsed_seconds

    for elapsed_seconds in run_ranks_as_threads(2, row.opener(2, tmp_path), program):
        assert elapsed_seconds >= 0.1


@EVERY_ROW
def test_what_was_sent_before_closing_arrives_at_a_slow_receiver(row: Row, tmp_path: Path) -> None:
    # Who need not wait for the receiver has closed before it begins, however long that takes.
    frames, late_seconds = 40, 0.3 if row.waits else HANG_SECONDS
    closed = threading.Event()

    def program(channel: Channel) -> tuple[bool, int]:
        got = 0
        closed_early = False
        if channel.rank == 0:
            for step in range(frames):
                channel.send(1, frame(0, step, 100_000), 0)
            channel.close()
            closed.set()
        else:
            closed_early = closed.wait(late_seconds)
            for step in range(frames):
                got += channel.receive(HANG_SECONDS).number == step
            channel.close()
        return closed_early, got

    closed_early, got = run_ranks_as_threads(2, row.opener(2, tmp_path), program)[1]
    assert got == frames
    assert closed_early != row.waits


@EVERY_ROW
def test_frames_that_cross_a_goodbye_are_taken(row: Row, tmp_path: Path) -> None:
    """Nothing is lost, and nobody is called lost, however the goodbyes of three ranks meet."""
    sent = threading.Barrier(3)
    for turn in range(5):

        def program(channel: Channel, turn: int = turn) -> None:
            for step in range(5):
                for to in {0, 1, 2} - {channel.rank}:
                    channel.send(to, frame(channel.rank, step, 10_000), 0)
            sent.wait(HANG_SECONDS)
            if channel.rank == turn % 3:
                for _ in range(10):
                    channel.receive(HANG_SECONDS)
            channel.close()

        run_ranks_as_threads(3, row.opener(3, tmp_path / str(turn)), program)


@EVERY_ROW
def test_a_rank_that_said_goodbye_is_not_lost(row: Row, tmp_path: Path) -> None:
    gone = threading.Event()
    both = threading.Barrier(2)

    def program(channel: Channel) -> None:
        if channel.rank == 0:
            channel.close()
            gone.set()
        else:
            other = 3 - channel.rank
            while not gone.is_set():
                with pytest.raises(DeadlineError):
                    channel.receive(0.01)
            with pytest.raises(DeadlineError):
                channel.receive(0.1)
            both.wait(HANG_SECONDS)
            channel.send(other, frame(channel.rank, 5), 0)
            assert channel.receive(HANG_SECONDS).sender == other
            channel.close()

    run_ranks_as_threads(3, row.opener(3, tmp_path), program)


@EVERY_ROW
def test_an_abandoned_rank_is_named_by_the_other(row: Row, tmp_path: Path) -> None:
    both = threading.Barrier(2)

    def program(channel: Channel) -> None:
        both.wait(HANG_SECONDS)
        if channel.rank == 0:
            with pytest.raises(PeerLostError, match="rank 1 is gone: ") as caught:
                channel.receive(HANG_SECONDS)
            assert caught.value.rank == 1
        channel.abandon()

    run_ranks_as_threads(2, row.opener(2, tmp_path), program)


@EVERY_ROW
def test_frames_to_nobody_are_refused(row: Row, tmp_path: Path) -> None:
    def program(channel: Channel) -> None:
        rank = channel.rank
        with pytest.raises(ValueError, match=f"rank {rank} sends a frame to itself"):
            channel.send(rank, frame(rank, 0), 0)
        for to in (-1, 2):
            with pytest.raises(ValueError, match=f"to rank {to}; ranks are 0 to 1"):
                channel.send(to, frame(rank, 0), 0)
        with pytest.raises(ValueError, match=f"in the name of rank {1 - rank}"):
            channel.send(1 - rank, frame(1 - rank, 0), 0)
        channel.close()

    run_ranks_as_threads(2, row.opener(2, tmp_path), program)
