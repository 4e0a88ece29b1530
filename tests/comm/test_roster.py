"""Who is let in, what is counted, and when a rank may leave."""

import pytest
from channel_rows import ATTEMPT, frame
from hypothesis import given
from hypothesis import strategies as st
from mutated_bytes import mutated_frames

from dlrm_hybrid.comm.zmq.roster import BrokenError, ForeignError, MessagePart, Peer, Roster, Word
from dlrm_hybrid.wire.frame import Kind, encode

TOKENS = ["00" * 16, "11" * 16, "22" * 16]
CONNECTION = b"\0abcd"


def roster(rank: int) -> Roster:
    others = {0, 1, 2} - {rank}
    return Roster(rank, ATTEMPT, TOKENS[rank], {other: Peer(other) for other in others})


def met(rank: int, other: int) -> tuple[Roster, Roster]:
    """Two rosters, after the second has greeted the first."""
    one, two = roster(rank), roster(other)
    word, peer, _ = one.read(CONNECTION, two.hello(TOKENS[rank]))
    assert (word, peer.rank, peer.greeted, peer.taken) == (Word.HELLO, other, True, 0)
    return one, two


@given(st.lists(st.binary(max_size=80), max_size=4))
def test_random_messages_are_foreign(parts: list[MessagePart]) -> None:
    one = roster(0)
    with pytest.raises(ForeignError):
        one.read(CONNECTION, parts)
    assert one == Roster(0, ATTEMPT, TOKENS[0], {1: Peer(1), 2: Peer(2)})


@given(mutated_frames(), st.sampled_from([None, b"HELLO", b"GOODBYE", b"TAKEN", b"", b"HOWDY"]))
def test_mutants_of_frames_are_foreign(case: tuple[bytes, bytes, bool], word: bytes | None) -> None:
    one = roster(0)
    mutant, _, _ = case
    with pytest.raises(ForeignError):
        one.read(CONNECTION, [mutant] if word is None else [word, mutant])
    assert one == Roster(0, ATTEMPT, TOKENS[0], {1: Peer(1), 2: Peer(2)})


@given(st.lists(st.binary(max_size=80), max_size=4))
def test_random_messages_of_a_rank_are_an_error(parts: list[MessagePart]) -> None:
    one, _ = met(0, 1)
    with pytest.raises(BrokenError, match="rank 0: rank 1 sent a broken message: "):
        one.read(CONNECTION, parts)
    with pytest.raises(BrokenError, match="rank 0: rank 1 sent a broken message: "):
        one.answered(one.peers[1], parts)
    assert one.peers[1] == Peer(1, greeted=True)


def test_frames_are_counted() -> None:
    one, two = met(0, 1)
    for step in range(3):
        word, peer, got = one.read(CONNECTION, [encode(frame(1, step, kind=Kind.HELLO))])
        assert (word, peer.rank, got.number, peer.taken) == (Word.FRAME, 1, step, step + 1)
    assert one.read(CONNECTION, two.goodbye(two.peers[0]))[0] is Word.GOODBYE
    assert (one.peers[1].taken, two.peers[0].sent) == (4, 1)


@pytest.mark.parametrize(
    ("parts", "reason"),
    [
        ([encode(frame(2, 0))], "calls itself rank 2"),
        ([encode(frame(1, 0, attempt=4))], "is of attempt 4; this is attempt 3"),
        (roster(1).hello(TOKENS[0]), "says HELLO when nobody can"),
        (roster(1).answer(Peer(0)), "says TAKEN when nobody can"),
    ],
)
def test_a_rank_that_says_what_it_cannot_is_an_error(parts: list[MessagePart], reason: str) -> None:
    one, _ = met(0, 1)
    with pytest.raises(BrokenError, match=reason):
        one.read(CONNECTION, parts)


def test_a_rank_is_settled_when_all_that_was_counted_has_come() -> None:
    one, two = met(0, 1)
    peer = one.peers[1]
    two.peers[0].sent = 2
    one.answered(peer, two.answer(two.peers[0]))
    assert peer.to_come == 2
    for step in range(2):
        assert not peer.settled
        one.read(CONNECTION, [encode(frame(1, step))])
    assert peer.settled


def test_a_goodbye_on_its_way_is_waited_for() -> None:
    one, two = met(0, 1)
    peer = one.peers[1]
    goodbye = two.goodbye(two.peers[0])
    one.answered(peer, two.answer(two.peers[0]))
    assert not peer.settled
    one.read(CONNECTION, goodbye)
    assert peer.settled


def test_a_token_is_not_printed() -> None:
    assert TOKENS[1] not in repr(roster(1))
