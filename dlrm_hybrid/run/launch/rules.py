"""Checks that the processes started by a launcher fit together, and make the right world."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Iterator, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from socket import gethostname

import xxhash

import dlrm_hybrid
from dlrm_hybrid.config.schema import Config
from dlrm_hybrid.config.validate import faults_text
from dlrm_hybrid.run.assembly import build
from dlrm_hybrid.run.launch.environment import Launch, is_in_slurm, where_to_start
from dlrm_hybrid.types import ConfigError
from dlrm_hybrid.wire.frame import VERSION

LIBRARIES = ("torch", "torchrec", "fbgemm-gpu", "numpy")  # they decide the bits


def check_world(config: Config, launch: Launch | None, overrides: Sequence[str]) -> None:
    """Refuse a launch that does not fit the configuration.

    Args:
        config: configuration of the run.
        launch: place of a process that a launcher has started; None without one.
        overrides: overrides of the run, for the command that would fit.

    Raises:
        ConfigError: the world has another number of processes, or its machines cannot meet.
    """
    if launch is not None and config.data.follow is not None:
        fault = (
            f"data.follow = {config.data.follow}: one command starts the runs of all files, on its "
            "machine; a launcher starts one run, of data.raw"
        )
        raise ConfigError(faults_text([fault]))
    machines = None if config.network.name == "emulated" else config.parallel.machines
    faults = [] if machines is None else list(_uneven(config, machines))
    if launch is not None and not faults:
        faults += _misfits(config, launch, overrides)
    elif machines is not None and not faults:
        faults.append(
            f"parallel.machines = {machines}: this command starts processes on this machine "
            f"alone; {_advice(config, overrides)}; or try it here with network=emulated"
        )
    if faults:
        raise ConfigError(faults_text(faults))


def in_plain_text(config: Config, launch: Launch) -> str | None:
    """What machines send each other unencrypted, for whoever starts the run; None if nothing."""
    shares_tables = config.parallel.trainers > 1 and not config.parallel.table_servers
    if launch.num_nodes == 1 or not shares_tables:
        return None
    return (
        "network.keys does not cover tables that trainers share: ids, rows and gradients cross the "
        "network as plain TCP; keep others off it, or use embedding=served"
    )


def own_rank(config: Config, launch: Launch, overrides: Sequence[str]) -> int:
    """The rank in the world of a process that a launcher has started.

    It is the launcher's number, or with `parallel.machines` one of the ranks on its machine.

    Raises:
        ConfigError: its machine has more processes than ranks.
    """
    machines = config.parallel.machines
    if machines is None:
        return launch.rank
    placed = build.placement(config, machines)
    machine, number = launch.machine, launch.local_rank
    if machine is None:
        machine, number = divmod(launch.rank, len(placed[0]))
    if machine >= machines or number >= len(placed[0]):
        raise ConfigError(
            faults_text(
                [
                    f"parallel.machines = {machines}: each has {len(placed[0])} of the processes, "
                    f"but {gethostname()} has process {number} of machine {machine}, counted from "
                    f"0; {_advice(config, overrides)}"
                ]
            )
        )
    return placed[machine][number]


def start_command(config: Config, overrides: Sequence[str]) -> str:
    """The command that starts a run of `parallel.machines`.

    With torchrun it is typed on each machine; in an allocation of SLURM once, as `srun` starts all
    ranks. In capitals is what only the user knows: address of the first machine, the network
    between machines, and a folder that they share.
    """
    machines = config.parallel.machines or 1
    each = build.topology(config).size // machines
    network = {"network.bind": "NETWORK", "network.keys": "keys.json"}
    missing = {key: value for key, value in network.items() if not getattr(config.network, key[8:])}
    launcher = (
        *("torchrun", f"--nnodes={machines}", f"--nproc-per-node={each}"),
        *("--rdzv-backend=c10d", "--rdzv-id=1", "--rdzv-endpoint=HOST:29400"),
    )
    if is_in_slurm():
        launcher = ("srun", f"--nodes={machines}", f"--ntasks-per-node={each}")
        launcher += ("--kill-on-bad-exit=1", "python")
    return shlex.join(
        (
            *(*launcher, "-m", "dlrm_hybrid", "train", *overrides),
            *(f"{key}={value}" for key, value in missing.items()),
            "hydra.run.dir=FOLDER",
        )
    )


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


def check_versions(rank: int, mine: Mapping[str, str], of_rank_0: Mapping[str, str]) -> None:
    """Refuse to train with a rank 0 of another program or other libraries.

    Args:
        rank: this rank.
        mine: its `own_versions`.
        of_rank_0: `own_versions` of rank 0.

    Raises:
        ConfigError: they differ; has a line for each.
    """
    faults = [
        f"rank {rank} on {gethostname()} has {name} {mine.get(name, 'none')}, rank 0 has "
        f"{of_rank_0.get(name, 'none')}: all ranks need the same"
        for name in {**mine, **of_rank_0}
        if mine.get(name) != of_rank_0.get(name)
    ]
    if faults:
        raise ConfigError(faults_text(faults))


def _uneven(config: Config, machines: int) -> Iterator[str]:
    parallel = config.parallel
    for key in ("trainers", "servers", "table_servers"):
        if (number := getattr(parallel, key)) % machines:
            yield (
                f"parallel.{key} = {number}: launchers start as many processes on each machine, so "
                f"it must be a multiple of parallel.machines = {machines}"
            )


def _advice(config: Config, overrides: Sequence[str]) -> str:
    return f"{where_to_start()}: {start_command(config, overrides)}"


def _misfits(config: Config, launch: Launch, overrides: Sequence[str]) -> Iterator[str]:
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
            "parallel.elastic = true: not available where a launcher starts the ranks "
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
            + (f"; {_advice(config, overrides)}" if parallel.machines else "")
        )
    if launch.num_nodes > 1 and config.network.bind is None:
        yield (
            f"network.bind = null: {launch.num_nodes} machines cannot connect over loopback; set "
            "it to the network between them (10.0.0.0/24) or this machine's address"
        )
