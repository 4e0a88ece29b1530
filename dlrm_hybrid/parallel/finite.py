"""The guard against gradients that are not finite."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from dlrm_hybrid.types import DivergedError

Array = NDArray[np.float32]


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
    # An element that is not finite makes the sum so; finite elements do so only near the limit.
    if math.isfinite(total) or np.isfinite(mean).all():
        return
    at_fault = [
        sender(position)
        for position, gradient in enumerate(gradients)
        if not np.isfinite(gradient).all()
    ]
    raise DivergedError(
        f"step {step + 1}: the gradient of {name} from {', '.join(at_fault) or 'all trainers'} "
        "is not finite; optimizer.lr may be too high"
    )
