"""Running statistics of batch norm: each trainer has its own; evaluations use their mean.

Trainers exchange them for evaluations only. Checkpoints hold those of every trainer, so that a run
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
from dlrm_hybrid.types import DataError, Group
from dlrm_hybrid.wire.frame import Kind

PREFIX = "statistics."
"""Begins names of statistics in checkpoints, before the trainer and the name in the model."""


def pieces(trainer: int, model: StageModel) -> list[Piece]:
    """Views of a trainer's statistics in one stage, by names that no other worker uses."""
    tensors = model.statistics().items()
    named = {f"{PREFIX}{trainer}.{name}": tensor for name, tensor in tensors}
    return full_pieces(named, Group.STATISTICS)


def mean(of: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """Average the statistics of all trainers, in order, by name."""
    return {name: torch.stack([one[name] for one in of]).double().mean(0).float() for name in of[0]}


def exchanged(
    messenger: Messenger, ranks: Sequence[int], model: StageModel, step: int
) -> dict[str, Tensor]:
    """Average the statistics of some workers of one stage; the same bits in each of them.

    Args:
        messenger: messenger of this worker.
        ranks: ranks of these workers; the first collects.
        model: model of this rank.
        step: number of the exchange.
    """
    tensors = {name: tensor.cpu() for name, tensor in model.statistics().items()}
    if len(ranks) == 1 or not tensors:
        return tensors
    root, *peers = ranks
    if messenger.rank != root:
        messenger.send_tensors(root, Kind.STATISTICS, step, tensors)
        return messenger.receive_tensors(root, Kind.STATISTICS, step)
    answers = (messenger.receive_tensors(rank, Kind.STATISTICS, step) for rank in peers)
    average = mean([tensors, *answers])
    for rank in peers:
        messenger.send_tensors(rank, Kind.STATISTICS, step, average)
    return average


def resume(checkpoint: Checkpoint, pieces: Iterable[Piece], trainers: int) -> None:
    """Load each trainer's own statistics, or the mean if the number of trainers differs.

    Args:
        checkpoint: checkpoint to resume from.
        pieces: statistics as from `pieces`, of any trainers.
        trainers: number of trainers in the run.

    Raises:
        DataError: the checkpoint lacks them.
    """
    numbers = {_split(name)[0] for name in checkpoint.names(Group.STATISTICS)}
    if numbers == set(map(str, range(trainers))):
        checkpoint.fill(pieces)
    else:
        fill_with_mean(checkpoint, pieces)


def fill_with_mean(checkpoint: Checkpoint, pieces: Iterable[Piece]) -> None:
    """Load the mean statistics into all pieces; raises as `resume`."""
    by_name = {piece.name: piece for piece in pieces}
    shapes = {_split(name)[1]: piece.shape for name, piece in by_name.items()}
    means = saved(checkpoint, shapes)
    for name, piece in by_name.items():
        piece.view.copy_(means[_split(name)[1]])


def saved(checkpoint: Checkpoint, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Tensor]:
    """Average the statistics of all trainers of a checkpoint.

    Args:
        checkpoint: checkpoint of a run with batch norm.
        shapes: shapes of the statistics, by the names of the model.

    Raises:
        DataError: the checkpoint lacks them.
    """
    means: dict[str, Tensor] = {}
    for name, shape in shapes.items():
        of_trainers = [
            entry for entry in checkpoint.names(Group.STATISTICS) if _split(entry)[1] == name
        ]
        if not of_trainers:
            raise DataError(f"{checkpoint.folder}: no tensor {name} of any trainer")
        tensors = {entry: torch.empty(shape) for entry in sorted(of_trainers, key=_place)}
        checkpoint.fill(full_pieces(tensors))
        means |= mean([{name: tensor} for tensor in tensors.values()])
    return means


def model_name(name: str) -> str:
    """The model's name of statistics of this name in a checkpoint."""
    return _split(name)[1]


def _split(name: str) -> tuple[str, str]:
    """Split a name into the trainer, as written, and the name in the model."""
    trainer, _, suffix = name.removeprefix(PREFIX).partition(".")
    return trainer, suffix


def _place(name: str) -> tuple[int, str]:
    """Sort key of names: by trainer, and trainers by number."""
    trainer, _ = _split(name)
    return len(trainer), trainer
