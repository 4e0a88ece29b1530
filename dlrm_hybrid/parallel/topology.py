"""Ranks and roles: trainers, stages, servers, and the placement of dense tensors on servers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from math import prod

from dlrm_hybrid.types import ConfigError


@dataclass(frozen=True, slots=True)
class WorkerRole:
    """A rank that computes one stage of one trainer."""

    trainer: int
    stage: int

    @property
    def name(self) -> str:
        """Name in logs and messages: `worker-<trainer>.<stage>`."""
        return f"worker-{self.trainer}.{self.stage}"


@dataclass(frozen=True, slots=True)
class ServerRole:
    """A rank that owns dense tensors."""

    index: int

    @property
    def name(self) -> str:
        """Name in logs and messages: `server-<index>`."""
        return f"server-{self.index}"


@dataclass(frozen=True, slots=True)
class TableServerRole:
    """A rank that owns rows of embedding tables."""

    index: int

    @property
    def name(self) -> str:
        """Name in logs and messages: `tables-<index>`."""
        return f"tables-{self.index}"


Role = WorkerRole | ServerRole | TableServerRole


@dataclass(frozen=True, slots=True, kw_only=True)
class Topology:
    """Layout of ranks: worker (t, w) is `t * stages + w`; servers follow, then table servers.

    Attributes:
        trainers: T, replicas of the dense model.
        stages: W, parts of each replica; boundary b lies between stages b and b + 1.
        servers: S; 0 leaves the dense weights to the workers, which apply the optimizer themselves.
        interaction_stage: the stage that holds the interaction, and with it the tables.
        table_servers: number that own the tables' rows; 0 leaves these to the workers.

    Raises:
        ConfigError: a count is impossible; the message names its key.
    """

    trainers: int
    stages: int
    servers: int
    interaction_stage: int
    table_servers: int = 0

    def __post_init__(self) -> None:
        faults: list[str] = []
        if self.trainers < 1:
            faults.append(f"parallel.trainers: {self.trainers} must be at least 1")
        if self.stages < 1:
            faults.append(f"parallel.cuts: {self.stages} stages, at least 1 is needed")
        elif not 0 <= self.interaction_stage < self.stages:
            faults.append(
                f"parallel.cuts: the interaction is in stage {self.interaction_stage} "
                f"of {self.stages}"
            )
        if self.servers < 0:
            faults.append(f"parallel.servers: {self.servers} must be at least 0")
        if self.table_servers < 0:
            faults.append(f"parallel.table_servers: {self.table_servers} must be at least 0")
        if faults:
            raise ConfigError("\n".join(faults))

    @property
    def num_workers(self) -> int:
        """Number of workers of all trainers; the rank of the first server."""
        return self.trainers * self.stages

    @property
    def size(self) -> int:
        """Number of ranks: workers, servers and table servers."""
        return self.num_workers + self.servers + self.table_servers

    def worker(self, trainer: int, stage: int) -> int:
        """Rank of a worker; ValueError if there is none."""
        if not (0 <= trainer < self.trainers and 0 <= stage < self.stages):
            raise ValueError(f"no worker {trainer}.{stage} in {self}")
        return trainer * self.stages + stage

    def server(self, index: int) -> int:
        """Rank of a server; ValueError if there is none."""
        if not 0 <= index < self.servers:
            raise ValueError(f"no server {index} in {self}")
        return self.num_workers + index

    def table_server(self, index: int) -> int:
        """Rank of a table server; ValueError if there is none."""
        if not 0 <= index < self.table_servers:
            raise ValueError(f"no table server {index} in {self}")
        return self.num_workers + self.servers + index

    def collective_server(self, stage: int) -> int:
        """Rank of the server for the collectives of a stage; requires servers."""
        return self.server(stage % self.servers)

    def role(self, rank: int) -> Role:
        """The role of a rank; ValueError if there is no such rank."""
        if not 0 <= rank < self.size:
            raise ValueError(f"no rank {rank} in {self}")
        if rank < self.num_workers:
            return WorkerRole(*divmod(rank, self.stages))
        index = rank - self.num_workers
        return ServerRole(index) if index < self.servers else TableServerRole(index - self.servers)

    def name(self, rank: int) -> str:
        """Name of a rank in messages and files: `worker-0.2`, `server-1` or `tables-0`."""
        return self.role(rank).name

    def machine(self, rank: int, machines: int) -> int:
        """The machine of a rank: trainer t with all its stages is on machine t modulo `machines`.

        Server k and table server k are beside trainer k modulo the same number.
        """
        role = self.role(rank)
        return (role.trainer if isinstance(role, WorkerRole) else role.index) % machines

    def stage_group(self, stage: int) -> tuple[int, ...]:
        """Ranks of the workers of one stage, in trainer order."""
        return tuple(self.worker(trainer, stage) for trainer in range(self.trainers))

    @property
    def interaction_group(self) -> tuple[int, ...]:
        """Ranks of the workers that share the tables, in trainer order."""
        return self.stage_group(self.interaction_stage)

    @property
    def server_group(self) -> tuple[int, ...]:
        """Ranks of all parameter servers, in their order."""
        return tuple(range(self.num_workers, self.num_workers + self.servers))

    @property
    def all_servers(self) -> tuple[int, ...]:
        """Ranks of all servers, of dense weights and then of tables."""
        return tuple(range(self.num_workers, self.size))

    @property
    def table_server_group(self) -> tuple[int, ...]:
        """Ranks of all table servers, in their order."""
        return tuple(range(self.num_workers + self.servers, self.size))


@dataclass(frozen=True)
class DenseTensor:
    """A dense parameter, with its stage and its server.

    Attributes:
        id: its number on the wire, position of its name in `ModelSpec.dense_shapes()`.
        name: `bottom.1.weight`.
        shape: its dimensions, of float32.
        stage: stage that computes with it.
        server: index of the owner, counted from 0; 0 without servers.
    """

    id: int
    name: str
    shape: tuple[int, ...]
    stage: int
    server: int

    @cached_property
    def count(self) -> int:
        """Number of elements of the tensor."""
        return prod(self.shape)

    @cached_property
    def num_bytes(self) -> int:
        """The bytes that this tensor takes as float32."""
        return 4 * self.count


def lay_out(
    shapes: Mapping[str, tuple[int, ...]], stage_of: Mapping[str, int], servers: int
) -> tuple[DenseTensor, ...]:
    """Every dense parameter with its stage and its server, in the order of `shapes`.

    Args:
        shapes: `ModelSpec.dense_shapes()`.
        stage_of: the stage of every parameter.
        servers: S; 0 leaves all tensors to the workers.

    Raises:
        ConfigError: a server would own nothing.
    """
    sizes_bytes = {name: 4 * prod(shape) for name, shape in shapes.items()}
    owner = place(sizes_bytes, servers) if servers > 0 else dict.fromkeys(shapes, 0)
    return tuple(
        DenseTensor(id=number, name=name, shape=shape, stage=stage_of[name], server=owner[name])
        for number, (name, shape) in enumerate(shapes.items())
    )


def place(sizes_bytes: Mapping[str, int], servers: int) -> dict[str, int]:
    """A server for every tensor, so that no two differ by more bytes than the largest tensor.

    Largest first, ties by name, each to the server with the least so far (Graham, 1969: at most
    4/3 of the best possible maximum).

    Raises:
        ConfigError: a server would own nothing.
    """
    if not 1 <= servers <= len(sizes_bytes):
        raise ConfigError(
            f"parallel.servers: {servers} servers for {len(sizes_bytes)} dense tensors; "
            "each must own at least one"
        )
    loads = [(0, 0, server) for server in range(servers)]  # bytes, tensors, server
    owner: dict[str, int] = {}
    for name in sorted(sizes_bytes, key=lambda name: (-sizes_bytes[name], name)):
        load_bytes, tensors, server = min(loads)
        loads[server] = (load_bytes + sizes_bytes[name], tensors + 1, server)
        owner[name] = server
    return {name: owner[name] for name in sizes_bytes}
