"""Bytes of memory that each rank of a planned world needs, in closed form."""

from __future__ import annotations

from dlrm_hybrid.compress.gradient.methods import methods
from dlrm_hybrid.parallel.topology import ServerRole, WorkerRole
from dlrm_hybrid.plan.layout import Layout

RUNTIME_BYTES = 350_000_000
"""Of a rank that has imported torch, before it has any weights; measured."""
READER_BYTES = 10_500_000
FLOAT_BYTES = 4
SLOTS = {"sgd": 0, "momentum": 1, "adagrad": 1}


def memory_bytes(world: Layout, rank: int) -> int:
    """Of one rank at most: while a checkpoint is written there is a copy of all it owns."""
    role, config = world.topology.role(rank), world.config
    if isinstance(role, WorkerRole):
        return RUNTIME_BYTES + _worker(world, role.stage)
    copies = 2 if config.checkpoint.every or config.checkpoint.minutes else 1
    if isinstance(role, ServerRole):
        elements = sum(one.count for one in world.tensors if one.server == role.index)
        published = 1 if config.pull.precision != "float32" or config.pull.sparsity else 0
        followers = world.topology.trainers if config.sync.name == "async" else 1
        each = 1 + SLOTS[config.optimizer.name] + published * followers + config.sync.staleness
        pushes = world.topology.trainers
        return RUNTIME_BYTES + FLOAT_BYTES * elements * (each * copies + pushes)
    rows = sum(world.ids.rows) * copies
    return RUNTIME_BYTES + rows * _row_bytes(world) // world.topology.table_servers


def _worker(world: Layout, stage: int) -> int:
    config, topology = world.config, world.topology
    sparse = methods()[config.gradient.name].is_sparse
    own = SLOTS[config.optimizer.name] if not topology.servers else 0
    dense = FLOAT_BYTES * world.elements(stage) * (2 + 2 * sparse + own)
    part, rows = world.partition.stages[stage], config.train.batch_size
    # What forward keeps for backward, twice: the values and their gradients.
    widths = [part.input_width, *(_width(world, name) for name in part.layer_names)]
    activations = 2 * FLOAT_BYTES * rows * sum(widths)
    tables = 0
    if part.has_interaction:
        pooled = FLOAT_BYTES * rows * len(world.ids.rows) * world.spec.embedding_dim
        activations += 2 * pooled * (1 + config.embedding.staleness)
        if not topology.table_servers:
            copies = 2 if config.checkpoint.every or config.checkpoint.minutes else 1
            tables = sum(world.ids.rows) * _row_bytes(world) * copies // topology.trainers
    return dense + activations + tables + READER_BYTES


def _width(world: Layout, layer: str) -> int:
    return world.spec.dense_shapes()[f"{layer}.weight"][0]


def _row_bytes(world: Layout) -> int:
    """Of a row of a table, with the state of its optimizer."""
    state = {"sgd": 0, "rowwise_adagrad": 1, "adagrad": world.spec.embedding_dim}
    return FLOAT_BYTES * (world.spec.embedding_dim + state[world.config.embedding.optimizer])
