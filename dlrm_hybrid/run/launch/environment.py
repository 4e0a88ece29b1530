"""The environment that torchrun, SLURM or a Kubernetes operator gives this process."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass
from typing import final

from dlrm_hybrid.types import ConfigError

LOOPBACK = "127.0.0.1"
DEFAULT_PORT = 29_500
# Each SLURM job listens on its own port, below the kernel's ephemeral ports.
FIRST_PORT, NUM_PORTS = 20_000, 10_000
_FIRST_HOST = re.compile(r"([^,\[\]]+)(?:\[(\d+)[^\]]*\])?([^,\[\]]*)")


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """The place of this process among those started by a launcher.

    Attributes:
        job: the launcher's name of the job, or empty.
        size_key: the environment variable of `size`.
        rank: rank of this process.
        size: number of processes.
        local_rank: number of this process on its machine.
        node: the launcher's name of its machine.
        machine: number of its machine from 0; None if the launcher does not number them.
        num_nodes: least number of machines; 1 if unknown.
        host: host of the store.
        port: port of the store.
        rank_0_serves: whether rank 0 must serve the store, because the launcher does not.
        restarts: number of restarts by the launcher.
    """

    job: str
    size_key: str
    rank: int
    size: int
    local_rank: int
    node: str
    machine: int | None
    num_nodes: int
    host: str
    port: int
    rank_0_serves: bool
    restarts: int

    @property
    def serves_store(self) -> bool:
        """Whether this process must serve the store."""
        return self.rank_0_serves and self.rank == 0


def find_launch(environ: Mapping[str, str]) -> Launch | None:
    """Find this process's place in the environment; None if no launcher has started it.

    Raises:
        ConfigError: a variable is missing or not a number.
    """
    if all(key in environ for key in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")):
        return _torchrun(environ)
    if "SLURM_PROCID" in environ and "SLURM_NTASKS" in environ:
        # A batch script has these variables too, but is not one of the tasks.
        in_script = environ.get("ENVIRONMENT") == "BATCH" and "SLURM_STEP_ID" not in environ
        launch = _slurm(environ)
        # One task may as well be a shell opened by `srun --pty`.
        return None if in_script or launch.size == 1 else launch
    return None


def is_in_slurm() -> bool:
    """Whether this process is in an allocation of SLURM, where `srun` starts ranks."""
    return "SLURM_JOB_ID" in os.environ


def where_to_start() -> str:
    """The place where the command that starts ranks on several machines is typed, in words."""
    return "start once in this allocation" if is_in_slurm() else "start on each machine"


def prepare_environment(environ: MutableMapping[str, str]) -> None:
    """Set variables that torch needs before its import, unless they are set."""
    environ.setdefault("OMP_NUM_THREADS", "1")  # `threads` sets the real number later
    environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # a store logs much that is no fault


def _torchrun(environ: Mapping[str, str]) -> Launch:
    """The place given by torchrun, or by launchers that set the same variables without a store."""
    rank, size = _number(environ, "RANK"), _number(environ, "WORLD_SIZE")
    local_rank = _number(environ, "LOCAL_RANK", 0)
    host = environ["MASTER_ADDR"]
    is_local = host == "localhost" or host.startswith("127.")
    local_size = _number(environ, "LOCAL_WORLD_SIZE", size if is_local else 1)
    return Launch(
        job=environ.get("TORCHELASTIC_RUN_ID", ""),
        size_key="WORLD_SIZE",
        rank=rank,
        size=size,
        local_rank=local_rank,
        node=environ.get("GROUP_RANK", str(rank - local_rank)),
        machine=_number(environ, "GROUP_RANK") if "GROUP_RANK" in environ else None,
        num_nodes=-(-size // max(1, local_size)),
        host=host,
        port=_number(environ, "MASTER_PORT"),
        rank_0_serves=environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True",
        restarts=_number(environ, "TORCHELASTIC_RESTART_COUNT", 0),
    )


def _slurm(environ: Mapping[str, str]) -> Launch:
    size_key = "SLURM_STEP_NUM_TASKS" if "SLURM_STEP_NUM_TASKS" in environ else "SLURM_NTASKS"
    rank = _number(environ, "SLURM_PROCID")
    num_nodes = _number(environ, "SLURM_STEP_NUM_NODES", _number(environ, "SLURM_NNODES", 1))
    port = DEFAULT_PORT
    if "SLURM_JOB_ID" in environ:
        port = FIRST_PORT + _number(environ, "SLURM_JOB_ID") % NUM_PORTS
    ids = (environ.get(key, "") for key in ("SLURM_JOB_ID", "SLURM_STEP_ID"))
    return Launch(
        job=".".join(part for part in ids if part),
        size_key=size_key,
        rank=rank,
        size=_number(environ, size_key),
        local_rank=_number(environ, "SLURM_LOCALID", rank if num_nodes == 1 else None),
        node=environ.get("SLURM_NODEID", "0"),
        machine=_number(environ, "SLURM_NODEID", 0 if num_nodes == 1 else None),
        num_nodes=num_nodes,
        host=environ.get("MASTER_ADDR") or (LOOPBACK if num_nodes == 1 else _first_host(environ)),
        port=_number(environ, "MASTER_PORT", port),
        rank_0_serves=True,
        restarts=_number(environ, "SLURM_RESTART_COUNT", 0),
    )


def _first_host(environ: Mapping[str, str]) -> str:
    """The first host of `node[01-04,7]`, which has rank 0."""
    hosts = environ.get("SLURM_STEP_NODELIST") or environ.get("SLURM_JOB_NODELIST", "")
    match = _FIRST_HOST.match(hosts)
    if match is None:
        raise ConfigError(
            "MASTER_ADDR: is not set, and SLURM_JOB_NODELIST names no machine; set it to the "
            "address of rank 0's machine"
        )
    return "".join(part or "" for part in match.groups())


def _number(environ: Mapping[str, str], key: str, otherwise: int | None = None) -> int:
    text = environ.get(key)
    if text is None and otherwise is not None:
        return otherwise
    if text is None or not text.isascii() or not text.isdigit():
        raise ConfigError(f"{key} = {text or ''}: must be a number, the launcher sets it")
    return int(text)
