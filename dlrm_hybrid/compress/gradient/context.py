"""What a compressor of gradients is built for, and by whom."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Protocol

if TYPE_CHECKING:
    from dlrm_hybrid.compress.gradient.compressor import Compressor
    from dlrm_hybrid.compress.gradient.layout import Layout


@dataclass(frozen=True, slots=True, kw_only=True)
class StageContext:
    """The worker that a compressor is built for.

    Attributes:
        layout: of the dense tensors of its stage.
        trainer: its number.
        trainers: how many there are.
        model_elements: of all dense tensors of the model.
        last_layer: name of the model's last layer; None if none is special.
        lr: learning rate by step.
        seed: of the run.
    """

    layout: Layout
    trainer: int
    trainers: int
    model_elements: int
    last_layer: str | None
    lr: Callable[[int], float]
    seed: int


class Builder(Protocol):
    """What the library needs of a method."""

    sends_all: ClassVar[bool] = False
    """Whether every element travels as it is, which needs no compressor."""
    leaves_last_layer: ClassVar[bool] = False
    """Whether gradients of the last layer are sent as they are."""

    @property
    def uses_lr(self) -> bool:
        """Whether it needs the learning rate of each step."""
        return False

    def build(self, context: StageContext) -> Compressor:
        """Create the compressor of one trainer."""
        ...


def module_of(parameter: str) -> str:
    """The name of the module that a parameter belongs to; "" if it is the model itself."""
    return parameter.rpartition(".")[0]
