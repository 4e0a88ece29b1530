"""Memory that each rank of a planned world needs, in closed form."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from statistics import median

from dlrm_hybrid.parallel.topology import ServerRole, WorkerRole
from dlrm_hybrid.plan.layout import Layout

RUNTIME_BYTES = 400_000_000
"""Default for a rank with torch imported and an evaluation done, without what it owns."""
READER_BYTES = 10_500_000
COPIES = 2
"""A rank's state is copied while a checkpoint is written, as at the end of every run."""
FLOAT_BYTES = 4
SLOTS = {"sgd": 0, "momentum": 1, "adagrad": 1, "adam": 2}


Runtimes = Mapping[str, int]
"""Bytes of a rank beside what it owns, by `kind_of` the rank."""


def kind_of(world: Layout, rank: int) -> str:
    """Kind of a rank; ranks of a kind have imported and compiled the same code."""
    role = world.topology.role(rank)
    if not isinstance(role, WorkerRole):
        return "server" if isinstance(role, ServerRole) else "tables"
    if not world.partition.stages[role.stage].has_interaction:
        return "worker"
    return "worker with tables" if world.config.embedding.name == "fused" else "worker that asks"


def runtimes(world: Layout, peaks: Mapping[int, int]) -> dict[str, int]:
    """Memory of a run's ranks beside what they owned, from their peaks: torch, kernels, buffers."""
    sizes: dict[str, list[int]] = defaultdict(list)
    for rank, peak in peaks.items():
        sizes[kind_of(world, rank)].append(peak - _owned(world, rank))
    return {kind: int(median(own)) for kind, own in sizes.items()}


def memory_bytes(world: Layout, rank: int, known: Runtimes) -> int:
    """Predict the peak memory of a rank in bytes, given the `runtimes` of a run."""
    usual = int(median(known.values())) if known else RUNTIME_BYTES
    return known.get(kind_of(world, rank), usual) + _owned(world, rank)


def _owned(world: Layout, rank: int) -> int:
    """Bytes that a rank owns, with their copy while a checkpoint is written."""
    role, config = world.topology.role(rank), world.config
    if isinstance(role, WorkerRole):
        return _worker(world, role.stage)
    if isinstance(role, ServerRole):
        elements = sum(world.elements(stage, role.index) for stage in range(world.topology.stages))
        published = 1 if config.pull.precision != "float32" or config.pull.left_out else 0
        followers = world.topology.trainers if config.sync.name == "async" else 1
        each = 1 + SLOTS[config.optimizer.name] + published * followers + config.sync.staleness
        pushes = world.topology.trainers
        return FLOAT_BYTES * elements * (each * COPIES + pushes)
    copies = 1 if config.embedding.storage == "mmap" else COPIES
    return copies * _table_bytes(world) // world.topology.table_servers


def _worker(world: Layout, stage: int) -> int:
    config, topology = world.config, world.topology
    sparse = config.gradient.is_sparse
    slots = SLOTS[config.optimizer.name] if not topology.servers else 0
    masters = 0 if topology.servers or topology.trainers == 1 else COPIES + topology.trainers
    dense = FLOAT_BYTES * world.elements(stage) * (2 + 2 * sparse + slots + masters)
    part, rows = world.partition.stages[stage], config.train.batch_size
    # Twice what forward keeps for backward: values and gradients.
    widths = [part.input_width, *(outputs for outputs, _ in world.matrices(stage))]
    activations = 2 * FLOAT_BYTES * rows * sum(widths)
    tables = 0
    if part.has_interaction:
        pooled = FLOAT_BYTES * rows * len(world.spec.columns) * world.spec.widths.widest
        activations += 2 * pooled * (1 + config.embedding.staleness)
        if not topology.table_servers:
            tables = _table_bytes(world) * COPIES // topology.trainers
    return dense + activations + tables + READER_BYTES


def _table_bytes(world: Layout) -> int:
    """Bytes of all rows, with their optimizer's state."""
    numbers = {"sgd": 0, "rowwise_adagrad": 1, "adagrad": 0, "rowwise_adam": 1, "adam": 0}
    rows = {"sgd": 1, "rowwise_adagrad": 1, "adagrad": 2, "rowwise_adam": 2, "adam": 3}
    chosen = world.config.embedding.optimizer
    sizes = zip(world.spec.table_rows, world.spec.widths.dims, strict=True)
    return FLOAT_BYTES * sum(count * (rows[chosen] * dim + numbers[chosen]) for count, dim in sizes)
