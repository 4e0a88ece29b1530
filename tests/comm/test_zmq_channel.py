"""Ranks over sockets: lost ranks, slow ranks, strangers and keys."""

import json
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import psutil
import pytest
import zmq
from channel_rows import ATTEMPT, KEYS, frame, open_zmq, options, run_ranks_as_threads
from patience import HANG_SECONDS
from zmq.utils.monitor import recv_monitor_message

from dlrm_hybrid.comm.channel import Channel
from dlrm_hybrid.comm.rendezvous import Endpoint, share_folder
from dlrm_hybrid.comm.zmq import sockets
from dlrm_hybrid.comm.zmq.channel import ZmqChannel, open_zmq_channel
from dlrm_hybrid.comm.zmq.curve import CurveKeys
from dlrm_hybrid.comm.zmq.sockets import Sockets
from dlrm_hybrid.types import ConfigError, DeadlineError, PeerLostError
from dlrm_hybrid.wire.dense import dense
from dlrm_hybrid.wire.frame import Kind as FrameKind
from dlrm_hybrid.wire.frame import encode


def opener(folder: Path, world_size: int, **changes: object) -> Callable[[int], Channel]:
    return lambda rank: open_zmq(folder, rank, world_size, **changes)


def published(folder: Path, rank: int) -> Endpoint:
    """Where a rank listens, as it has told the others."""
    return Endpoint(**json.loads(share_folder(folder).wait(f"{rank}.json", HANG_SECONDS)))


def test_close_names_a_rank_that_does_not_take_its_frames(tmp_path: Path) -> None:
    gave_up = threading.Event()

    def program(channel: Channel) -> None:
        if channel.rank == 0:
            channel.send(1, frame(0, 0), 0)
            with pytest.raises(DeadlineError, match=r"did not take all frames within 0\.2 s: 1$"):
                channel.close()
            gave_up.set()
        else:
            assert gave_up.wait(HANG_SECONDS)
            channel.abandon()

    run_ranks_as_threads(2, opener(tmp_path, 2, close_seconds=0.2), program)


def test_close_names_a_rank_that_is_lost(tmp_path: Path) -> None:
    met = threading.Barrier(2)

    def program(channel: Channel) -> None:
        met.wait(HANG_SECONDS)
        if channel.rank == 0:
            with pytest.raises(PeerLostError, match="rank 1 is gone"):
                channel.close()
        else:
            channel.abandon()

    run_ranks_as_threads(2, opener(tmp_path, 2), program)


def test_frames_that_nobody_can_take_are_refused(tmp_path: Path) -> None:
    gone = threading.Event()

    def program(channel: Channel) -> None:
        if channel.rank == 1:
            with pytest.raises(ValueError, match=f"attempt 9 is not {ATTEMPT}, the run's"):
                channel.send(0, frame(1, 0, attempt=9), 0)
            while not gone.is_set():
                with pytest.raises(DeadlineError):
                    channel.receive(0.01)
            with pytest.raises(PeerLostError, match="rank 0 is gone: it has said goodbye"):
                channel.send(0, frame(1, 0), 0)
        channel.close()
        gone.set()

    run_ranks_as_threads(2, opener(tmp_path, 2), program)


def test_a_message_that_is_too_long_names_what_makes_it_shorter(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sockets, "MAX_MESSAGE_BYTES", 500_000)

    def program(channel: Channel) -> None:
        if channel.rank == 0:
            told = r"^push 3 of rank 0 to rank 1: 800,\d{3} bytes, .* at most 500,000; needs .*"
            with pytest.raises(ConfigError, match=told + r"more parallel\.servers or"):
                channel.send(1, frame(0, 3, 200_000), 0)
            with pytest.raises(ConfigError, match=r"^rows 3 of .* more parallel\.table_servers$"):
                channel.send(1, frame(0, 3, 200_000, kind=FrameKind.ROWS), 0)
            with pytest.raises(ConfigError, match=r"^save 3 of .* at most 500,000$"):
                channel.send(1, frame(0, 3, 200_000, kind=FrameKind.SAVE), 0)
            channel.send(1, frame(0, 4, 100_000), 0)
        else:
            assert channel.receive(HANG_SECONDS).number == 4
        channel.close()

    run_ranks_as_threads(2, opener(tmp_path, 2), program)


def test_ranks_listen_on_loopback_only(tmp_path: Path) -> None:
    def program(channel: Channel) -> set[str]:
        mine = published(tmp_path, channel.rank).address
        port = int(mine.rpartition(":")[2])
        found = psutil.Process().net_connections("inet")
        channel.close()
        return {str(one.laddr.ip) for one in found if one.laddr.port == port}

    for addresses in run_ranks_as_threads(2, opener(tmp_path, 2), program):
        assert addresses == {"127.0.0.1"}


class Stranger:
    """A program with a DEALER of its own, connected to the port of rank 0."""

    def __init__(self, folder: Path, keys: CurveKeys | None = None, server: bytes = b"") -> None:
        rank_0 = published(folder, 0)
        self.token = bytes.fromhex(rank_0.token)
        self.port = int(rank_0.address.rpartition(":")[2])
        self.context = zmq.Context()
        self.socket = self.context.socket(zmq.DEALER)
        self.monitor = self.socket.get_monitor_socket()
        if keys is not None:
            self.socket.curve_serverkey = server
            self.socket.curve_publickey = keys.public
            self.socket.curve_secretkey = keys.secret
        self.socket.connect(rank_0.address)

    def __enter__(self) -> "Stranger":
        return self

    def __exit__(self, *_: object) -> None:
        self.context.destroy(linger=0)

    def hello(self, token: bytes | None = None, **changes: int) -> list[bytes]:
        values = np.frombuffer(self.token if token is None else token, np.uint8)
        one = replace(frame(1, 0, sections=(dense(0, values),)), **changes)
        return [b"HELLO", bytes(encode(one))]

    def refused(self) -> bool:
        """Wait until the handshake has failed."""
        until = time.monotonic() + HANG_SECONDS
        while time.monotonic() < until and self.monitor.poll(1000):
            event = zmq.Event(recv_monitor_message(self.monitor)["event"])
            if "HANDSHAKE_FAILED" in event.name:
                return True
            assert event is not zmq.Event.HANDSHAKE_SUCCEEDED
        return False


@pytest.fixture
def strangers(tmp_path: Path) -> Iterator[list[Stranger]]:
    made: list[Stranger] = []
    yield made
    for one in made:
        one.__exit__()


def foreign(stranger: Stranger) -> list[list[bytes]]:
    good = bytes(encode(frame(1, 0)))
    changed = bytearray(good)
    changed[20] ^= 1
    return [
        [b"GET / HTTP/1.0"],
        [good[:30]],
        [bytes(changed)],
        [good],  # without a greeting
        [b"GOODBYE", good],
        [b"", good],
        [b"HOWDY", good],
        [b"HELLO", good],  # without a token
        [b"HELLO", b"", b""],
        stranger.hello(token=bytes(16)),
        stranger.hello(attempt=ATTEMPT + 1),
        stranger.hello(sender=99),
        stranger.hello(sender=0),
        stranger.hello(),  # rank 1 has greeted before
    ]


@pytest.fixture
def open_door(monkeypatch: pytest.MonkeyPatch) -> None:
    """Strangers come in at any time, as where the kernel cannot keep them out."""
    monkeypatch.setattr(Sockets, "shut", lambda sockets: None)


def test_nobody_else_comes_in_once_all_ranks_are_there(tmp_path: Path) -> None:
    def program(channel: Channel) -> None:
        other = 1 - channel.rank
        address = published(tmp_path, other).address
        channel.send(other, frame(channel.rank, 1), 0)  # it has greeted, and shut its door
        channel.receive(HANG_SECONDS)
        with pytest.raises(TimeoutError):
            socket.create_connection(("127.0.0.1", int(address.rpartition(":")[2])), timeout=0.2)
        channel.send(other, frame(channel.rank, 2), 0)
        assert channel.receive(HANG_SECONDS).number == 2
        channel.close()

    run_ranks_as_threads(2, opener(tmp_path, 2), program)


def test_who_connects_and_says_nothing_is_cut_off(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sockets, "HANDSHAKE_SECONDS", 0.05)
    mine = sockets.listen("127.0.0.1", None, enclosed=False, silence_seconds=60.0)
    try:
        port = int(mine.address.rpartition(":")[2])
        with socket.create_connection(("127.0.0.1", port), timeout=HANG_SECONDS) as silent:
            while silent.recv(100):  # the greeting of ZeroMQ, then the end
                pass
    finally:
        mine.destroy(0.0)


@pytest.mark.usefixtures("open_door")
def test_messages_of_strangers_are_dropped_counted_and_told_once(
    tmp_path: Path, strangers: list[Stranger]
) -> None:
    told: list[str] = []
    sent = threading.Event()

    def program(channel: Channel) -> int:
        assert isinstance(channel, ZmqChannel)
        if channel.rank == 1:
            stranger = Stranger(tmp_path)
            strangers.append(stranger)
            messages = foreign(stranger)
            for message in messages:
                stranger.socket.send_multipart(message)
            with socket.create_connection(("127.0.0.1", stranger.port)) as raw:
                raw.sendall(b"GET / HTTP/1.0\r\n\r\n" + bytes(200))
            sent.set()
            channel.send(0, frame(1, 5), 0)
            assert channel.receive(HANG_SECONDS).number == 6
            channel.close()
            return len(messages)
        assert sent.wait(HANG_SECONDS)
        assert channel.receive(HANG_SECONDS).number == 5
        until = time.monotonic() + HANG_SECONDS
        many = len(foreign(strangers[0]))
        while channel.unknown_peers.foreign_messages < many and time.monotonic() < until:
            with pytest.raises(DeadlineError):
                channel.receive(0.05)
        channel.send(1, frame(0, 6), 0)
        channel.close()
        return channel.unknown_peers.foreign_messages

    def opened(index: int) -> Channel:
        return open_zmq(tmp_path, index, 2, told.append if index == 0 else errors.append)

    errors: list[str] = []
    counted, number = run_ranks_as_threads(2, opened, program)
    assert counted == number
    assert errors == []
    assert len(told) == 1
    assert told[0].startswith("rank 0: dropped a message from outside this run: not a frame: ")


@pytest.mark.usefixtures("open_door")
def test_no_frame_gets_in_without_the_keys_of_the_run(
    tmp_path: Path, strangers: list[Stranger]
) -> None:
    other = CurveKeys(*zmq.curve_keypair())
    told: list[str] = []

    def program(channel: Channel) -> None:
        assert isinstance(channel, ZmqChannel)
        if channel.rank == 0:
            until = time.monotonic() + HANG_SECONDS
            strangers_seen = channel.unknown_peers
            # Keys are looked at while it receives.
            while not strangers_seen.foreign_messages and time.monotonic() < until:
                with pytest.raises(DeadlineError):
                    channel.receive(0.02)
            channel.close()
            assert strangers_seen.foreign_messages == 1
            assert strangers_seen.refused_connections == 3
            return
        for keys, server in [(None, b""), (other, KEYS.public), (KEYS, other.public)]:
            stranger = Stranger(tmp_path, keys, server)
            strangers.append(stranger)
            stranger.socket.send_multipart([b"let me in"])
            assert stranger.refused()
        friend = Stranger(tmp_path, KEYS, KEYS.public)
        strangers.append(friend)
        friend.socket.send_multipart(friend.hello())
        channel.close()

    run_ranks_as_threads(
        2, lambda index: open_zmq(tmp_path, index, 2, told.append, keys=KEYS), program
    )
    assert told[0] == (
        "rank 0: refused a connection without this run's keys or with another "
        "protocol; further ones are only counted"
    )
    assert "rank 1 has said HELLO on another connection" in told[1]
    assert len(told) == 2


@pytest.mark.parametrize("keys", [None, CurveKeys(*zmq.curve_keypair())], ids=["none", "other"])
def test_ranks_with_different_keys_say_so(tmp_path: Path, keys: CurveKeys | None) -> None:
    said: list[str] = []

    def opened(index: int) -> Channel:
        with pytest.raises((ConfigError, PeerLostError)) as caught:
            open_zmq(tmp_path, index, 2, keys=KEYS if index == 0 else keys)
        said.append(str(caught.value))
        raise InterruptedError

    with pytest.raises(InterruptedError):
        run_ranks_as_threads(2, opened, lambda channel: None)
    assert len(said) == 2  # the second may see no more than that the first is gone
    assert any("all ranks need the same key file, or none" in text for text in said)


def test_a_rank_of_another_attempt_is_not_let_in(tmp_path: Path) -> None:
    told: list[str] = []

    def give_up(text: str) -> None:
        told.append(text)
        raise InterruptedError

    def opened(index: int) -> Channel:
        rendezvous = share_folder(tmp_path)
        # The second may see no more than that the first has given up.
        with pytest.raises((InterruptedError, PeerLostError)):
            open_zmq_channel(rendezvous, index, 2, ATTEMPT + index, options(), give_up)
        raise InterruptedError

    with pytest.raises(InterruptedError):
        run_ranks_as_threads(2, opened, lambda channel: None)
    assert any("it is of attempt" in text for text in told), told


def test_a_rank_that_does_not_greet_is_named(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        text = json.dumps(
            {"address": f"tcp://127.0.0.1:{silent.getsockname()[1]}", "token": "00" * 16}
        )
        assert share_folder(tmp_path).put("1.json", text)
        with pytest.raises(DeadlineError, match=r"did not greet within 0\.3 s: 1$"):
            open_zmq(tmp_path, 0, 2, start_seconds=0.3)


@pytest.mark.slow
def test_importing_starts_no_thread() -> None:
    """A context made before a fork would be of no use after it."""
    program = "import os, dlrm_hybrid.comm.zmq.channel; print(len(os.listdir('/proc/self/task')))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stdout == "1\n", done.stderr


def test_a_rank_that_does_not_listen_is_named(tmp_path: Path) -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        port = closed.getsockname()[1]
        text = json.dumps({"address": f"tcp://127.0.0.1:{port}", "token": "00" * 16})
        assert share_folder(tmp_path).put("1.json", text)
        with pytest.raises(PeerLostError, match=f"rank 1 is gone: tcp://127.0.0.1:{port} cannot"):
            open_zmq(tmp_path, 0, 2)


def test_an_open_address_needs_keys(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="network.bind: other machines can reach 10.0.0.1"):
        open_zmq(tmp_path, 0, 2, address="10.0.0.1")
