"""Running statistics of batch norm: each trainer has its own; evaluations use their mean.

They are exchanged for evaluations only. Checkpoints hold those of every trainer, so that a run
resumes as if unbroken; readers take the mean.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor

from dlrm_hybrid.checkpoint.reader import Checkpoint
from dlrm_hybrid.model.dlrm import StageModel
from dlrm_hybrid.model.tensors import Piece, full_pieces
from dlrm_hybrid.parallel.messages import Messenger
from dlrm_hybrid.types import DataError
from dlrm_hybrid.wire.frame import Kind

PREFIX = "statistics."
"""Begins their names in checkpoints, before the trainer and the name in the model."""
GROUP = "statistics"


def named(trainer: int, model: StageModel) -> dict[str, Tensor]:
    """Views of a trainer's statistics in one stage, by names that no other worker uses."""
    return {f"{PREFIX}{trainer}.{name}": one for name, one in model.statistics().items()}


def mean(of: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """Average the statistics of all trainers, in order, by name."""
    return {name: torch.stack([one[name] for one in of]).double().mean(0).float() for name in of[0]}


def exchanged(
    messenger: Messenger, ranks: Sequence[int], model: StageModel, step: int
) -> dict[str, Tensor]:
    """Average the statistics of some workers of one stage; the same bits in each of them.

    Args:
        messenger: that of this worker.
        ranks: those of all of them; the first collects.
        model: that of this rank.
        step: number of the exchange.
    """
    own = {name: one.cpu() for name, one in model.statistics().items()}
    if len(ranks) == 1 or not own:
        return own
    first, *others = ranks
    if messenger.rank != first:
        messenger.send_tensors(first, Kind.STATISTICS, step, own)
        return messenger.receive_tensors(first, Kind.STATISTICS, step)
    rest = (messenger.receive_tensors(rank, Kind.STATISTICS, step) for rank in others)
    found = mean([own, *rest])
    for rank in others:
        messenger.send_tensors(rank, Kind.STATISTICS, step, found)
    return found


def resume(checkpoint: Checkpoint, pieces: Iterable[Piece], trainers: int) -> None:
    """Load each trainer's own statistics, or the mean if the number of trainers differs.

    Args:
        checkpoint: the one to resume from.
        pieces: statistics as `named`, of any trainers.
        trainers: number in the run.

    Raises:
        DataError: the checkpoint lacks them.
    """
    known = {_split(name)[0] for name in checkpoint.names(GROUP)}
    if known == set(map(str, range(trainers))):
        checkpoint.fill(pieces)
    else:
        fill_with_mean(checkpoint, pieces)


def fill_with_mean(checkpoint: Checkpoint, pieces: Iterable[Piece]) -> None:
    """Load the mean statistics into all pieces; raises as `resume`."""
    held = {piece.name: piece for piece in pieces}
    shapes = {_split(name)[1]: piece.shape for name, piece in held.items()}
    found = saved(checkpoint, shapes)
    for name, piece in held.items():
        piece.view.copy_(found[_split(name)[1]])


def saved(checkpoint: Checkpoint, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Tensor]:
    """Average the statistics of all trainers of a checkpoint.

    Args:
        checkpoint: one of a run with batch norm.
        shapes: those of the statistics, by the names of the model.

    Raises:
        DataError: the checkpoint lacks them.
    """
    found: dict[str, Tensor] = {}
    for name, shape in shapes.items():
        of_trainers = [one for one in checkpoint.names(GROUP) if _split(one)[1] == name]
        if not of_trainers:
            raise DataError(f"{checkpoint.folder}: no tensor {name} of any trainer")
        held = {one: torch.empty(shape) for one in sorted(of_trainers, key=_place)}
        checkpoint.fill(full_pieces(held))
        found |= mean([{name: one} for one in held.values()])
    return found


def model_name(name: str) -> str:
    """The model's name of statistics that are `named` so."""
    return _split(name)[1]


def _split(name: str) -> tuple[str, str]:
    """Split a name into the trainer, as written, and the name in the model."""
    trainer, _, rest = name.removeprefix(PREFIX).partition(".")
    return trainer, rest


def _place(name: str) -> tuple[int, str]:
    """Sort key of names: by trainer, and trainers by number."""
    trainer, _ = _split(name)
    return len(trainer), trainer
