"""A board served by one process: what it tells others, and where it listens."""

import socket

import psutil
import pytest

from dlrm_hybrid.comm.rendezvous import Endpoint, await_text, meet
from dlrm_hybrid.comm.store_board import StoreBoard, reach_board, serve_board
from dlrm_hybrid.types import (
    ConfigError,
    DeadlineError,
    DlrmError,
    PreemptedError,
    ResourceError,
    RunFailedError,
)

DEADLINE_SECONDS = 20.0


def goes_on() -> None:
    """Nothing ends the waiting."""


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as one:
        return one.getsockname()[1]


@pytest.fixture
def boards() -> tuple[StoreBoard, StoreBoard]:
    port = free_port()
    host = serve_board("127.0.0.1", port, "run/0", goes_on)
    return host, reach_board("127.0.0.1", port, "run/0", goes_on, DEADLINE_SECONDS)


def test_a_text_is_seen_by_the_others_and_never_replaced(
    boards: tuple[StoreBoard, StoreBoard],
) -> None:
    host, guest = boards
    assert guest.get("note") is None
    assert host.put("note", "first")
    assert not guest.put("note", "second")
    assert await_text(guest, "note", DEADLINE_SECONDS) == "first"


def test_ranks_meet_there(boards: tuple[StoreBoard, StoreBoard]) -> None:
    host, guest = boards
    endpoints = [Endpoint(f"tcp://10.0.0.{rank}:4000", f"{rank:032x}") for rank in range(2)]
    with pytest.raises(DeadlineError, match="did not come to the store at 127.0.0.1:"):
        meet(host, 0, 2, endpoints[0], 0.0)
    assert meet(guest, 1, 2, endpoints[1], DEADLINE_SECONDS) == tuple(endpoints)


def test_attempts_do_not_see_each_other(boards: tuple[StoreBoard, StoreBoard]) -> None:
    host, _ = boards
    host.put("note", "first")
    address, _, port = host.place.partition(":")
    again = reach_board(address, int(port), "run/1", goes_on, DEADLINE_SECONDS)
    assert again.get("note") is None
    host.for_all_attempts().put("folder", "runs/mine")
    assert again.for_all_attempts().get("folder") == "runs/mine"
    assert again.get("folder") is None


def test_a_failure_ends_the_waiting_of_all(boards: tuple[StoreBoard, StoreBoard]) -> None:
    host, guest = boards
    guest.fail(3, "worker-1 (rank 1): bad row")
    guest.fail(1, "another")
    with pytest.raises(RunFailedError, match=r"^worker-1 \(rank 1\): bad row$") as caught:
        await_text(host, "note", DEADLINE_SECONDS)
    assert caught.value.exit_code == 3


def test_a_signal_ends_the_waiting() -> None:
    def stopped() -> None:
        raise PreemptedError("stopped")

    board = serve_board("127.0.0.1", free_port(), "run/0", stopped)
    with pytest.raises(PreemptedError):
        await_text(board, "note", DEADLINE_SECONDS)


def test_the_store_listens_on_its_address_only() -> None:
    port = free_port()
    board = serve_board("localhost", port, "run/0", goes_on)
    listening = [
        one.laddr.ip
        for one in psutil.Process().net_connections()
        if one.status == psutil.CONN_LISTEN and one.laddr.port == port
    ]
    assert listening == ["127.0.0.1"]
    with pytest.raises(ResourceError, match=f"MASTER_PORT = {port}: rank 0 cannot listen there"):
        serve_board("127.0.0.1", port, "run/0", goes_on)
    assert board.get("note") is None
    with pytest.raises(ConfigError, match=r"MASTER_ADDR = 0\.0\.0\.0"):
        serve_board("0.0.0.0", free_port(), "run/0", goes_on)


def test_a_store_that_nobody_serves_is_told() -> None:
    with pytest.raises(DeadlineError, match=r"MASTER_PORT = \d+: no store there within 0\.2 s"):
        reach_board("127.0.0.1", free_port(), "run/0", goes_on, 0.2)


def test_a_store_that_is_gone_is_told() -> None:
    port = free_port()
    host = serve_board("127.0.0.1", port, "run/0", goes_on)
    guest = reach_board("127.0.0.1", port, "run/0", goes_on, DEADLINE_SECONDS)
    del host
    with pytest.raises(DlrmError, match=f"the store at 127.0.0.1:{port} does not answer"):
        guest.get("note")
