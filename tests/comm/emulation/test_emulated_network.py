"""A real network of namespaces: how fast it is, and what is left of it."""

import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from emulation_hosts import (
    family,
    has_netem,
    inside,
    links,
    needs_namespaces,
    network_namespaces,
    shaped_bytes,
    transfer_seconds,
)
from patience import HANG_SECONDS

from dlrm_hybrid.comm.netem import namespaces
from dlrm_hybrid.comm.netem.namespaces import find_tool
from dlrm_hybrid.comm.netem.network import EmulatedNetwork, open_network
from dlrm_hybrid.comm.netem.plan import Method, NetworkPlan
from dlrm_hybrid.types import ExitCode, ResourceError, RunFailedError

pytestmark = needs_namespaces

RATE = 50_000_000
NUM_BYTES = 500_000
LINE_SECONDS = 8 * NUM_BYTES / RATE
LEAST = 0.95  # of the line's time; how much more it takes depends on the machine
HEADERS = 1.1  # times the bytes, at most, with all headers and what acknowledges them

in_user_space = pytest.mark.skipif(has_netem(), reason="this kernel delays packets itself")


def plan(latency_seconds: float | None = None) -> NetworkPlan:
    return NetworkPlan(hosts=3, rate_bits_per_second=RATE, latency_seconds=latency_seconds)


@pytest.fixture(scope="module")
def network() -> Iterator[EmulatedNetwork]:
    with open_network(plan()) as network:
        yield network


def test_an_echo_takes_the_time_of_the_line(network: EmulatedNetwork) -> None:
    assert network.echo_share >= 0.9


@pytest.mark.parametrize(
    ("ways", "lines"),
    [
        ([(0, 1)], 1),
        ([(0, 1), (1, 0)], 1),
        ([(0, 1), (1, 2), (2, 0)], 1),
        ([(1, 0), (2, 0)], 2),
        ([(0, 1), (0, 2)], 2),
    ],
    ids=["one way", "both ways", "a ring", "into one host", "out of one host"],
)
def test_each_direction_of_each_link_has_the_rate(
    ways: list[tuple[int, int]], lines: int, network: EmulatedNetwork
) -> None:
    before = shaped_bytes(network)
    assert transfer_seconds(network, ways, NUM_BYTES) >= LEAST * lines * LINE_SECONDS
    passed = [now - then for then, now in zip(before, shaped_bytes(network), strict=True)]
    # No bucket has more to pass than the busiest way of a host, so nothing takes more lines.
    assert lines * NUM_BYTES <= max(passed) <= HEADERS * lines * NUM_BYTES


def test_a_host_has_its_own_interfaces_only(network: EmulatedNetwork) -> None:
    found: list[str] = []
    text = Path("/proc/thread-self/net/dev")
    inside(network, 2, lambda: found.append(text.read_text())).join()
    names = [line.split(":")[0].strip() for line in found[0].splitlines()[2:]]
    # A kernel may put fallback devices of its tunnels into every namespace.
    assert {"lo", "eth0"} <= set(names)
    assert not any(name.startswith(("port", "bridge")) for name in names)


def test_nothing_is_left_and_the_machines_own_links_are_untouched() -> None:
    links_before, before = links(), network_namespaces(family(os.getpid()))
    with open_network(plan()):
        assert len(network_namespaces(family(os.getpid())) - before) == 1 + 3
        assert links() == links_before
    until = time.monotonic() + HANG_SECONDS
    while network_namespaces(family(os.getpid())) - before and time.monotonic() < until:
        time.sleep(0.01)
    assert network_namespaces(family(os.getpid())) <= before
    assert links() == links_before


def test_an_error_inside_lets_it_go() -> None:
    paths: list[str] = []
    with suppress(KeyError), open_network(plan()) as network:
        paths += [path for host in network.namespaces for path in host]
        raise KeyError
    assert paths
    assert not any(Path(path).exists() for path in paths)


@pytest.mark.parametrize("latency_seconds", [0.001, 0.02])
def test_a_latency_is_added_on_each_way(latency_seconds: float) -> None:
    with open_network(plan(latency_seconds)) as delayed:
        assert delayed.method is (Method.NETEM if has_netem() else Method.USER_SPACE)
        assert delayed.round_trip_seconds >= 2 * latency_seconds


@in_user_space
@pytest.mark.parametrize(
    ("ways", "lines"), [([(0, 1)], 1), ([(0, 1), (1, 2), (2, 0)], 1), ([(1, 0), (2, 0)], 2)]
)
def test_delayed_links_have_the_rate(ways: list[tuple[int, int]], lines: int) -> None:
    with open_network(plan(latency_seconds=0.001)) as delayed:
        seconds = transfer_seconds(delayed, ways, NUM_BYTES)
        figures = delayed.relay_figures()
    assert seconds >= LEAST * lines * LINE_SECONDS
    assert figures is not None
    sent_bytes = len(ways) * NUM_BYTES
    assert sent_bytes < figures.bytes
    assert 0 < figures.packets < figures.bytes / 66  # how many frames pass in one piece is chance
    assert figures.cpu_seconds > 0


@in_user_space
def test_a_delay_of_too_many_bytes_is_refused() -> None:
    much = NetworkPlan(hosts=2, rate_bits_per_second=10**11, latency_seconds=10)
    message = r"network.latency: .* no netem, and 10 s of 2 links .* at most 1,000,000,000"
    with pytest.raises(ResourceError, match=message), open_network(much):
        pass


@in_user_space
@pytest.mark.skipif(
    os.geteuid() != 0 or shutil.which("setpriv") is None, reason="gives up a right of root"
)
def test_without_root_a_delay_in_user_space_is_refused() -> None:
    program = (
        "from dlrm_hybrid.comm.netem.network import open_network as o\n"
        "from dlrm_hybrid.comm.netem.plan import NetworkPlan as P\n"
        "o(P(hosts=2, rate_bits_per_second=10**8, latency_seconds=0.001)).__enter__()"
    )
    prefix = ["setpriv", "--bounding-set=-sys_admin"]
    done = subprocess.run([*prefix, sys.executable, "-c", program], capture_output=True, text=True)
    if "no permission to create network namespaces" in done.stderr:
        pytest.skip("this system has no user namespaces")
    assert "needs packet sockets and root (Operation not permitted)" in done.stderr


def test_it_says_that_the_process_that_held_it_was_killed() -> None:
    message = r"ended before the run \(exit code -9\): a rank is lost"
    with (
        pytest.raises(ResourceError, match=message),
        open_network(plan(latency_seconds=0.001)) as delayed,
    ):
        pid = int(delayed.namespaces[0][-1].split("/")[2])
        (holder,) = (one for one in multiprocessing.active_children() if one.pid == pid)
        os.kill(pid, signal.SIGKILL)
        holder.join(HANG_SECONDS)
        raise RunFailedError("a rank is lost", ExitCode.FAILED)


def test_a_missing_tool_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(namespaces, "TOOL_FOLDERS", ())
    with pytest.raises(ResourceError, match="needs the tool tc; install iproute2"):
        find_tool("tc")
