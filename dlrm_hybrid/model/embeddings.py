"""The embedding tables, held by TorchRec with the optimizer fused into backward; its only home.

Shapes: B batch, F tables, D embedding dimension, N bags of distinct ids.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, cast, final

import torch
from fbgemm_gpu.split_table_batched_embeddings_ops_common import BoundsCheckMode
from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
    SplitTableBatchedEmbeddingBagsCodegen,
)
from torch import Tensor
from torchrec.modules.embedding_configs import EmbeddingBagConfig, PoolingType
from torchrec.modules.fused_embedding_modules import FusedEmbeddingBagCollection
from torchrec.optim import RowWiseAdagrad

from dlrm_hybrid.model.distinct_ids import DistinctBags
from dlrm_hybrid.model.spec import ModelSpec


class EmbeddingOptimizer(StrEnum):
    """The optimizers that FBGEMM fuses into backward on a CPU."""

    SGD = "sgd"
    ADAGRAD = "adagrad"
    ROWWISE_ADAGRAD = "rowwise_adagrad"


_OPTIMIZERS: Mapping[EmbeddingOptimizer, type[torch.optim.Optimizer]] = {
    EmbeddingOptimizer.SGD: torch.optim.SGD,
    EmbeddingOptimizer.ADAGRAD: torch.optim.Adagrad,
    EmbeddingOptimizer.ROWWISE_ADAGRAD: RowWiseAdagrad,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class EmbeddingOptions:
    """How the tables learn.

    Attributes:
        optimizer: which optimizer; `sgd` has no state.
        eps: added to the root of the accumulator of both Adagrads.
    """

    optimizer: EmbeddingOptimizer
    eps: float


@final
class Embeddings:
    """All tables of a model, one id per bag; a row learns in backward, at the rate last set.

    Not a torch module: its tensors are views that no other optimizer may find among parameters.
    """

    def __init__(self, spec: ModelSpec, options: EmbeddingOptions) -> None:
        self._names = spec.table_names
        self._dim = spec.embedding_dim
        self._collection = _collection(spec, options)
        # TorchRec's own forward builds a keyed jagged tensor, cuts it into features and glues it
        # together again: 200 µs of a step of 6 ms at batch 128. One id per bag needs none of it.
        self._tables = cast(
            SplitTableBatchedEmbeddingBagsCodegen,
            self._collection._emb_modules[0]._emb_module,  # pyright: ignore[reportPrivateUsage]
        )
        self._offsets = torch.arange(1)

    def __call__(self, ids_FB: Tensor) -> Tensor:
        """Look up ids_FB, int64 and contiguous → float32 (B, F, D).

        Raises:
            RuntimeError: an id is not a row of its table.
        """
        num_rows = ids_FB.shape[1]
        pooled_BN: Tensor = self._tables(ids_FB.view(-1), self._offsets_of(ids_FB.numel()))
        return pooled_BN.view(num_rows, len(self._names), self._dim)

    def pooled(self, bags: DistinctBags) -> Tensor:
        """Look up bags of all tables, in their order → float32 (N, F * D).

        Raises:
            RuntimeError: an id is not a row of its table.
        """
        pooled_NW: Tensor = self._tables(bags.ids_K, bags.offsets)
        return pooled_NW

    def set_lr(self, lr: float) -> None:
        """The learning rate with which the rows of the next lookups learn."""
        self._tables.set_learning_rate(lr)

    def weights(self) -> dict[str, Tensor]:
        """Views (rows, D) of all tables: `embedding.1.weight` …; writing to one changes it."""
        views: list[Tensor] = self._tables.split_embedding_weights()
        return {f"{name}.weight": view for name, view in zip(self._names, views, strict=True)}

    def optimizer_state(self) -> dict[str, Tensor]:
        """Views of the accumulators: `embedding.1.sum` …, (rows, D) or (rows,); none for `sgd`."""
        states: list[list[Tensor]] = self._tables.split_optimizer_states()
        return {
            f"{name}.sum": accumulator
            for name, state in zip(self._names, states, strict=False)
            for accumulator in state
        }

    def _offsets_of(self, num_ids: int) -> Tensor:
        if len(self._offsets) <= num_ids:
            self._offsets = torch.arange(num_ids + 1)
        return self._offsets[: num_ids + 1]


def _collection(spec: ModelSpec, options: EmbeddingOptions) -> FusedEmbeddingBagCollection:
    # An id outside its table is an error; FBGEMM's default reads row 0 in its place and warns.
    arguments: dict[str, Any] = {"lr": 0.0, "bounds_check_mode": BoundsCheckMode.FATAL}
    if options.optimizer is not EmbeddingOptimizer.SGD:
        arguments["eps"] = options.eps
    tables = [
        EmbeddingBagConfig(
            name=name.replace(".", "_"),
            embedding_dim=spec.embedding_dim,
            num_embeddings=rows,
            feature_names=[name],
            pooling=PoolingType.SUM,
        )
        for name, rows in zip(spec.table_names, spec.table_rows, strict=True)
    ]
    return FusedEmbeddingBagCollection(
        tables=tables,
        optimizer_type=_OPTIMIZERS[options.optimizer],
        optimizer_kwargs=arguments,
    )
