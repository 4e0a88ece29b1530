"""What compressors remember, for other trainers than those that saved it."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from dlrm_hybrid.checkpoint.reader import Checkpoint
from dlrm_hybrid.parallel.compression import PREFIX

# Gradients that wait, and their running means: a server takes the mean of what trainers push.
PENDING = (".residual", ".momentum")


def remembered(
    checkpoint: Checkpoint, own: Mapping[str, Tensor], trainers: int | None
) -> dict[str, Tensor]:
    """The state that compressors resume with.

    Args:
        checkpoint: to resume from.
        own: what they have before.
        trainers: that saved the checkpoint, with other compressors; None if with the same.
    """
    if trainers is None:
        return checkpoint.tensors(own)
    names = {_of(trainer, name) for name in own for trainer in range(trainers)}
    return spread(checkpoint.tensors(names), own, trainers)


def spread(
    saved: Mapping[str, Tensor], own: Mapping[str, Tensor], trainers: int
) -> dict[str, Tensor]:
    """Values for `own`: every trainer takes the mean of the residuals at those that saved.

    So the mean that a server will take is what it would have been. All else is left as it is in
    `own`, new: thresholds are found again at the next step.

    Args:
        saved: by `trainer.<number>.<name>`, of all trainers.
        own: of any number of trainers or stages, not used yet.
        trainers: that saved.

    Returns:
        As `own`; the residuals under a name or shape that is no more is left out.
    """
    return {name: _mean(saved, name, tensor, trainers) for name, tensor in own.items()}


def _mean(saved: Mapping[str, Tensor], name: str, own: Tensor, trainers: int) -> Tensor:
    found = [saved.get(_of(trainer, name)) for trainer in range(trainers)]
    parts = [part for part in found if part is not None and part.shape == own.shape]
    if not name.endswith(PENDING) or len(parts) < trainers:
        return own.clone()
    return torch.stack(parts).double().mean(0).to(own.dtype)


def _of(trainer: int, name: str) -> str:
    """What another trainer calls the same."""
    _, _, rest = name.removeprefix(PREFIX).partition(".")
    return f"{PREFIX}{trainer}.{rest}"
