"""Rows of tables that begin with given vectors, wherever they are."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from dlrm_hybrid.model.tensors import Piece
from dlrm_hybrid.run.rank.job import Job


def begin_with_vectors(job: Job, pieces: Iterable[Piece]) -> None:
    """Begin the rows held in this process with the vectors of their categories, if any have such.

    Args:
        job: that of the process.
        pieces: what it holds.

    Raises:
        DataError: the vectors beside the prepared rows are damaged.
    """
    held, shards = [*pieces], job.prepared
    if shards is None:
        return
    for given in shards.manifest.vectors:
        name = f"{job.layout.spec.table_names[given.column]}.weight"
        own = [piece for piece in held if piece.name == name]
        for ids_K, values_KD in shards.vectors(given) if own else ():
            for piece in own:
                rows_K, off_K = divmod(ids_K - piece.begin[0], piece.every)
                here_K = (off_K == 0) & (rows_K >= 0) & (rows_K < len(piece.view))
                columns = slice(piece.begin[1], piece.begin[1] + piece.view.shape[1])
                values = torch.from_numpy(values_KD[here_K, columns]).to(piece.view.device)
                piece.view[torch.from_numpy(rows_K[here_K]).long()] = values
