"""Frames leave in the order in which they are wanted, whatever the order in which they came."""

from dataclasses import dataclass

import pytest
from channel_rows import ATTEMPT, frame
from hypothesis import given
from hypothesis import strategies as st

from dlrm_hybrid.comm.in_process import in_process_channels
from dlrm_hybrid.comm.mailbox import Mailbox, Receive, UnexpectedFrameError
from dlrm_hybrid.types import DeadlineError, PeerLostError
from dlrm_hybrid.wire.frame import Kind


@dataclass(frozen=True)
class Key:
    kind: Kind
    sender: int
    number: int
    boundary: int
    round: int
    microbatch: int


KEYS = st.builds(
    Key,
    kind=st.sampled_from([Kind.ACTIVATION, Kind.PARAMETERS]),
    sender=st.integers(1, 2),
    number=st.integers(0, 2),
    boundary=st.integers(0, 1),
    round=st.integers(0, 1),
    microbatch=st.integers(0, 2),
)
FIRST = Key(Kind.PUSH, 1, 0, 0, 0, 0)


def sent(ends, key: Key, **changes: object) -> None:
    one = frame(
        key.sender,
        key.number,
        kind=key.kind,
        boundary=key.boundary,
        round=key.round,
        microbatch=key.microbatch,
        **changes,
    )
    ends[key.sender].send(0, one, 0)


@given(st.data())
def test_every_frame_is_handed_out_once_when_it_is_wanted(data: st.DataObject) -> None:
    ends = in_process_channels(3)
    box = Mailbox(ends[0], ATTEMPT, capacity=100)
    wanted = data.draw(st.lists(KEYS, unique=True, max_size=12))
    coming = data.draw(st.permutations(wanted))
    for key in wanted:
        count = data.draw(st.integers(0, len(coming)))
        for early in coming[:count]:
            sent(ends, early)
        coming = coming[count:]
        if key in coming:
            assert box.take_now(key) is None
            with pytest.raises(DeadlineError):
                box.take(key, 0.0)
            sent(ends, key)
            coming.remove(key)
        got = box.take(key, 0.0) if data.draw(st.booleans()) else box.take_now(key)
        assert got is not None
        assert Key(got.kind, got.sender, got.number, got.boundary, got.round, got.microbatch) == key
        assert box.take_now(key) is None
    assert len(box) == 0


def test_who_is_waited_for_in_vain_is_named_unless_known_to_be_gone() -> None:
    ends = in_process_channels(3)
    box = Mailbox(ends[0], ATTEMPT, capacity=9)
    key = Receive(Kind.SHARD, 2, 4)
    sent(ends, FIRST)
    with pytest.raises(DeadlineError, match="shard 4 from rank 2 did not come within 0 s") as late:
        box.take_unless(key, lambda: False, 0.0)
    assert late.value.ranks == (2,)
    assert box.take_unless(key, lambda: True, 0.0) is None
    ends[2].send(0, frame(2, 4, kind=Kind.SHARD), 0)
    found = box.take_unless(key, lambda: False, 0.0)
    assert found is not None and found.sender == 2


def test_what_does_not_come_is_named() -> None:
    ends = in_process_channels(2)
    box = Mailbox(ends[0], ATTEMPT, capacity=9)
    sent(ends, FIRST)
    with pytest.raises(
        DeadlineError,
        match="rank 0: activation 7 from rank 1, boundary 1, microbatch 2 did not come "
        r"within 0\.05 s; 1 other frames wait",
    ):
        box.take(Key(Kind.ACTIVATION, 1, 7, 1, 0, 2), 0.05)
    assert len(box) == 1


def test_a_frame_that_comes_twice_is_refused() -> None:
    ends = in_process_channels(2)
    box = Mailbox(ends[0], ATTEMPT, capacity=9)
    sent(ends, FIRST)
    sent(ends, FIRST)
    with pytest.raises(UnexpectedFrameError, match="rank 0: push 0 from rank 1 came twice"):
        box.take(Key(Kind.PUSH, 1, 1, 0, 0, 0), 0.0)


def test_a_frame_of_another_attempt_is_refused() -> None:
    ends = in_process_channels(2)
    box = Mailbox(ends[0], ATTEMPT, capacity=9)
    sent(ends, FIRST, attempt=ATTEMPT - 1)
    with pytest.raises(UnexpectedFrameError, match="is of attempt 2; this is attempt 3"):
        box.take(FIRST, 0.0)


def test_no_more_frames_wait_than_have_room() -> None:
    ends = in_process_channels(2)
    box = Mailbox(ends[0], ATTEMPT, capacity=2)
    for step in range(3):
        sent(ends, Key(Kind.PUSH, 1, step, 0, 0, 0))
    with pytest.raises(UnexpectedFrameError, match="one too many: 2 wait already, first push 0"):
        box.take(Key(Kind.PUSH, 1, 9, 0, 0, 0), 0.0)
    assert len(box) == 2


def test_a_lost_rank_is_told_while_waiting() -> None:
    ends = in_process_channels(2)
    box = Mailbox(ends[0], ATTEMPT, capacity=2)
    ends[1].abandon()
    with pytest.raises(PeerLostError, match="rank 1"):
        box.take(FIRST, 1.0)
