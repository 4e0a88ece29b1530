"""The section `embedding`: the optimizer of the tables, their owners, and how rows travel.

Free of torch when it is loaded.

Shapes: D embedding dimension.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

from dlrm_hybrid.bounds import BelowOne, Bound, Decay, Epsilon, Lag, Path, Rate, WirePrecision
from dlrm_hybrid.record import WEIGHTS, Choice, Effect, key

CachedRows = Annotated[int, Bound(ge=0, le=2**31)]
CopiedRows = Annotated[int, Bound(ge=1, le=2**31)]
Home = Literal["cpu", "cuda"]
Kernel = Literal["fbgemm", "numba"]
Sharding = Literal["table_wise", "row_wise", "column_wise", "auto"]
Storage = Literal["memory", "mmap"]
TableOptimizer = Literal["sgd", "adagrad", "rowwise_adagrad", "adam", "rowwise_adam"]

NEW, STATE = Effect.NEW_RUN, Effect.STATE

BY_FBGEMM: tuple[TableOptimizer, ...] = ("sgd", "adagrad", "rowwise_adagrad")
"""The optimizers that FBGEMM fuses into backward on a CPU."""
FBGEMM_COLUMNS = 4  # rows have a multiple of it; the configuration checks it too
_ROW_STATE: Mapping[TableOptimizer, Mapping[str, bool]] = {
    "sgd": {},
    "adagrad": {"sum": False},
    "rowwise_adagrad": {"sum": True},
    "adam": {"exp_avg": False, "exp_avg_sq": False},
    "rowwise_adam": {"exp_avg": False, "exp_avg_sq": True},
}


class _Embedding(Choice, effect=WEIGHTS, choice=STATE):
    """Values of the choices of `embedding` that have no such key."""

    kernel: Kernel = "fbgemm"
    device: Home = "cpu"
    sharding: Sharding = "table_wise"
    deduplicate: bool = True
    staleness: Lag = 0
    cache_rows: CachedRows = 0
    cache_batches: Lag = 0
    storage: Storage = "memory"
    folder: Path | None = None


@dataclass(frozen=True, kw_only=True)
class Embedding(_Embedding):
    """The optimizer of the tables, who owns their rows, and how these travel.

    Only rows that were looked up move. With g the sum of a row's gradients and w the row, in update
    t of its table:

        adam           m += (1 - b1) (g - m); v += (1 - b2) (g² - v)
                       w -= lr sqrt(1 - b2^t) / (1 - b1^t) m / (sqrt(v) + eps)
        rowwise_adam   v is one number per row, from the mean of its g²
                       w -= lr / (1 - b1^t) m / (sqrt(v / (1 - b2^t)) + eps)

    as torch.optim.SparseAdam, and as FBGEMM's PARTIAL_ROWWISE_ADAM, without their weight decay.
    """

    optimizer: TableOptimizer = key("sgd", "optimizer of the tables")
    lr: Rate | None = key(
        None, "learning rate; null follows optimizer.lr; both follow optimizer.schedule", NEW
    )
    eps: Epsilon = key(1e-8, "added to the denominator by all but sgd")
    betas: tuple[BelowOne, BelowOne] = key(
        (0.9, 0.999),
        "coefficients of the running means of gradients and of their squares",
        NEW,
        only="embedding.optimizer=adam|rowwise_adam",
    )
    weight_decay: Decay = key(
        0.0, "this times a row is added to its gradient when it is updated (L2)", NEW
    )
    init: Literal["uniform_rows", "uniform_width"] | Rate = key(
        "uniform_rows",
        "first rows: uniform_rows, U(±1/√rows of the table); uniform_width, U(±1/√width); or σ of "
        "N(0, σ²)",
        NEW,
    )
    comm_precision: WirePrecision = key(
        "float32",
        "type of rows, or pooled embeddings, and their gradients on the wire",
        NEW,
        only="parallel=hybrid",
    )
    levels: bool = key(
        False,
        "send rows and gradients as quantized differences from copies at both ends",
        STATE,
        only="parallel=hybrid",
    )
    row_error: Rate = key(
        0.0625,
        "levels: half a step of rows, over the root mean square of a trainer's rows",
        STATE,
    )
    gradient_error: Rate = key(
        2.0,
        "levels: the same of gradients; what rounding leaves is sent later",
        STATE,
    )
    copies_rows: CopiedRows = key(
        262_144,
        "levels: rows of each table that are remembered for each trainer",
        STATE,
    )

    @property
    def row_state(self) -> Mapping[str, bool]:
        """State of each row by name, and whether it is one number per row instead of D."""
        return _ROW_STATE[self.optimizer]

    @property
    def is_rowwise(self) -> bool:
        """Whether state is one number per full row, so columns cannot be split."""
        return any(self.row_state.values())

    def fit_fbgemm(self, *dims: int) -> bool:
        """Whether FBGEMM holds and updates tables of these widths on a CPU."""
        is_known = self.optimizer in BY_FBGEMM and not self.weight_decay and self.kernel == "fbgemm"
        return is_known and not any(dim % FBGEMM_COLUMNS for dim in dims)


@dataclass(frozen=True, kw_only=True)
class Fused(Embedding):
    """Tables within the trainers, which share them by collectives."""

    name: ClassVar[str] = "fused"
    kernel: Kernel = key(
        "fbgemm",
        "kernels of the tables: fbgemm, where it knows optimizer and width; or numba, our own",
        Effect.FREE | Effect.EVALUATION,
    )
    device: Home = key(
        "cpu",
        "device of the tables: cpu; or cuda, the one of the dense layers, by torch's "
        "own operations",
        Effect.FREE | Effect.EVALUATION,
    )
    sharding: Sharding = key("table_wise", "how tables are split over trainers", NEW)
    deduplicate: bool = key(
        False,
        "look up each distinct id of a batch once (table_wise only)",
        NEW,
        only="parallel=hybrid",
    )


@dataclass(frozen=True, kw_only=True)
class Served(Embedding):
    """Tables on servers of their own (parallel.table_servers); trainers look up distinct ids."""

    name: ClassVar[str] = "served"
    staleness: Lag = key(
        0, "a lookup sees all updates but those of so many batches before it", STATE
    )
    cache_rows: CachedRows = key(0, "rows that a trainer keeps for later batches; 0 is off", STATE)
    cache_batches: Lag = key(
        0,
        "batches that it keeps them for: rows are as much older, gradients are summed meanwhile",
        STATE,
    )
    storage: Storage = key(
        "memory",
        "place of rows on table servers; mmap: in files, which may be larger than memory",
        Effect.FREE | Effect.EVALUATION,
    )
    folder: Path | None = key(
        None,
        "where storage=mmap makes these files; null is the run folder",
        Effect.NOTHING | Effect.EVALUATION | Effect.PATH | Effect.PLACE,
        only="embedding.storage=mmap",
    )
