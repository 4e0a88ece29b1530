"""What a process learns with, whether it is a whole model or a whole world."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from typing import Protocol

from torch import Tensor

from dlrm_hybrid.data.loader import LoaderState
from dlrm_hybrid.model.tensors import Piece
from dlrm_hybrid.parallel.compression import PREFIX as COMPRESSOR_PREFIX
from dlrm_hybrid.parallel.finite import EMBEDDING_PREFIX
from dlrm_hybrid.telemetry.compression import Counts
from dlrm_hybrid.telemetry.metrics import BinaryScores
from dlrm_hybrid.telemetry.traffic import Counters, Traffic, Versions
from dlrm_hybrid.train.parts import Learned

COMPRESSOR = "compressor"
VERSIONS = "versions"
VERSION_SUFFIX = re.compile(r"\.(published|behind[0-9]+)$")


class Engine(Protocol):
    """Model, data and optimizers of one process."""

    @property
    def count(self) -> Callable[[Counters], None] | None:
        """Takes the counters of all that travels from now on; None where nothing does."""
        ...

    @property
    def uncounted(self) -> frozenset[Traffic]:
        """What would travel between processes, but is not seen here."""
        ...

    @property
    def versions(self) -> Callable[[], Versions] | None:
        """Tells what its servers have told until then; None where there are none."""
        ...

    def learn(self, step: int, at: LoaderState) -> tuple[Learned, LoaderState]:
        """Make one step; see `Parts.learn`."""
        ...

    def evaluate(self, check: Callable[[int], None]) -> BinaryScores:
        """Scores on the test part; `check` hears of the rows done, what it raises ends it."""
        ...

    def tensors(self) -> Mapping[str, Tensor]:
        """Views of all that a checkpoint must hold; copying into them loads one."""
        ...

    def compression(self) -> Counts:
        """What was compressed since the last call."""
        ...

    def restart(self, step: int) -> None:
        """Go on after `step` steps, with what was copied into `tensors`."""
        ...


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
