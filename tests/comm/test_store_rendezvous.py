"""A store served by one process: what it tells others, and where it listens."""

from dataclasses import replace

import psutil
import pytest
from free_ports import free_port
from patience import HANG_SECONDS

from dlrm_hybrid.comm.rendezvous import Endpoint, Rendezvous, reach_store, serve_store
from dlrm_hybrid.types import (
    ConfigError,
    DeadlineError,
    DlrmError,
    PreemptedError,
    ResourceError,
    RunFailedError,
)


@pytest.fixture
def both() -> tuple[Rendezvous, Rendezvous]:
    port = free_port()
    host = serve_store("127.0.0.1", port, "run/0")
    return host, reach_store("127.0.0.1", port, "run/0", HANG_SECONDS)


def test_a_text_is_seen_by_the_others_and_never_replaced(
    both: tuple[Rendezvous, Rendezvous],
) -> None:
    host, guest = both
    assert guest.read("note") is None
    assert host.put("note", "first")
    assert not guest.put("note", "second")
    assert guest.wait("note", HANG_SECONDS) == "first"


def test_ranks_meet_there(both: tuple[Rendezvous, Rendezvous]) -> None:
    host, guest = both
    endpoints = [Endpoint(f"tcp://10.0.0.{rank}:4000", f"{rank:032x}") for rank in range(2)]
    with pytest.raises(DeadlineError, match="did not come to the store at 127.0.0.1:"):
        host.join(0, {0: 0, 1: 0}, endpoints[0], 0.0)
    found = guest.join(1, {0: 0, 1: 0}, endpoints[1], HANG_SECONDS)
    assert found == dict(enumerate(endpoints))


def test_attempts_do_not_see_each_other(both: tuple[Rendezvous, Rendezvous]) -> None:
    host, _ = both
    host.put("note", "first")
    address, _, port = host.place.removeprefix("the store at ").partition(":")
    again = reach_store(address, int(port), "run/1", HANG_SECONDS)
    assert again.read("note") is None
    host.for_all_attempts().put("folder", "runs/mine")
    assert again.for_all_attempts().read("folder") == "runs/mine"
    assert again.read("folder") is None


def test_a_failure_ends_the_waiting_of_all(both: tuple[Rendezvous, Rendezvous]) -> None:
    host, guest = both
    guest.fail(3, "worker-1 (rank 1): bad row")
    guest.fail(1, "another")
    with pytest.raises(RunFailedError, match=r"^worker-1 \(rank 1\): bad row$") as caught:
        host.wait("note", HANG_SECONDS)
    assert caught.value.exit_code == 3


def test_a_signal_ends_the_waiting() -> None:
    def stopped() -> None:
        raise PreemptedError("stopped")

    rendezvous = replace(serve_store("127.0.0.1", free_port(), "run/0"), check=stopped)
    with pytest.raises(PreemptedError):
        rendezvous.wait("note", HANG_SECONDS)


def test_the_store_listens_on_its_address_only() -> None:
    port = free_port()
    rendezvous = serve_store("localhost", port, "run/0")
    listening = [
        one.laddr.ip
        for one in psutil.Process().net_connections()
        if one.status == psutil.CONN_LISTEN and one.laddr.port == port
    ]
    assert listening == ["127.0.0.1"]
    with pytest.raises(ResourceError, match=f"MASTER_PORT = {port}: rank 0 cannot listen there"):
        serve_store("127.0.0.1", port, "run/0")
    assert rendezvous.read("note") is None
    with pytest.raises(ConfigError, match=r"MASTER_ADDR = 0\.0\.0\.0"):
        serve_store("0.0.0.0", free_port(), "run/0")


def test_a_store_that_nobody_serves_is_told() -> None:
    with pytest.raises(DeadlineError, match=r"MASTER_PORT = \d+: no store there within 0\.2 s"):
        reach_store("127.0.0.1", free_port(), "run/0", 0.2)


def test_a_store_that_is_gone_is_told() -> None:
    port = free_port()
    host = serve_store("127.0.0.1", port, "run/0")
    guest = reach_store("127.0.0.1", port, "run/0", HANG_SECONDS)
    del host
    with pytest.raises(DlrmError, match=f"the store at 127.0.0.1:{port} does not answer"):
        guest.read("note")
