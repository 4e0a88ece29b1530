import os
import select
import socket
from collections.abc import Callable
from contextlib import closing
from multiprocessing.pool import ThreadPool

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from patience import HANG_SECONDS

from dlrm_hybrid.comm.mesh import Listener, Mesh
from dlrm_hybrid.comm.rendezvous import Endpoint, go_on
from dlrm_hybrid.types import PeerLostError

LARGE = 8 << 20  # more than the kernel holds between two sockets


def meshes(size: int) -> list[Mesh]:
    listeners = [Listener("127.0.0.1") for _ in range(size)]
    endpoints = [listener.endpoint for listener in listeners]
    with ThreadPool(size) as pool:
        made = pool.starmap(
            lambda place, listener: listener.connect(place, endpoints, HANG_SECONDS, go_on),
            enumerate(listeners),
        )
    for listener in listeners:
        listener.close()
    return made


def together(work: Callable[[Mesh], object], members: list[Mesh]) -> list:
    with ThreadPool(len(members)) as pool:
        return pool.map(work, members)


def pattern(sender: int, to: int, size: int) -> bytes:
    return bytes([(7 * sender + 3 * to + 1) % 256]) * size


def exchanged(mesh: Mesh, sizes_TT: list[list[int]]) -> list[bytes]:
    outgoing = [pattern(mesh.place, to, n) for to, n in enumerate(sizes_TT[mesh.place])]
    incoming = [bytearray(sizes_T[mesh.place]) for sizes_T in sizes_TT]
    incoming[mesh.place] = bytearray()
    mesh.finish(mesh.begin(outgoing, incoming))
    return [bytes(part) for part in incoming]


SIZES = st.lists(st.sampled_from([0, 1, 5, 70_000]), min_size=9, max_size=9)


@settings(max_examples=25)
@given(st.lists(SIZES, min_size=1, max_size=3))
def test_bytes_of_any_number_arrive_in_the_order_of_exchanges(drawn: list[list[int]]) -> None:
    members = meshes(3)
    for flat in drawn:
        sizes_TT = [flat[:3], flat[3:6], flat[6:]]
        received_T = together(lambda mesh, sizes=sizes_TT: exchanged(mesh, sizes), members)
        for me, received in enumerate(received_T):
            for sender, part in enumerate(received):
                size = 0 if sender == me else sizes_TT[sender][me]
                assert part == pattern(sender, me, size)
    for mesh in members:
        mesh.close()


def test_several_exchanges_may_be_under_way() -> None:
    members = meshes(2)

    def work(mesh: Mesh) -> list[bytes]:
        peer = 1 - mesh.place
        rooms = [[bytearray(LARGE)] * 2, [bytearray(3)] * 2]
        sent = [[bytes([mesh.place]) * LARGE] * 2, [bytes([peer]) * 3] * 2]
        first, second = map(mesh.begin, sent, rooms)
        mesh.finish(second)
        mesh.finish(first)
        return [bytes(room[peer]) for room in rooms]

    for mesh, received in zip(members, together(work, members), strict=True):
        peer = 1 - mesh.place
        assert received == [bytes([peer]) * LARGE, bytes([mesh.place]) * 3]
        mesh.close()


def test_who_waits_for_much_is_woken_up_once_it_has_come() -> None:
    near, far = meshes(2)
    waiting, sending = near._connections[1], far._connections[0].socket
    waiting.incoming.append(memoryview(bytearray(1000)))
    poll = select.poll()
    waiting.register(poll)
    sending.sendall(bytes(999))
    while len(waiting.socket.recv(1000, socket.MSG_PEEK)) < 999:
        pass
    assert not poll.poll(0)
    sending.sendall(b"x")
    assert poll.poll(1000 * HANG_SECONDS)
    waiting.go_on()
    assert waiting.received == 1
    near.close()
    far.close()


def test_strangers_are_turned_away_and_nothing_listens_afterwards() -> None:
    listeners = [Listener("127.0.0.1") for _ in range(2)]
    endpoints = [listener.endpoint for listener in listeners]
    host, port = endpoints[0].address.removeprefix("tcp://").split(":")
    silent = socket.create_connection((host, int(port)))
    for greeting in (os.urandom(20), bytes.fromhex(endpoints[0].token) + b"\x09\0\0\0"):
        with socket.create_connection((host, int(port))) as stranger:
            stranger.sendall(greeting)
    with ThreadPool(2) as pool:
        near, far = pool.starmap(
            lambda place, listener: listener.connect(place, endpoints, HANG_SECONDS, go_on),
            enumerate(listeners),
        )
    assert together(lambda mesh: exchanged(mesh, [[0, 4], [4, 0]]), [near, far])
    for listener in listeners:
        listener.close()
    with pytest.raises(OSError, match="refused"):
        socket.create_connection((host, int(port)))
    for closed in (near, far, silent):
        closed.close()


def test_a_member_that_has_ended_and_one_that_is_late_are_told_apart() -> None:
    near, far = meshes(2)
    near._deadline_seconds = 0.1
    number = near.begin([b"", b"x"], [b"", bytearray(1)])
    with pytest.raises(TimeoutError):
        near.finish(number)
    far.close()
    with pytest.raises(ConnectionError):
        near.finish(number)
    near.close()


def test_members_that_do_not_connect_are_waited_for_no_longer_than_told() -> None:
    with closing(Listener("127.0.0.1")) as listener, pytest.raises(TimeoutError):
        listener.connect(0, [listener.endpoint] * 2, 0.05, go_on)


@pytest.mark.parametrize("place", [0, 1])
def test_who_waits_for_a_member_that_is_lost_gives_up(place: int) -> None:
    """Whether the others connect to it or it to one that no longer takes connections."""
    lost = socket.create_server(("127.0.0.1", 0), backlog=0)
    full = socket.create_connection(lost.getsockname())
    endpoint = Endpoint("tcp://127.0.0.1:{1}".format(*lost.getsockname()), "0" * 32)

    def check() -> None:
        raise PeerLostError(1 - place, "it has ended")

    with closing(Listener("127.0.0.1")) as listener, pytest.raises(PeerLostError):
        endpoints = [endpoint, listener.endpoint][:: 1 if place else -1]
        listener.connect(place, endpoints, HANG_SECONDS, check)
    full.close()
    lost.close()
