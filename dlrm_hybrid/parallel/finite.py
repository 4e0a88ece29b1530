"""The guard against gradients and weights that are not finite."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dlrm_hybrid.types import DivergedError

Array = NDArray[np.float32]
EMBEDDING_PREFIX = "embedding."
NAN_IS_NONE = ".threshold"  # of a compressor that has not found one yet


def is_finite(tensor: Tensor) -> bool:
    """Whether every element is; reads a tensor once, at the speed of memory."""
    if not tensor.is_floating_point():
        return True
    # An element that is not finite makes the sum so; finite elements do so only near the limit.
    return math.isfinite(float(tensor.sum())) or bool(torch.isfinite(tensor).all())


def first_not_finite(tensors: Iterable[tuple[str, Tensor]]) -> str | None:
    """The name of the first tensor of a model or checkpoint with an element that is not finite."""
    for name, tensor in tensors:
        if not name.endswith(NAN_IS_NONE) and not is_finite(tensor):
            return name
    return None


def key_of_rate(name: str) -> str:
    """The key of the learning rate with which a tensor learns."""
    return "embedding.lr" if name.startswith(EMBEDDING_PREFIX) else "optimizer.lr"


def check_finite(
    name: str,
    step: int,
    mean: Array,
    gradients: Sequence[Array],
    sender: Callable[[int], str],
) -> None:
    """Refuse a mean that is not finite, and say whose gradient it was.

    Args:
        name: of the tensor.
        step: counted from 0.
        mean: of the gradients.
        gradients: what it was made from.
        sender: names who sent the gradient with this position.

    Raises:
        DivergedError: names trainer, step and tensor.
    """
    with np.errstate(over="ignore", invalid="ignore"):
        total = float(mean.sum())
    if math.isfinite(total) or np.isfinite(mean).all():
        return
    at_fault = [
        sender(position)
        for position, gradient in enumerate(gradients)
        if not np.isfinite(gradient).all()
    ]
    raise DivergedError(
        f"step {step + 1}: the gradient of {name} from {', '.join(at_fault) or 'all trainers'} "
        "is not finite; optimizer.lr or embedding.lr may be too high"
    )
