"""Unit costs, CPU seconds of a unit of each kind of work, and the costs of stages from them."""

from __future__ import annotations

from dataclasses import dataclass

from dlrm_hybrid.plan.layout import Layout


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitCosts:
    """CPU seconds per unit of work of a rank's main thread; `carry` is the network thread's.

    Attributes:
        multiply: per weight and row, forward and backward.
        layer: per layer's product and micro-batch, whatever its size.
        interact: per row, in the stage with the interaction.
        own_lookup: per row, if the only trainer has the tables.
        lookup: per row, if trainers share the tables.
        ask: per row, if a trainer asks table servers.
        serve: per row, for one lookup or update, on all table servers together.
        encode_gradient: per element of a push.
        encode_activation: per element sent through a cut, forward or backward.
        decode_activation: per element received through a cut.
        take_version: per element of a version that a worker decodes and applies.
        loop: per step, for reading rows and everything else.
        server_decode: per element of a push.
        server_apply: per element of a version and push averaged into it.
        server_encode: per element of a version.
        send: per message, on the thread that sends it.
        send_byte: per byte of it.
        carry: per message, on the network thread of each end.
        carry_byte: per byte of it.
        wake: latency, not CPU, from a frame's arrival until its thread runs on a free core.
    """

    multiply: float
    layer: float
    interact: float
    own_lookup: float
    lookup: float
    ask: float
    serve: float
    encode_gradient: float
    encode_activation: float
    decode_activation: float
    take_version: float
    loop: float
    server_decode: float
    server_apply: float
    server_encode: float
    send: float
    send_byte: float
    carry: float
    carry_byte: float
    wake: float

    @property
    def update(self) -> float:
        """Cost per element of a worker that has its own optimizer."""
        return self.server_apply or self.take_version


def compute_features(world: Layout, stage: int) -> tuple[float, float, float]:
    """Units of a stage's step: rows × weights, products × micro-batches, rows of interaction."""
    config, matrices = world.config, world.matrices(stage)
    rows = config.train.batch_size
    return (
        rows * sum(outputs * inputs for outputs, inputs in matrices),
        config.schedule.microbatches * len(matrices),
        rows if world.partition.stages[stage].has_interaction else 0,
    )


def compute_seconds(units: UnitCosts, world: Layout, stage: int) -> float:
    """Seconds of a stage's forward and backward in a step."""
    weights, layers, interacting = compute_features(world, stage)
    return units.multiply * weights + units.layer * layers + units.interact * interacting


def one_process_seconds(units: UnitCosts, world: Layout) -> float:
    """Seconds of a step of the whole model in one process, without a network."""
    stages = range(world.topology.stages)
    rows = world.config.train.batch_size
    computing = sum(compute_seconds(units, world, stage) for stage in stages)
    updating = units.update * sum(tensor.count for tensor in world.tensors)
    return computing + updating + units.own_lookup * rows + units.loop


def cut_elements(world: Layout, stage: int) -> int:
    """Number of elements that a stage sends through its cuts in a step; it receives as many."""
    stages, rows = world.partition.stages, world.config.train.batch_size
    cuts = [cut for cut in (stage - 1, stage) if 0 <= cut < len(stages) - 1]
    return rows * sum(stages[cut].output_width for cut in cuts)
