"""Which of its addresses a machine listens on."""

from __future__ import annotations

import socket
from ipaddress import AddressValueError, IPv4Address, IPv4Network, NetmaskValueError

import psutil

from dlrm_hybrid.types import ConfigError


def own_address(bind: str) -> str:
    """The IPv4 address that `network.bind` means on this machine.

    Args:
        bind: an address, taken as it is; or a network, `10.0.0.0/24`, of which this machine has
            one address: so all machines of a run have the same configuration.

    Raises:
        ConfigError: it is not a network, or the machine has none or several addresses in it.
    """
    if "/" not in bind:
        return bind
    try:
        network = IPv4Network(bind)
    except (AddressValueError, NetmaskValueError, ValueError) as error:
        raise ConfigError(f"network.bind: {bind!r} is not an IPv4 network: {error}") from error
    own = sorted(
        one.address
        for addresses in psutil.net_if_addrs().values()
        for one in addresses
        if one.family is socket.AF_INET and IPv4Address(one.address) in network
    )
    if len(own) != 1:
        found = ", ".join(own) or "none"
        raise ConfigError(
            f"network.bind: {socket.gethostname()} needs one address in {bind}, it has {found}"
        )
    return own[0]
