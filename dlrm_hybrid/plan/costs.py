"""CPU seconds of a unit of each kind of work, and what they make of the parts of a world."""

from __future__ import annotations

from dataclasses import dataclass

from dlrm_hybrid.plan.layout import Layout


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitCosts:
    """CPU seconds of the main thread of a rank, but those of the network's threads.

    Attributes:
        multiply: of a weight and a row, forward and backward.
        layer: of a layer's product and a micro-batch, whatever its size.
        interact: of a row, in the stage with the interaction.
        own_lookup: of a row, where one trainer has the tables.
        lookup: of a row, where trainers share them.
        ask: of a row, where a trainer asks table servers.
        serve: of a row, one lookup or one update on table servers, all of them together.
        encode_gradient: of an element, in a push.
        encode_activation: of an element that is sent through a cut, forward or backward.
        decode_activation: of one that has come.
        take_version: of an element, decoded and applied by a worker.
        loop: of a step: reading rows, and what belongs to no other span.
        server_decode: of an element of a push.
        server_apply: of an element, for each push that a version is made of.
        server_encode: of an element of a version.
        send: of a message, of the thread that sends it.
        send_byte: for each of its bytes.
        carry: of a message, of the network's thread at each end.
        carry_byte: for each of its bytes.
        wake: how much later a thread goes on whose frame has come, if a core is free; no CPU.
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
        """Of an element that a worker updates itself."""
        return self.server_apply or self.take_version


def compute_features(world: Layout, stage: int) -> tuple[float, float, float]:
    """Of a step: rows times weights, products times micro-batches, rows that interact."""
    config, matrices = world.config, world.matrices(stage)
    rows = config.train.batch_size
    return (
        rows * sum(outputs * inputs for outputs, inputs in matrices),
        config.schedule.microbatches * len(matrices),
        rows if world.partition.stages[stage].has_interaction else 0,
    )


def compute_seconds(units: UnitCosts, world: Layout, stage: int) -> float:
    """Forward and backward of a whole step."""
    weights, layers, interacting = compute_features(world, stage)
    return units.multiply * weights + units.layer * layers + units.interact * interacting


def one_process_seconds(units: UnitCosts, world: Layout) -> float:
    """A step of the whole model in one process, with tables and optimizer of its own."""
    stages = range(world.topology.stages)
    rows = world.config.train.batch_size
    computing = sum(compute_seconds(units, world, stage) for stage in stages)
    updating = units.update * sum(one.count for one in world.tensors)
    return computing + updating + units.own_lookup * rows + units.loop


def cut_elements(world: Layout, stage: int) -> int:
    """Elements that a stage sends through its cuts in a step; as many come."""
    stages, rows = world.partition.stages, world.config.train.batch_size
    cuts = [cut for cut in (stage - 1, stage) if 0 <= cut < len(stages) - 1]
    return rows * sum(stages[cut].output_width for cut in cuts)
