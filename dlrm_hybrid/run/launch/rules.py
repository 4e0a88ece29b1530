"""Checks that the processes started by a launcher fit together, and make the right world."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from importlib import metadata
from pathlib import Path
from socket import gethostname

import xxhash

import dlrm_hybrid
from dlrm_hybrid.config.schema import Config
from dlrm_hybrid.config.validate import faults_text
from dlrm_hybrid.run.assembly import build
from dlrm_hybrid.run.launch.environment import Launch
from dlrm_hybrid.types import ConfigError
from dlrm_hybrid.wire.frame import VERSION

LIBRARIES = ("torch", "torchrec", "fbgemm-gpu", "numpy")  # they decide the bits


def check_world(config: Config, launch: Launch) -> None:
    """Refuse a launch that does not fit the configuration.

    Raises:
        ConfigError: the world has another number of processes, or its machines cannot meet.
    """
    faults = list(_misfits(config, launch))
    if faults:
        raise ConfigError(faults_text(faults))


def own_versions() -> dict[str, str]:
    """Versions that must be the same in all ranks, for the protocol and for equal results."""
    sources = xxhash.xxh3_64()
    root = Path(dlrm_hybrid.__file__).parent
    for path in sorted(root.rglob("*.py")):
        sources.update(path.relative_to(root).as_posix().encode() + path.read_bytes())
    return {
        "dlrm_hybrid": f"{dlrm_hybrid.__version__}, sources {sources.hexdigest()[:8]}",
        "wire format": str(VERSION),
        "Python": f"{sys.version_info.major}.{sys.version_info.minor}",
        **{name: metadata.version(name) for name in LIBRARIES},
    }


def check_versions(rank: int, own: Mapping[str, str], of_rank_0: Mapping[str, str]) -> None:
    """Refuse to train with a rank 0 of another program or other libraries.

    Args:
        rank: this rank.
        own: its `own_versions`.
        of_rank_0: those of rank 0.

    Raises:
        ConfigError: they differ; has a line for each.
    """
    faults = [
        f"rank {rank} on {gethostname()} has {name} {own.get(name, 'none')}, rank 0 has "
        f"{of_rank_0.get(name, 'none')}: all ranks need the same"
        for name in {**own, **of_rank_0}
        if own.get(name) != of_rank_0.get(name)
    ]
    if faults:
        raise ConfigError(faults_text(faults))


def _misfits(config: Config, launch: Launch) -> Iterator[str]:
    parallel = config.parallel
    if config.network.name == "emulated":
        yield (
            f"network = emulated: not available where a launcher starts the ranks "
            f"({launch.size_key} = {launch.size}); start the run without one, or use network=host"
        )
        return
    if not build.many_processes(config):
        if launch.size > 1:
            yield (
                f"{launch.size_key} = {launch.size}: parallel={parallel.name} with "
                f"parallel.world={parallel.world} is one process; start one, or use parallel=hybrid"
            )
        return
    if parallel.elastic:
        yield (
            "parallel.elastic = True: not available where a launcher starts the ranks "
            f"({launch.size_key} = {launch.size}): nobody would start a trainer again; start the "
            "run without one, or use parallel.elastic=false"
        )
    size = build.topology(config).size
    if launch.size != size:
        servers = f"parallel.servers = {parallel.servers}"
        if parallel.table_servers:
            servers += f", parallel.table_servers = {parallel.table_servers}"
        yield (
            f"{launch.size_key} = {launch.size}: parallel.trainers = {parallel.trainers}, "
            f"parallel.cuts = [{', '.join(parallel.cuts)}] ({len(parallel.cuts) + 1} stages) and "
            f"{servers} make {size} processes"
        )
    if launch.num_nodes > 1 and config.network.bind is None:
        yield (
            f"network.bind = null: {launch.num_nodes} machines cannot connect over loopback; set "
            "it to the network between them (10.0.0.0/24) or this machine's address"
        )
