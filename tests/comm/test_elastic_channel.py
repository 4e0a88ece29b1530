"""Ranks that may be lost and come again, over sockets: two servers, two trainers of one worker."""

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from channel_rows import ATTEMPT, KEYS, frame, options
from patience import HANG_SECONDS

from dlrm_hybrid.comm.rendezvous import share_folder
from dlrm_hybrid.comm.zmq.channel import Membership, ZmqChannel, open_zmq_channel
from dlrm_hybrid.comm.zmq.curve import CurveKeys
from dlrm_hybrid.comm.zmq.sockets import Sockets
from dlrm_hybrid.types import DeadlineError, PeerLostError
from dlrm_hybrid.wire.frame import Frame, Kind

WORLD, MORTAL, OTHER, SERVER = 4, 0, 1, 2
WORKERS = frozenset({MORTAL, OTHER})
Opener = Callable[..., ZmqChannel]


def membership(rank: int, incarnation: int = 0) -> Membership:
    if rank not in WORKERS:
        return Membership(mortal=WORKERS, may_return=True)
    own = frozenset({rank})
    return Membership(mortal=WORKERS - own, mates=own, incarnation=incarnation)


@pytest.fixture
def told() -> list[str]:
    return []


@pytest.fixture(params=[None, KEYS], ids=["plain", "curve"])
def opener(request: pytest.FixtureRequest, tmp_path: Path, told: list[str]) -> Iterator[Opener]:
    keys: CurveKeys | None = request.param
    opened: list[ZmqChannel] = []

    def open_one(rank: int, incarnation: int = 0) -> ZmqChannel:
        channel = open_zmq_channel(
            share_folder(tmp_path),
            rank,
            WORLD,
            ATTEMPT,
            options(keys=keys),
            told.append,
            membership(rank, incarnation),
        )
        opened.append(channel)
        return channel

    yield open_one
    for channel in opened:
        channel.abandon()


def together(*calls: Callable[[], object]) -> list[object]:
    """What calls return that wait for each other."""
    results: list[object] = [None] * len(calls)
    errors: list[BaseException] = []

    def run(number: int) -> None:
        try:
            results[number] = calls[number]()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(number,)) for number in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(HANG_SECONDS)
        assert not thread.is_alive()
    if errors:
        raise errors[0]
    return results


def world(opener: Opener) -> list[ZmqChannel]:
    return together(*(lambda rank=rank: opener(rank) for rank in range(WORLD)))  # pyright: ignore


def seen(channel: ZmqChannel) -> tuple[Kind, int, int]:
    one = channel.receive(HANG_SECONDS)
    return one.kind, one.sender, one.number


def come_again(opener: Opener, incarnation: int, servers: list[ZmqChannel]) -> ZmqChannel:
    """The mortal rank anew, while the servers listen; it sends each its incarnation."""

    def start() -> ZmqChannel:
        channel = opener(MORTAL, incarnation)
        for server in servers:
            channel.send(server.rank, frame(MORTAL, 100 + incarnation), 0)
        return channel

    def listen(server: ZmqChannel) -> None:
        assert seen(server) == (Kind.PUSH, MORTAL, 100 + incarnation)

    channel, *_ = together(start, *(lambda one=one: listen(one) for one in servers))
    assert isinstance(channel, ZmqChannel)
    return channel


def test_servers_go_on_without_a_rank_and_meet_it_again(opener: Opener, told: list[str]) -> None:
    mortal, other, *servers = world(opener)
    for incarnation in range(3):
        for server in servers:
            mortal.send(server.rank, frame(MORTAL, incarnation), 0)
            assert seen(server) == (Kind.PUSH, MORTAL, incarnation)
        mortal.abandon()
        for server in servers:
            assert seen(server) == (Kind.LEFT, MORTAL, incarnation)
            server.send(MORTAL, frame(server.rank, 7), 0)  # dropped
            other.send(server.rank, frame(OTHER, incarnation), 0)
            assert seen(server) == (Kind.PUSH, OTHER, incarnation)
        mortal = come_again(opener, incarnation + 1, servers)
        for server in servers:
            server.send(MORTAL, frame(server.rank, 8), 0)
            assert seen(mortal) == (Kind.PUSH, server.rank, 8)
    with pytest.raises(DeadlineError):
        other.receive(0.0)  # it has heard of nothing
    with pytest.raises(PeerLostError, match="rank 0 is gone"):
        other.send(MORTAL, frame(OTHER, 1), 0)
    together(*(one.close for one in (mortal, other, *servers)))
    assert told == [] and all(one.unknown_peers.foreign_messages == 0 for one in servers)


def test_a_rank_says_goodbye_and_comes_again(opener: Opener) -> None:
    mortal, other, *servers = world(opener)
    for incarnation in range(2):
        for server in servers:
            mortal.send(server.rank, frame(MORTAL, incarnation), 0)

        def listen(server: ZmqChannel, incarnation: int = incarnation) -> None:
            assert seen(server) == (Kind.PUSH, MORTAL, incarnation)
            left = server.receive(HANG_SECONDS)
            assert (left.kind, left.sender, left.number) == (Kind.LEFT, MORTAL, incarnation)
            assert left.round == 1
            server.send(MORTAL, frame(server.rank, 7), 0)  # dropped

        # The other worker computes: nobody waits for it.
        together(mortal.close, *(lambda one=one: listen(one) for one in servers))
        mortal = come_again(opener, incarnation + 1, servers)
    with pytest.raises(DeadlineError):
        other.receive(0.0)  # it has heard of nothing
    together(*(one.close for one in (mortal, other, *servers)))


def test_what_is_sent_to_a_rank_that_is_gone_never_reaches_the_next(opener: Opener) -> None:
    """The server answers frames of the dead incarnation when the next has greeted it already."""
    mortal, other, server, second = world(opener)
    mortal.send(SERVER, frame(MORTAL, 1), 0)
    mortal.send(SERVER, frame(MORTAL, 2), 0)
    assert seen(server) == (Kind.PUSH, MORTAL, 1)  # the second one may be in its queue
    mortal.abandon()
    again = threading.Thread(target=lambda: kept.append(opener(MORTAL, 1)))
    kept: list[ZmqChannel] = []
    again.start()
    until = time.monotonic() + HANG_SECONDS
    while not any(not isinstance(one, Frame) for one in server._arrived):
        assert time.monotonic() < until
        server._until(lambda: False, 0.01)
    heard: list[tuple[Kind, int, int]] = []
    while not heard or heard[-1][0] is not Kind.LEFT:
        heard.append(seen(server))
        server.send(MORTAL, frame(SERVER, heard[-1][2]), 0)
    assert heard[-1] == (Kind.LEFT, MORTAL, 0)
    assert seen(second) == (Kind.LEFT, MORTAL, 0)

    def listen(one: ZmqChannel) -> None:
        while again.is_alive():
            with pytest.raises(DeadlineError):
                one.receive(0.02)

    together(lambda: listen(server), lambda: listen(second))
    server.send(MORTAL, frame(SERVER, 50), 0)
    assert seen(kept[0]) == (Kind.PUSH, SERVER, 50)
    together(*(one.close for one in (kept[0], other, server, second)))


def test_a_server_that_is_lost_ends_all(opener: Opener) -> None:
    mortal, other, server, second = world(opener)
    server.abandon()
    for one in (mortal, other, second):
        with pytest.raises(PeerLostError, match="rank 2 is gone"):
            one.receive(HANG_SECONDS)


def test_goodbyes_do_not_wait_for_a_rank_that_is_gone(opener: Opener) -> None:
    mortal, other, *servers = world(opener)
    closing = [threading.Thread(target=one.close) for one in (other, *servers)]
    for thread in closing:
        thread.start()
    mortal.abandon()  # each of them waits for its answer
    for thread in closing:
        thread.join(HANG_SECONDS)
        assert not thread.is_alive()


def test_the_door_is_open_only_while_a_rank_is_missing(
    opener: Opener, monkeypatch: pytest.MonkeyPatch
) -> None:
    doors: list[tuple[str, str]] = []
    shut, unshut = Sockets.shut, Sockets.unshut

    def noted(name: str, act: Callable[[Sockets], None]) -> Callable[[Sockets], None]:
        return lambda one: (doors.append((name, one.address)), act(one))[1]

    monkeypatch.setattr(Sockets, "shut", noted("shut", shut))
    monkeypatch.setattr(Sockets, "unshut", noted("open", unshut))
    mortal, other, *servers = world(opener)
    assert sorted(name for name, _ in doors) == ["shut"] * WORLD
    doors.clear()
    mortal.abandon()
    for server in servers:
        assert seen(server)[0] is Kind.LEFT
    assert [name for name, _ in doors] == ["open"] * len(servers)
    with pytest.raises(DeadlineError):
        other.receive(0.0)
    doors.clear()
    come_again(opener, 1, servers)
    assert sorted(doors) == sorted(
        [("shut", server._sockets.address) for server in servers]
        + [one for one in doors if one[1] not in {each._sockets.address for each in servers}]
    )
    assert len(doors) == len(servers) + 1
