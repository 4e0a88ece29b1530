"""The network that a run's ranks are put on."""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager

from dlrm_hybrid.cli.terminal import Terminal
from dlrm_hybrid.comm.netem.network import open_network
from dlrm_hybrid.config.schema import Config
from dlrm_hybrid.run.assembly import build

Namespaces = Callable[[int], tuple[str, ...]]
"""What the rank with this number enters before anything else."""


@contextmanager
def rank_namespaces(config: Config, terminal: Terminal) -> Generator[Namespaces, None, None]:
    """Open the emulated network, if the configuration has one, until the run has ended.

    Raises:
        ResourceError: this machine cannot emulate it.
    """
    plan = build.emulation(config)
    if plan is None:
        yield lambda rank: ()
        return
    with open_network(plan) as network:
        terminal.line(
            f"emulated network: {plan.hosts} hosts at {plan.rate_bits_per_second / 1e6:g} Mbit/s, "
            f"an echo of {plan.echo_bytes:,} bytes took {1e3 * network.echo_seconds:.1f} ms, "
            f"{network.echo_share:.0%} of the link's nominal time"
        )
        yield lambda rank: network.namespaces[build.host(config, rank)]
