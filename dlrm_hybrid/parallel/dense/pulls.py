"""The section `pull`: how new weights travel from the servers. Free of torch when it is loaded."""

from __future__ import annotations

from dataclasses import dataclass

from dlrm_hybrid.bounds import BelowOne, PrecisionOrLevels
from dlrm_hybrid.compress.gradient.methods import dtype_of
from dlrm_hybrid.record import Effect, Record, key
from dlrm_hybrid.wire.section import Dtype


@dataclass(frozen=True, kw_only=True)
class Pulls(Record, effect=Effect.STATE):
    """How new weights travel from the servers, which publish what has changed."""

    precision: PrecisionOrLevels = key(
        "float32",
        "type of weights on the wire, which may be levels; servers keep the rounding error",
        only="parallel.servers",
    )
    sparsity: BelowOne | None = key(
        None,
        "fraction of each tensor that a pull leaves for later ones; null sends all that changed",
        only="parallel.servers",
    )

    @property
    def left_out(self) -> float | None:
        """The sparsity; None where every version publishes all that has changed."""
        return self.sparsity or None

    @property
    def dtype(self) -> Dtype:
        """The type of values on the wire; levels are exact in bfloat16."""
        return dtype_of(self.precision)

    @property
    def levels(self) -> bool:
        """Whether values are integer multiples of a quantum."""
        return self.precision == "levels"
