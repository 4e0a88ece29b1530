"""Guards against gradients and weights that are not finite."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from dlrm_hybrid.arrays import Float32s
from dlrm_hybrid.model.optimizer import LrSchedule
from dlrm_hybrid.types import DivergedError

EMBEDDING_PREFIX = "embedding."
LOOKUPS_PREFIX = "lookups."  # rows of tables, looked up for later batches
# To check the dense weights takes 60 µs with the model of the paper: once in so many rows it is a
# thousandth of the step. What is not finite stays so, so a late check still finds it.
CHECKED_ROWS = 1024
CHECKED_STEPS = 32  # on a device, which must be waited for


def is_finite(tensor: Tensor) -> bool:
    """Whether every element is finite; reads the tensor once, at the speed of memory."""
    if not tensor.is_floating_point():
        return True
    # An element that is not finite makes the sum so; finite elements do so only near the limit.
    return math.isfinite(float(tensor.sum())) or bool(torch.isfinite(tensor).all())


def first_not_finite(tensors: Iterable[tuple[str, Tensor]]) -> str | None:
    """The name of the first tensor of a model or checkpoint with an element that is not finite."""
    for name, tensor in tensors:
        if not is_finite(tensor):
            return name
    return None


def key_of_rate(name: str) -> str:
    """The configuration key of a tensor's learning rate."""
    return "embedding.lr" if name.startswith((EMBEDDING_PREFIX, LOOKUPS_PREFIX)) else "optimizer.lr"


def check_loss(step: int, loss_sum: float, schedule: LrSchedule) -> None:
    """Refuse a loss that is not finite.

    Args:
        step: counted from 0.
        loss_sum: sum of the losses of its rows.
        schedule: learning rate of the dense parameters.

    Raises:
        DivergedError: names step, loss and rate.
    """
    if not math.isfinite(loss_sum):
        raise DivergedError(
            f"step {step + 1}: the loss is {loss_sum} at a learning rate of {schedule.lr(step)}; "
            "optimizer.lr or embedding.lr may be too high"
        )


def check_weights(
    step: int,
    worker: str,
    weights: Mapping[str, Tensor],
    tensors: Callable[[], Mapping[str, Tensor]],
    rates: Mapping[str, float],
) -> None:
    """Refuse dense weights that are not finite: a ReLU can hide a NaN from the loss.

    Args:
        step: the step after which they are checked, from 0; the fault may be some steps older.
        worker: name of their owner.
        weights: dense weights by name.
        tensors: returns all tensors of the model; called if a weight is at fault.
        rates: learning rates by their keys.

    Raises:
        DivergedError: names step, tensor, worker and rates.
    """
    on_device = [weight for weight in weights.values() if not weight.is_cpu]
    if on_device and (step + 1) % CHECKED_STEPS:
        return
    # On a device first one look at the sum of all; only a look at each tells if the sum overflows.
    if on_device and math.isfinite(float(torch.stack([w.sum() for w in on_device]).sum())):
        return
    if first_not_finite(weights.items()) is None:
        return
    names = [name for name, tensor in tensors().items() if not is_finite(tensor)]
    keys = [key for key in rates if any(key_of_rate(name) == key for name in names)]
    raise DivergedError(
        f"step {step + 1}: {names[0]} of {worker} is not finite; "
        f"{' or '.join(f'{key} = {rates[key]}' for key in keys)} may be too high"
    )


def is_check_due(step: int, rows: int) -> bool:
    """Whether `check_weights` is worth its time after this step, which had `rows` rows."""
    return (step + 1) % max(1, CHECKED_ROWS // rows) == 0


def check_finite(
    name: str,
    step: int,
    mean: Float32s,
    gradients: Sequence[Float32s],
    sender: Callable[[int], str],
) -> None:
    """Refuse a mean that is not finite, and name the trainers whose gradients made it so.

    Args:
        name: name of the tensor.
        step: counted from 0.
        mean: mean of the gradients.
        gradients: the gradients that were averaged.
        sender: names the sender of the gradient at an index.

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
