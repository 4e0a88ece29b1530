"""The groups of tensors in a checkpoint, whichever rank holds them."""

from __future__ import annotations

import re
from collections.abc import Iterable

from dlrm_hybrid.model.tensors import Piece
from dlrm_hybrid.parallel.compression import PREFIX as COMPRESSOR_PREFIX
from dlrm_hybrid.parallel.finite import EMBEDDING_PREFIX

COMPRESSOR = "compressor"
_VERSION = re.compile(r"\.(published|behind[0-9]+)$")


def piece_groups(pieces: Iterable[Piece]) -> dict[str, list[Piece]]:
    """What one rank adds to a checkpoint, by group; none of them is empty.

    `dense` and `embeddings` are in every checkpoint, the others where the layout of the world needs
    them: `versions` that workers have of weights, and the state of a `compressor`.
    """
    groups: dict[str, list[Piece]] = {}
    for piece in pieces:
        groups.setdefault(_group(piece.name), []).append(piece)
    return groups


def _group(name: str) -> str:
    if name.startswith(COMPRESSOR_PREFIX):
        return COMPRESSOR
    if name.startswith(EMBEDDING_PREFIX):
        return "embeddings"
    return "versions" if _VERSION.search(name) else "dense"
