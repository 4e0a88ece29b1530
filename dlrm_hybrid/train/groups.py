"""The groups of tensors in a checkpoint, whoever holds them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

from torch import Tensor

from dlrm_hybrid.model.tensors import Piece
from dlrm_hybrid.parallel.compression import PREFIX as COMPRESSOR_PREFIX
from dlrm_hybrid.parallel.finite import EMBEDDING_PREFIX

COMPRESSOR = "compressor"
VERSIONS = "versions"
VERSION_SUFFIX = re.compile(r"\.(published|behind[0-9]+)$")


def checkpoint_groups(tensors: Mapping[str, Tensor]) -> dict[str, dict[str, Tensor]]:
    """The tensors of a whole checkpoint by group.

    `dense` and `embeddings` are there in every checkpoint, the others where the layout of the world
    needs them: `versions` that workers have of weights, and what a `compressor` remembers.
    """
    groups: dict[str, dict[str, Tensor]] = {"dense": {}, "embeddings": {}}
    for name, tensor in tensors.items():
        groups.setdefault(_group(name), {})[name] = tensor
    return groups


def piece_groups(pieces: Iterable[Piece]) -> dict[str, list[Piece]]:
    """What one rank adds to a checkpoint, by the same groups; none of them is empty."""
    groups: dict[str, list[Piece]] = {}
    for piece in pieces:
        groups.setdefault(_group(piece.name), []).append(piece)
    return groups


def _group(name: str) -> str:
    if name.startswith(COMPRESSOR_PREFIX):
        return COMPRESSOR
    if name.startswith(EMBEDDING_PREFIX):
        return "embeddings"
    return VERSIONS if VERSION_SUFFIX.search(name) else "dense"
