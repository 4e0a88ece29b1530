"""Counts what a rank sends, by what it is for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from types import MappingProxyType


class Traffic(StrEnum):
    """What bytes are sent for."""

    GRADIENT_PUSH = "gradient_push"
    PARAMETER_PULL = "parameter_pull"
    ACTIVATION = "activation"
    ACTIVATION_GRADIENT = "activation_gradient"
    EMBEDDING = "embedding"
    CONTROL = "control"


class Phase(StrEnum):
    """What a run is doing while it sends; warm-up is the first training steps of an attempt."""

    WARMUP = "warmup"
    TRAIN = "train"
    EVALUATE = "evaluate"
    CHECKPOINT = "checkpoint"


@dataclass(frozen=True, slots=True)
class Tally:
    """Messages of one class and phase, and their bytes, added up.

    Attributes:
        messages: how many.
        num_bytes: that were sent.
        dense_equivalent_bytes: of the same messages as plain float32.
    """

    messages: int = 0
    num_bytes: int = 0
    dense_equivalent_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Versions:
    """Sums over versions of weights that servers have made.

    Attributes:
        elements: weights of them.
        told: of these, the weights that pulls send.
    """

    elements: int = 0
    told: int = 0

    def plus(self, other: Versions) -> Versions:
        """The sums of both."""
        return Versions(self.elements + other.elements, self.told + other.told)


Tallies = Mapping[Traffic, Tally]
"""One tally for each class."""


def _zeros() -> dict[Traffic, list[int]]:
    return {traffic: [0, 0, 0] for traffic in Traffic}


@dataclass(slots=True)
class TrafficCounter:
    """Counts the messages of one rank in one phase."""

    _sums: dict[Traffic, list[int]] = field(default_factory=_zeros)

    def add(self, traffic: Traffic, num_bytes: int, dense_equivalent_bytes: int) -> None:
        """Count one message of a class of traffic."""
        sums = self._sums[traffic]
        sums[0] += 1
        sums[1] += num_bytes
        sums[2] += dense_equivalent_bytes

    def snapshot(self) -> Tallies:
        """The sums until now; they do not change any more."""
        return MappingProxyType({traffic: Tally(*sums) for traffic, sums in self._sums.items()})


@dataclass(frozen=True, slots=True)
class Counters:
    """Counts both directions of one rank in one phase.

    Attributes:
        sent: by the rank.
        received: by the rank; the dense equivalent of what collectives bring is not known here.
    """

    sent: TrafficCounter = field(default_factory=TrafficCounter)
    received: TrafficCounter = field(default_factory=TrafficCounter)
