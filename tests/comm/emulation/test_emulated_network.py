"""A real network of namespaces: how fast it is, and what is left of it."""

import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from emulation_hosts import (
    has_netem,
    inside,
    links,
    needs_namespaces,
    network_namespaces,
    transfer_seconds,
)

from dlrm_hybrid.comm.netem import holder
from dlrm_hybrid.comm.netem.network import Network, open_network
from dlrm_hybrid.comm.netem.plan import Plan
from dlrm_hybrid.types import ResourceError

pytestmark = needs_namespaces

RATE = 50_000_000
NUM_BYTES = 500_000
LINE_SECONDS = 8 * NUM_BYTES / RATE
LEAST, MOST = 0.95, 1.5  # of the line's time
TRIES = 3  # others may hold the machine meanwhile
GONE_SECONDS = 2.0


def plan(latency_seconds: float | None = None) -> Plan:
    return Plan(hosts=3, rate_bits_per_second=RATE, latency_seconds=latency_seconds)


@pytest.fixture(scope="module")
def network() -> Iterator[Network]:
    with open_network(plan()) as network:
        yield network


def test_an_echo_takes_the_time_of_the_line(network: Network) -> None:
    shares = [network.echo_share]
    while min(shares) > 1.1 and len(shares) <= TRIES:
        with open_network(plan()) as again:
            shares.append(again.echo_share)
    assert 0.9 <= min(shares) <= 1.1


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
    ways: list[tuple[int, int]], lines: int, network: Network
) -> None:
    seconds = min(transfer_seconds(network, ways, NUM_BYTES) for _ in range(TRIES))
    assert LEAST <= seconds / (lines * LINE_SECONDS) <= MOST


def test_a_host_has_its_own_interfaces_only(network: Network) -> None:
    found: list[str] = []
    text = Path("/proc/thread-self/net/dev")
    inside(network, 2, lambda: found.append(text.read_text())).join()
    names = [line.split(":")[0].strip() for line in found[0].splitlines()[2:]]
    # A kernel may put fallback devices of its tunnels into every namespace.
    assert {"lo", "eth0"} <= set(names)
    assert not any(name.startswith(("port", "bridge")) for name in names)


def test_nothing_is_left_and_the_machines_own_links_are_untouched() -> None:
    links_before, namespaces_before = links(), network_namespaces()
    with open_network(plan()):
        assert len(network_namespaces() - namespaces_before) == 1 + 3
        assert links() == links_before
    until = time.monotonic() + GONE_SECONDS
    while network_namespaces() - namespaces_before and time.monotonic() < until:
        time.sleep(0.01)
    assert network_namespaces() <= namespaces_before
    assert links() == links_before


def test_an_error_inside_lets_it_go() -> None:
    paths: list[str] = []
    with suppress(KeyError), open_network(plan()) as network:
        paths += [path for host in network.namespaces for path in host]
        raise KeyError
    assert paths
    assert not any(Path(path).exists() for path in paths)


@pytest.mark.skipif(has_netem(), reason="this kernel can delay packets")
def test_a_latency_is_refused_where_the_kernel_has_none() -> None:
    message = r"network.latency: this kernel .* has no netem"
    with pytest.raises(ResourceError, match=message), open_network(plan(latency_seconds=0.005)):
        pass


@pytest.mark.skipif(not has_netem(), reason="needs netem in the kernel")
def test_a_latency_is_added_on_each_way() -> None:
    with open_network(plan(latency_seconds=0.02)) as network:
        assert 0.95 <= network.echo_share <= 1.5


def test_a_missing_tool_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(holder, "TOOL_FOLDERS", ())
    with pytest.raises(ResourceError, match="needs the tool tc; install iproute2"):
        holder.find_tool("tc")
