from dataclasses import replace
from fractions import Fraction
from ipaddress import IPv4Address

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dlrm_hybrid.comm.netem.network import (
    EmulatedNetwork,
    check_echo,
    latency_figures,
    latency_remark,
)
from dlrm_hybrid.comm.netem.plan import (
    NETWORK,
    Method,
    NetworkPlan,
    bits_per_second,
    hardware_address,
    host_of_address,
    seconds,
)
from dlrm_hybrid.comm.netem.relay import Figures
from dlrm_hybrid.types import ResourceError

RATES = st.integers(10**6, 10**11)
FRAME_BYTES = 1_514


def plan(hosts: int = 3, rate: int = 10**8, latency: float | None = None) -> NetworkPlan:
    return NetworkPlan(hosts=hosts, rate_bits_per_second=rate, latency_seconds=latency)


def network(
    plan: NetworkPlan,
    echo_seconds: float = 1.0,
    round_trip_seconds: float = 1.0,
    method: Method | None = None,
) -> EmulatedNetwork:
    return EmulatedNetwork(
        plan=plan,
        namespaces=(),
        echo_seconds=echo_seconds,
        round_trip_seconds=round_trip_seconds,
        method=method,
        relay_figures=lambda: Figures(packets=7) if method is Method.USER_SPACE else None,
    )


def test_bursts_are_small() -> None:
    assert plan(rate=10**8).burst_bytes <= 8_000
    assert plan(rate=10**9).burst_bytes <= 64_000


@given(RATES)
def test_a_link_carries_whole_frames_and_an_echo_shows_that_it_is_shaped(rate: int) -> None:
    one = plan(rate=rate)
    assert one.burst_bytes >= 2 * FRAME_BYTES
    assert one.queue_bytes >= 10 * one.burst_bytes
    # What passes at once must be too little to fake the line's time.
    assert one.echo_bytes >= max(50_000, 10 * one.burst_bytes)
    assert one.echo_seconds == pytest.approx(16 * one.echo_bytes / rate)


@given(st.integers(2, 2000))
def test_hosts_have_addresses_of_their_own_in_the_network(hosts: int) -> None:
    addresses = {plan(hosts).address(host) for host in range(hosts)}
    assert len(addresses) == hosts
    assert all(address in NETWORK for address in addresses)
    assert not addresses & {NETWORK.network_address, NETWORK.broadcast_address}


def test_the_lines_for_the_tools() -> None:
    one = plan(hosts=2)
    assert one.hub_links(["/proc/7/fd/5", "/proc/7/fd/6"]) == [
        "link add bridge0 type bridge",
        "link set bridge0 up",
        "link add port0 type veth peer name eth0 netns /proc/7/fd/5",
        "link set port0 master bridge0 up",
        "link add port1 type veth peer name eth0 netns /proc/7/fd/6",
        "link set port1 master bridge0 up",
    ]
    bucket = "root handle 1: tbf rate 100000000bit burst 5000 limit 1250000"
    assert one.hub_shapes() == [f"qdisc add dev port{host} {bucket}" for host in range(2)]
    assert one.host_links(1) == [
        "link set lo up",
        "addr add 198.18.0.2/16 dev eth0",
        "link set eth0 up",
    ]
    assert one.host_shapes() == [f"qdisc add dev eth0 {bucket}"]
    assert one.host_delays() == []
    assert plan(latency=0.0025).host_delays() == [
        "qdisc add dev eth0 parent 1:1 handle 2: netem delay 2500us limit 1000000"
    ]
    assert one.address(0) == IPv4Address("198.18.0.1")


def test_a_link_that_is_too_fast_is_refused_with_what_was_measured() -> None:
    one = plan(latency=0.001)
    assert one.echo_seconds == pytest.approx(0.010)
    check_echo(network(one, echo_seconds=0.0091))
    with pytest.raises(ResourceError, match="took 8.90 ms; at 100 Mbit/s it takes 10.00"):
        check_echo(network(one, echo_seconds=0.0089))


def test_a_link_without_the_delay_is_refused_with_what_was_measured() -> None:
    one = plan(latency=0.02)
    check_echo(network(one, round_trip_seconds=0.04))
    with pytest.raises(
        ResourceError, match=r"network.latency: .* took 39.90 ms, less than two .* 20"
    ):
        check_echo(network(one, round_trip_seconds=0.0399))


def test_the_lines_for_a_relay() -> None:
    one = plan(hosts=2, latency=0.02)
    assert one.relayed_links(["/proc/7/fd/5", "/proc/7/fd/6"]) == [
        "link add port0 type veth peer name eth0 address 02:00:00:00:00:00 netns /proc/7/fd/5",
        "link set port0 up",
        "link add port1 type veth peer name eth0 address 02:00:00:00:00:01 netns /proc/7/fd/6",
        "link set port1 up",
    ]
    assert one.relayed_host_links() == ["link set eth0 gso_max_size 5000"]


@given(RATES, st.integers(0, 10**7))
def test_a_bucket_passes_what_a_relay_gets_in_one_piece(rate: int, microseconds: int) -> None:
    one = plan(rate=rate, latency=microseconds / 1e6)
    (line,) = one.relayed_host_links()
    assert 2 * FRAME_BYTES <= int(line.split()[-1]) <= one.burst_bytes
    on_the_way = one.hosts * rate / 8 * microseconds / 1e6
    assert one.delayed_bytes >= 2 * on_the_way + one.hosts * (one.queue_bytes - 2)


@given(st.integers(0, 65_533))
def test_a_relay_knows_hosts_by_their_addresses(host: int) -> None:
    assert host_of_address(hardware_address(host)) == host
    assert not hardware_address(host)[0] & 1, "one host's, not a group's"


@pytest.mark.parametrize("other", [b"\xff" * 6, bytes.fromhex("3333000000fb")])
def test_what_goes_to_all_is_no_hosts(other: bytes) -> None:
    assert host_of_address(other) is None


def test_what_is_said_of_latency() -> None:
    assert latency_remark(network(plan())) is latency_figures(network(plan())) is None
    delayed = plan(latency=0.02)
    by_kernel = network(delayed, round_trip_seconds=0.0404, method=Method.NETEM)
    assert latency_remark(by_kernel) == (
        "network.latency: a round trip takes 40.4 ms, 40 of them emulated by netem"
    )
    figures = latency_figures(by_kernel)
    assert figures is not None and figures["relay"] is None
    relayed = network(delayed, round_trip_seconds=0.0404, method=Method.USER_SPACE)
    assert str(latency_remark(relayed)).endswith(
        "emulated in user space, which takes CPU time from the ranks"
    )
    figures = latency_figures(relayed)
    assert figures is not None
    assert (figures["method"], figures["one_way_seconds"]) == ("user_space", 0.02)
    assert figures["relay"]["packets"] == 7


def test_rates_that_a_relay_does_not_reach_are_remarked() -> None:
    fast = network(plan(rate=25 * 10**8, latency=0.001), method=Method.USER_SPACE)
    assert "links may not reach 2.5 Gbit/s" in str(latency_remark(fast))
    assert "may not reach" not in str(latency_remark(replace(fast, method=Method.NETEM)))


@pytest.mark.parametrize(
    ("text", "rate"),
    [("100mbit", 10**8), ("1gbit", 10**9), ("2.5gbit", 25 * 10**8), ("1500kbit", 1_500_000)],
)
def test_rates(text: str, rate: int) -> None:
    assert bits_per_second(text) == rate


@given(st.integers(10, 100_000))
def test_a_rate_with_decimals_is_exact(thousandths: int) -> None:
    text = f"{thousandths // 1000}.{thousandths % 1000:03}gbit"
    assert bits_per_second(text) == Fraction(thousandths, 1000) * 10**9


@pytest.mark.parametrize(
    "text", ["", "100", "mbit", "100Mbit", "100 mbit", "-1mbit", "1e3mbit", "100mbits", "1.gbit"]
)
def test_what_is_no_rate_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="must be a rate such as"):
        bits_per_second(text)


@pytest.mark.parametrize("text", ["0mbit", "999kbit", "100.1gbit", "999999999gbit"])
def test_rates_that_no_link_has_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="must be a rate from 1mbit to 100gbit"):
        bits_per_second(text)


@pytest.mark.parametrize(
    ("text", "time"),
    [("5ms", 0.005), ("250us", 0.00025), ("1.5s", 1.5), ("0ms", 0.0), ("10s", 10.0)],
)
def test_times(text: str, time: float) -> None:
    assert seconds(text) == time


@pytest.mark.parametrize("text", ["", "5", "ms", "5 ms", "5m", "-5ms", "11s", "10001ms"])
def test_what_is_no_time_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="must be a time"):
        seconds(text)
