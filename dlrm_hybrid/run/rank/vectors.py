"""Rows of tables that begin with given vectors, wherever they are."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from dlrm_hybrid.model.tensors import Piece
from dlrm_hybrid.run.rank.job import Job


def begin_with_vectors(job: Job, pieces: Iterable[Piece]) -> None:
    """Begin the rows held in this process with the vectors of their categories, if any have such.

    Args:
        job: job of the process.
        pieces: the pieces that it holds.

    Raises:
        DataError: the vectors beside the prepared rows are damaged.
    """
    held, shards, spec = [*pieces], job.prepared, job.layout.spec
    if shards is None:
        return
    for vectors in shards.manifest.vectors:
        name = f"{spec.table_names[spec.columns[vectors.column]]}.weight"
        found = [piece for piece in held if piece.name == name]
        for ids_K, values_KD in shards.vectors(vectors) if found else ():
            for piece in found:
                rows_K, off_K = divmod(ids_K - piece.begin[0], piece.every)
                here_K = (off_K == 0) & (rows_K >= 0) & (rows_K < len(piece.view))
                columns = slice(piece.begin[1], piece.begin[1] + piece.view.shape[1])
                values = torch.from_numpy(values_KD[here_K, columns]).to(piece.view.device)
                piece.view[torch.from_numpy(rows_K[here_K]).long()] = values
