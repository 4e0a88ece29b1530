"""Whoever is no rank of the run is refused at every port, counted, and changes nothing."""

import json
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import psutil
import pytest
import zmq
from world_runs import Train, assert_same, pids, summary

from dlrm_hybrid.comm.curve import CurveKeys, make_key_file
from dlrm_hybrid.wire.dense import dense
from dlrm_hybrid.wire.frame import Frame, Kind, encode

STEPS = 200
WORLD = (
    *("parallel=hybrid", "parallel.trainers=1", "parallel.cuts=[bottom.1]"),
    *("train.batch_size=16", f"train.steps={STEPS}", "train.epochs=10", "telemetry.every=5"),
)
RANKS = 3
ADDRESS = "127.0.0.1"
DEADLINE_SECONDS = 60.0
POLL_SECONDS = 0.02


def frame(kind: Kind, sender: int, **changes: int) -> bytes:
    """Well formed, as a rank would send it, but for the token, which is made up."""
    numbers = {"attempt": 0, "step": 5, "boundary": 0, "microbatch": 0, **changes}
    values = dense(0, np.arange(16, dtype=np.uint8))
    return bytes(encode(Frame(kind=kind, sender=sender, sections=(values,), **numbers)))


MESSAGES = [
    [b"\0" * 40],
    [frame(Kind.PUSH, 0)],
    [b"HELLO", frame(Kind.CONTROL, 0)],
    [b"HELLO", frame(Kind.CONTROL, 1)],
    [b"HELLO", frame(Kind.CONTROL, 2)],
    [b"HELLO", frame(Kind.CONTROL, 7, attempt=3)],
    [b"GOODBYE", frame(Kind.CONTROL, 0)],
]


def ports(folder: Path) -> list[int]:
    """On which the ranks of a run listen, one for each, once it trains."""
    until = time.monotonic() + DEADLINE_SECONDS
    record = folder / "events.jsonl"
    while not (record.exists() and '"kind": "progress"' in record.read_text()):
        assert time.monotonic() < until, "training did not begin"
        time.sleep(POLL_SECONDS)
    found = [
        connection.laddr
        for pid in pids(folder).values()
        for connection in psutil.Process(pid).net_connections("inet")
        if connection.status == psutil.CONN_LISTEN
    ]
    assert {where.ip for where in found} == {ADDRESS}
    assert len(found) == RANKS
    return [where.port for where in found]


def speak(port: int, keys: CurveKeys | None, server: bytes) -> None:
    """Send all messages over a socket of ZeroMQ, and junk over a bare one."""
    with zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
        dealer.linger = 0 if server else 1000 * int(DEADLINE_SECONDS)
        if keys is not None:
            dealer.curve_serverkey = server
            dealer.curve_publickey = keys.public
            dealer.curve_secretkey = keys.secret
        dealer.reconnect_ivl = 1000 * int(DEADLINE_SECONDS)
        monitor = dealer.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        dealer.connect(f"tcp://{ADDRESS}:{port}")
        for message in MESSAGES:
            dealer.send_multipart(message)
        if server:
            assert monitor.poll(1000 * DEADLINE_SECONDS), "it was let in"
        dealer.disable_monitor()
    with socket.create_connection((ADDRESS, port)) as bare:
        bare.sendall(b"GET / HTTP/1.0\r\n\r\n" + bytes(200))


def visited(folder: Path, visit: Callable[[int], None]) -> threading.Thread:
    """A thread, started, that comes to each port of a run."""
    thread = threading.Thread(target=lambda: [visit(port) for port in ports(folder)])
    thread.start()
    return thread


def test_a_run_goes_on_unharmed_among_strangers(train: Train, tmp_path: Path) -> None:
    stranger = visited(tmp_path / "visited", lambda port: speak(port, None, b""))
    code, folder = train("visited", *WORLD)
    stranger.join()
    assert code == 0
    network = summary(folder)["network"]
    assert network["foreign_messages"] == RANKS * len(MESSAGES)
    for name in ("worker-0.0", "worker-0.1", "server-0"):
        log = (folder / "log" / f"{name}.log").read_text()
        assert log.count("dropped a message that is not of this run: ") == 1, name
    code, unbroken = train("unbroken", *WORLD, "parallel.world=in_process")
    assert code == 0
    assert_same(folder, unbroken, STEPS)


@pytest.mark.slow
def test_nobody_comes_in_with_other_keys(train: Train, tmp_path: Path) -> None:
    keys = make_key_file(tmp_path / "keys.json")
    other = CurveKeys(*zmq.curve_keypair())
    guarded = (f"network.bind={ADDRESS}", f"network.keys={tmp_path / 'keys.json'}")
    stranger = visited(tmp_path / "visited", lambda port: speak(port, other, keys.public))
    code, folder = train("visited", *WORLD, *guarded)
    stranger.join()
    assert code == 0
    network = summary(folder)["network"]
    assert (network["foreign_messages"], network["refused_connections"]) == (0, RANKS)
    for path in (folder / "log").glob("*.log"):
        assert path.read_text().count("refused a connection that has not the keys") == 1, path
    secret = json.loads((tmp_path / "keys.json").read_text())["secret"]
    for path in folder.rglob("*"):
        assert path.is_dir() or secret.encode() not in path.read_bytes(), path
    code, unbroken = train("unbroken", *WORLD, "parallel.world=in_process")
    assert code == 0
    assert_same(folder, unbroken, STEPS)
