"""CPU seconds of a unit of each kind of work, and of the parts of a world made of such units."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dlrm_hybrid.plan.layout import Layout, matrices
from dlrm_hybrid.plan.simulation.machine import MessageCosts
from dlrm_hybrid.telemetry.spans import Span


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
        messages: of frames.
        factors: by span and stage, measured over these units, for worlds with the cuts and
            micro-batches of `fits`.
        fits: cuts, batch size and micro-batches of the run that was measured.
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
    messages: MessageCosts
    factors: Mapping[Span, Sequence[float]] = field(default_factory=dict["Span", "Sequence[float]"])
    fits: tuple[object, ...] = ()

    def factor(self, world: Layout, span: Span, stage: int) -> float:
        """What a stage took of a span, over what its units would; 1 where nobody knows."""
        if span not in self.factors or self.fits != shape_of(world):
            return 1.0
        return self.factors[span][stage]


def shape_of(world: Layout) -> tuple[object, ...]:
    """What must be alike for a stage to be the same stage."""
    config = world.config
    return world.partition.cuts, config.train.batch_size, config.schedule.microbatches


def multiplications(world: Layout, stage: int) -> int:
    """Weights that a row meets in a stage."""
    return sum(outputs * inputs for outputs, inputs in matrices(world, stage))


def cut_elements(world: Layout, stage: int) -> int:
    """Elements that a stage sends through its cuts in a step; as many come."""
    part, rows = world.partition.stages[stage], world.config.train.batch_size
    before = 0 if part.is_first else part.input_width
    after = 0 if part.is_last else part.output_width
    return rows * (before + after)


def compute_features(world: Layout, stage: int) -> tuple[float, float, float]:
    """Of a step: rows times weights, products times micro-batches, rows that interact."""
    part, config = world.partition.stages[stage], world.config
    rows = config.train.batch_size
    return (
        rows * multiplications(world, stage),
        config.schedule.microbatches * len(matrices(world, stage)),
        rows if part.has_interaction else 0,
    )


def compute_seconds(units: UnitCosts, world: Layout, stage: int) -> float:
    """Forward and backward of a whole step."""
    weights, layers, interacting = compute_features(world, stage)
    seconds = units.multiply * weights + units.layer * layers + units.interact * interacting
    return seconds * units.factor(world, Span.COMPUTE, stage)


def encode_push_seconds(units: UnitCosts, world: Layout, stage: int) -> float:
    """Of one push of a stage, to all servers."""
    return units.encode_gradient * world.elements(stage) * units.factor(world, Span.ENCODE, stage)


def take_version_seconds(units: UnitCosts, world: Layout, stage: int) -> float:
    """Of one version of a stage, of all servers."""
    return units.take_version * world.elements(stage) * units.factor(world, Span.APPLY, stage)


def one_process_seconds(units: UnitCosts, world: Layout) -> float:
    """A step of the whole model in one process, with tables and optimizer of its own."""
    stages = range(world.topology.stages)
    rows = world.config.train.batch_size
    computing = sum(compute_seconds(units, world, stage) for stage in stages)
    applying = units.server_apply or units.take_version
    updating = applying * sum(one.count for one in world.tensors)
    return computing + updating + units.own_lookup * rows + units.loop


def fitted(features: Sequence[Sequence[float]], measured: Sequence[float]) -> tuple[float, ...]:
    """Coefficients of 0 or more with the least squares of relative errors.

    Features that no row has get 0. There are few, so every choice of them is tried.

    Args:
        features: of each row, as many as there are coefficients.
        measured: of each row, 0 or more.
    """
    rows = [(one, value) for one, value in zip(features, measured, strict=True) if any(one)]
    width = len(features[0])
    best, found = np.inf, (0.0,) * width
    if not rows:
        return found
    scale = max(value for _, value in rows) or 1.0
    weights = np.array([1 / max(value, 0.01 * scale) for _, value in rows])
    x = np.array([one for one, _ in rows], float) * weights[:, None]
    y = np.array([value for _, value in rows]) * weights
    for size in range(1, width + 1):
        for chosen in map(list, combinations(range(width), size)):
            norms = np.linalg.norm(x[:, chosen], axis=0)
            if not norms.all():
                continue
            part = _least_squares(x[:, chosen] / norms, y) / norms
            error = float(np.square(x[:, chosen] @ part - y).sum())
            if (part >= 0).all() and error < best * (1 - 1e-9):
                full = np.zeros(width)
                full[chosen] = part
                best, found = error, tuple(map(float, full))
    return found


def _least_squares(x: NDArray[np.float64], y: NDArray[np.float64]) -> NDArray[np.float64]:
    solved: Any = np.linalg.lstsq(x, y, rcond=None)
    return solved[0]
