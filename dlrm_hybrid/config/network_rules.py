"""What the keys of `network` mean together, and with `parallel`."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from dlrm_hybrid.comm.netem.units import bits_per_second, seconds
from dlrm_hybrid.config.schema import Config


def network_rules(config: Config) -> Iterator[str]:
    """One line for each fault."""
    network = config.network
    for key, parse in (("rate", bits_per_second), ("latency", seconds)):
        text: str | None = getattr(network, key)
        if text is not None and (fault := _unreadable(text, parse)):
            yield f"network.{key} = {text!r}: {fault}"
    if network.name == "emulated":
        yield from _emulated(config)
        return
    for key in ("ranks_per_host", "latency"):
        if getattr(network, key) is not None:
            yield f"network.{key} = {getattr(network, key)}: only applies to network=emulated"
    if network.bind is not None and network.keys is None:
        yield f"network.bind = {network.bind!r}: needs network.keys, a file of CURVE keys"


def _unreadable(text: str, parse: Callable[[str], float]) -> str | None:
    try:
        parse(text)
    except ValueError as error:
        return str(error)
    return None


def _emulated(config: Config) -> Iterator[str]:
    network, parallel = config.network, config.parallel
    if network.bind is not None:
        yield f"network.bind = {network.bind!r}: only applies to network=host"
    for key in ("rate", "ranks_per_host"):
        if getattr(network, key) is None:
            yield f"network.{key} = null: network=emulated needs a value"
    for key, value, needed in (
        ("parallel", parallel.name, "hybrid"),
        ("parallel.world", parallel.world, "processes"),
    ):
        if value != needed:
            yield (
                f"{key} = {value}: sends nothing over the links of network=emulated; use "
                f"{key}={needed} or network=host"
            )
            return
    ranks = parallel.trainers * (len(parallel.cuts) + 1) + parallel.servers
    if network.ranks_per_host is not None and network.ranks_per_host >= ranks:
        yield (
            f"network.ranks_per_host = {network.ranks_per_host}: network=emulated needs 2 hosts "
            f"or more, and there are {ranks} ranks"
        )
