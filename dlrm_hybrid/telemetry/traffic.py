"""Counts the messages and bytes that a rank sends and receives, by class of traffic."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from types import MappingProxyType


class Traffic(StrEnum):
    """Classes of traffic: what messages are sent for."""

    GRADIENT_PUSH = "gradient_push"
    PARAMETER_PULL = "parameter_pull"
    ACTIVATION = "activation"
    ACTIVATION_GRADIENT = "activation_gradient"
    EMBEDDING = "embedding"
    CONTROL = "control"


class Phase(StrEnum):
    """Phases of a run; warm-up is the first training steps of an attempt."""

    WARMUP = "warmup"
    TRAIN = "train"
    EVALUATE = "evaluate"
    CHECKPOINT = "checkpoint"


@dataclass(frozen=True, slots=True)
class Tally:
    """Messages and bytes of one class in one phase.

    Attributes:
        dense_equivalent_bytes: their bytes as plain float32.
    """

    messages: int = 0
    num_bytes: int = 0
    dense_equivalent_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Versions:
    """Sums over the versions of weights that servers have published.

    Attributes:
        elements: number of weights in them.
        told: number of these that pulls send.
    """

    elements: int = 0
    told: int = 0

    def plus(self, other: Versions) -> Versions:
        """The sums of both."""
        return Versions(self.elements + other.elements, self.told + other.told)


Tallies = Mapping[Traffic, Tally]
"""A tally for each class of traffic."""


@dataclass(slots=True)
class TrafficCounter:
    """Counts the messages of one rank in one phase."""

    _sums: dict[Traffic, list[int]] = field(
        default_factory=lambda: {traffic: [0, 0, 0] for traffic in Traffic}
    )

    def add(self, traffic: Traffic, num_bytes: int, dense_equivalent_bytes: int) -> None:
        """Count one message of a class of traffic."""
        sums = self._sums[traffic]
        sums[0] += 1
        sums[1] += num_bytes
        sums[2] += dense_equivalent_bytes

    def snapshot(self) -> Tallies:
        """A copy of the sums until now."""
        return MappingProxyType({traffic: Tally(*sums) for traffic, sums in self._sums.items()})


@dataclass(frozen=True, slots=True)
class Counters:
    """Counters of both directions of one rank in one phase.

    Attributes:
        received: messages received; without the dense equivalent of collectives, unknown here.
    """

    sent: TrafficCounter = field(default_factory=TrafficCounter)
    received: TrafficCounter = field(default_factory=TrafficCounter)
