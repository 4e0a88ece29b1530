"""Which ranks have written their part of a checkpoint, and when it may become valid: pure.

First every rank writes and says so; when the last one has, and not before, somebody makes the whole
set valid at one stroke. A rank that fails, or is gone, leaves everything as it was.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, final

from dlrm_hybrid.parallel.finite import key_of_rate
from dlrm_hybrid.types import DivergedError, DlrmError, ResourceError


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Shard:
    """What one rank has written of a checkpoint; of JSON values.

    Attributes:
        files: bytes and xxh3 by name.
        tensors: group, dtype, shape of the whole and parts, by name; a part says its file, where it
            begins in the whole, and its shape.
        seconds: that it took.
        fault: why it could not be written; None if it was.
        not_finite: name of a tensor with NaN or infinity, which is why nothing was written.
    """

    files: Mapping[str, Mapping[str, Any]]
    tensors: Mapping[str, Mapping[str, Any]]
    seconds: float
    fault: str | None
    not_finite: str | None = None


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Preparing:
    """A checkpoint on its way.

    Attributes:
        step: training steps done.
        owed: names, by number, of the ranks that have not said anything yet.
        shards: of the others, by name of the rank.
    """

    step: int
    owed: Mapping[int, str]
    shards: Mapping[str, Shard]

    def took(self, rank: int, shard: Shard) -> Preparing:
        """With the word of one more rank.

        Raises:
            ResourceError: it could not write; names it.
            DivergedError: it holds a value that is not finite; names step, tensor and key.
            DlrmError: it had said so before, or is none of those that write.
        """
        name = self.owed.get(rank)
        if name is None:
            raise DlrmError(f"rank {rank} has nothing to add to the checkpoint of step {self.step}")
        if shard.fault is not None:
            raise ResourceError(f"{name} (rank {rank}): {shard.fault}")
        if shard.not_finite is not None:
            raise DivergedError(
                f"step {self.step}: {shard.not_finite} of {name} (rank {rank}) is not finite, so "
                f"no checkpoint was saved; {key_of_rate(shard.not_finite)} may be too high"
            )
        owed = {one: title for one, title in self.owed.items() if one != rank}
        return replace(self, owed=owed, shards={**self.shards, name: shard})

    @property
    def is_prepared(self) -> bool:
        """Whether all ranks have written."""
        return not self.owed

    def contents(self) -> dict[str, Any]:
        """`files` and `tensors` of all ranks, for the manifest.

        Raises:
            DlrmError: parts of a tensor are missing, or two ranks say different things of it.
        """
        files = {name: entry for one in self.shards.values() for name, entry in one.files.items()}
        return {"files": files, "tensors": _merged(self.shards.values())}


def _merged(shards: Iterable[Shard]) -> dict[str, dict[str, Any]]:
    tensors: dict[str, dict[str, Any]] = {}
    for shard in shards:
        for name, told in shard.tensors.items():
            known = tensors.setdefault(name, {**told, "parts": []})
            if any(known[key] != told[key] for key in ("group", "dtype", "shape")):
                raise DlrmError(f"{name}: two ranks have saved it as different tensors")
            known["parts"] += told["parts"]
    for name, known in tensors.items():
        found = sum(math.prod(part["shape"]) for part in known["parts"])
        if found != math.prod(known["shape"]):
            raise DlrmError(f"{name}: {found} elements saved, its shape is {known['shape']}")
    return tensors
