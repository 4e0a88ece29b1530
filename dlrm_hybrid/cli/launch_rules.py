"""Whether the processes that a launcher has started make the world of the configuration."""

from __future__ import annotations

from collections.abc import Iterator

from dlrm_hybrid.cli.launcher import Launch
from dlrm_hybrid.config import build
from dlrm_hybrid.config.schema import Config
from dlrm_hybrid.config.validate import faults_text
from dlrm_hybrid.types import ConfigError


def check_world(config: Config, launch: Launch) -> None:
    """Refuse a launch that does not fit the configuration.

    Raises:
        ConfigError: the world has another number of processes, or its machines cannot meet.
    """
    faults = list(_misfits(config, launch))
    if faults:
        raise ConfigError(faults_text(faults))


def _misfits(config: Config, launch: Launch) -> Iterator[str]:
    parallel = config.parallel
    if config.network.name == "emulated":
        yield (
            f"network = emulated: its hosts are made where ranks are started, and here "
            f"{launch.size_key} = {launch.size} says that a launcher starts them; start the run "
            "without it, or use network=host"
        )
        return
    if not build.many_processes(config):
        if launch.size > 1:
            yield (
                f"{launch.size_key} = {launch.size}: parallel={parallel.name} with "
                f"parallel.world={parallel.world} is one process; start one, or use parallel=hybrid"
            )
        return
    size = build.topology(config).size
    if launch.size != size:
        yield (
            f"{launch.size_key} = {launch.size}: parallel.trainers = {parallel.trainers}, "
            f"parallel.cuts = [{', '.join(parallel.cuts)}] ({len(parallel.cuts) + 1} stages) "
            f"and parallel.servers = {parallel.servers} make {size} processes"
        )
    if launch.num_nodes > 1 and config.network.bind is None:
        yield (
            f"network.bind = null: {launch.num_nodes} machines cannot meet on loopback; name the "
            "network between them (10.0.0.0/24) or this machine's address"
        )
