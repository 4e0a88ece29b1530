"""The mean of the trainers' gradients, summed in one order, and the guard against broken ones."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from dlrm_hybrid.types import DivergedError

Array = NDArray[np.float32]


def mean_into(out: Array, gradients: Sequence[Array]) -> None:
    """out = ((g0 + g1) + g2 …) / T, of the gradients of T trainers; one is its own mean.

    All of one shape, float32.
    """
    if len(gradients) == 1:
        np.copyto(out, gradients[0])
        return
    np.add(gradients[0], gradients[1], out=out)
    for gradient in gradients[2:]:
        np.add(out, gradient, out=out)
    np.divide(out, np.float32(len(gradients)), out=out)


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
