"""What a method is told of the worker whose gradients it compresses."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from dlrm_hybrid.compress.gradient.compressor import Spec


@dataclass(frozen=True, slots=True, kw_only=True)
class Holder:
    """Whose gradients they are.

    Attributes:
        specs: the dense tensors of the stage.
        trainer: its number.
        model_elements: of all dense tensors of the model.
        lr: learning rate by step.
    """

    specs: Sequence[Spec]
    trainer: int
    model_elements: int
    lr: Callable[[int], float]
