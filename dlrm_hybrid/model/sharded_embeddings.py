"""The embedding tables of all trainers, sharded over them by TorchRec.

Shapes: B batch, F tables, D width of the widest (see `Widths`), T trainers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import islice
from typing import Any, cast, final

import torch
from torch import Tensor
from torchrec.distributed.batched_embedding_kernel import BatchedFusedEmbeddingBag
from torchrec.distributed.comm_ops import set_gradient_division
from torchrec.distributed.embedding_sharding import EmbeddingShardingContext
from torchrec.distributed.types import ShardingEnv

from dlrm_hybrid.bags import Bags
from dlrm_hybrid.comm.group import CountedGroup
from dlrm_hybrid.compress.embedding.ends import Remembered, RowFormats
from dlrm_hybrid.model.embeddings import DistinctLookup
from dlrm_hybrid.model.exchange.distinct import DistinctExchange
from dlrm_hybrid.model.exchange.ids import IdExchange, check_ids
from dlrm_hybrid.model.optimizer import STEP
from dlrm_hybrid.model.rows.kernels import FbgemmKernel, TableKernel, fbgemm_arguments, own_kernel
from dlrm_hybrid.model.rows.plan import (
    CPU,
    CpuSharder,
    TableShard,
    codec_registry,
    make_plan,
    make_shardings,
    quiet,
    shards_of,
    unsharded_tables,
)
from dlrm_hybrid.model.sharding import Routes, routes
from dlrm_hybrid.model.spec import ModelShape
from dlrm_hybrid.model.tables import Embedding
from dlrm_hybrid.model.tensors import Piece, TableInit, draw_embeddings
from dlrm_hybrid.types import Group


@final
class ShardedEmbeddings:
    """All tables of a model, sharded over the trainers of a group.

    Backward updates a row by the gradients of all trainers, at the rate last set. Gradients are
    summed, not averaged: the caller divides them by T. Then table-wise sharding gives, bit for bit,
    what one unsharded table gives for the batches of all trainers in their order.

    Every trainer must make it, call it and run backward equally often. It switches TorchRec's
    division of gradients off for the whole process.

    Args:
        spec: the tables, whose weights are not initialised here.
        embedding: their optimizer, how they are divided among trainers, and how rows travel.
        formats: formats of distinct rows on the wire.
        group: group of the trainers; a trainer's rank in it is its number.

    Attributes:
        remembered: compression state of exchanged rows; None of those of all ids.
        pieces: this trainer's weights and optimizer states, named as in `Embeddings`.
    """

    def __init__(
        self,
        spec: ModelShape,
        embedding: Embedding,
        formats: RowFormats,
        group: CountedGroup,
    ) -> None:
        self._trainer, self._trainers = group.rank(), group.size()
        self._spec = spec
        self._group = group
        quiet()
        set_gradient_division(False)
        widths = spec.widths
        fits = embedding.fit_fbgemm(*widths.dims) and not spec.frozen
        sharder = CpuSharder(
            fused_params=fbgemm_arguments(embedding) if fits else {},
            qcomm_codecs_registry=codec_registry(embedding.comm_precision),
        )
        unsharded = unsharded_tables(spec)
        plan = make_plan(unsharded, sharder, embedding, self._trainers)
        self.shards = shards_of(plan, spec)
        environment = ShardingEnv(self._trainers, self._trainer, None)
        environment.process_group = group
        shardings = make_shardings(unsharded, plan, sharder, environment)
        self._send_rows = [
            sharding.create_output_dist(device=CPU) for sharding in shardings.values()
        ]
        blocks = {
            name: shard.rows
            for name, shards in self.shards.items()
            for shard in shards
            if shard.trainer == self._trainer
        }
        paths = routes(shardings, blocks, spec, group)
        held_L = _held(paths, self.shards, spec, self._trainer)
        self._kernels = [
            _local_kernel(sharding, embedding)
            if fits and _have_rows(tables)
            else _own_kernel(tables, embedding, spec.frozen)
            for sharding, tables in zip(shardings.values(), held_L, strict=True)
        ]
        self.pieces: Sequence[Piece] = _pieces_of(self._kernels, held_L, spec)
        self._table_rows_F1 = torch.tensor(spec.table_rows).unsqueeze(1)
        self._ids = IdExchange(paths, group)
        self._distinct = (
            DistinctExchange(paths.wanted_T, spec, formats, group)
            if embedding.deduplicate
            else None
        )
        self.remembered: Remembered | None = self._distinct and self._distinct.ends
        names = [name for sharding in shardings.values() for name in sharding.embedding_names()]
        self._order = torch.tensor([names.index(name) for name in spec.table_names])
        self._inverse = torch.argsort(self._order)
        self._widths = widths.of([spec.table_names.index(name) for name in names])
        held = widths.of(paths.wanted_T[self._trainer])
        self._lookup, self._lr = DistinctLookup(self._kernels[0], held), 0.0

    def __call__(self, bags: Bags[Tensor], rows_T: Sequence[int] | None = None) -> Tensor:
        """Look up the ids of a batch → float32 (B, F, D), in the order of the spec's tables.

        Args:
            bags: bags of this trainer's batch, which may be empty.
            rows_T: number of rows of every trainer's batch; None exchanges them, in one more
                collective. Distinct ids need none.

        Raises:
            RuntimeError: an id is not a row of its table.
            ValueError: the ids are on another device.
            PeerLostError: a trainer has left; also in backward.
            DeadlineError: a trainer did not join in time; also in backward.
        """
        check_ids(bags, self._table_rows_F1)
        if self._distinct is not None:
            return self._look_up_distinct(self._distinct, bags)
        num_rows = bags.rows
        if rows_T is None:
            rows_T = self._rows_of_all(num_rows)
        lookups = self._ids(bags, rows_T)
        looked_up = [
            _looked_up(kernel, *lookup, sum(rows_T))
            for kernel, lookup in zip(self._kernels, lookups, strict=True)
        ]
        # All are sent before the first is waited for.
        transfers: list[Any] = [
            send_rows(pooled, EmbeddingShardingContext(batch_size_per_rank=list(rows_T)))
            for send_rows, pooled in zip(self._send_rows, looked_up, strict=True)
        ]
        parts_BN: list[Tensor] = [part_BN.wait() for part_BN in transfers]
        pooled_BN = parts_BN[0] if len(parts_BN) == 1 else torch.cat(parts_BN, 1)
        pooled_BFD = self._widths.padded(pooled_BN)
        return cast(Tensor, _Reorder.apply(pooled_BFD, self._order, self._inverse))

    def _look_up_distinct(self, exchange: DistinctExchange, bags: Bags[Tensor]) -> Tensor:
        request = exchange.ask(bags)
        return exchange.answer(request.look_up(self._lookup, self._lr), request)

    def keep_rows(self) -> None:
        """Fetch each row once in the lookups without gradients that follow; tables must not change.

        Only distinct ids are kept, and up to the next lookup with gradients.
        """
        if self._distinct is not None:
            self._distinct.keep_rows()

    def set_lr(self, lr: float) -> None:
        """Set the learning rate of the rows of the next lookups, the same for all trainers."""
        self._lr = lr
        for kernel in self._kernels:
            if kernel is not None:
                kernel.set_lr(lr)

    def initialise(self, seed: int, init: TableInit = "uniform_rows") -> None:
        """Draw the values that every table has without sharding; see `draw_embeddings`."""
        name, table = "", torch.empty(0)
        for piece in self.pieces:
            if not piece.name.endswith(".weight"):
                continue
            if piece.name != name:
                name, table = piece.name, torch.empty(piece.shape)
                draw_embeddings({name: table}, seed, init)
            (row, column), (rows, columns) = piece.begin, piece.view.shape
            piece.view.copy_(table[row : row + rows, column : column + columns])

    def _rows_of_all(self, num_rows: int) -> list[int]:
        once_T = [1] * self._trainers
        rows_T = torch.tensor([num_rows] * self._trainers)
        return [int(rows) for rows in self._group.exchange(rows_T, once_T, once_T)]


@final
class _Reorder(torch.autograd.Function):
    """Permutes the second dimension; backward applies the inverse permutation."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, order_F: Tensor, inverse_F: Tensor) -> Tensor:
        ctx.inverse_F = inverse_F
        return tensor.index_select(1, order_F)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        return gradients[0].index_select(1, ctx.inverse_F), None, None


def _looked_up(
    kernel: TableKernel | None, ids: Tensor, offsets: Tensor, weights: Tensor | None, num_rows: int
) -> Tensor:
    """Look up pooled rows of this trainer's tables; (`num_rows`, 0) if it holds none.

    TorchRec's own lookup wraps and unwraps ids, which costs a tenth of a step.
    """
    if kernel is None:
        return torch.empty(num_rows, 0, requires_grad=True)
    return kernel(ids, offsets, weights)


def _local_kernel(sharding: Any, options: Embedding) -> TableKernel | None:
    """The kernel of FBGEMM's tables here of one kind of sharding; None if there are none."""
    lookup: torch.nn.Module = sharding.create_lookup()
    tables = [module for module in lookup.modules() if isinstance(module, BatchedFusedEmbeddingBag)]
    assert len(tables) <= 1, "tables of one type share one kernel"
    is_plain = options.optimizer == "sgd"
    return FbgemmKernel(tables[0].emb_module, is_plain=is_plain) if tables else None


def _have_rows(shards: Sequence[tuple[int, TableShard]]) -> bool:
    """Whether all tables have rows here: FBGEMM takes the next for one without, or reads beyond."""
    return all(shard.rows[0] < shard.rows[1] for _, shard in shards)


def _own_kernel(
    shards: Sequence[tuple[int, TableShard]], options: Embedding, frozen: Sequence[bool]
) -> TableKernel | None:
    """The kernel of tables, by shard, that FBGEMM cannot update; None if there are none."""
    if not shards:
        return None
    rows = [shard.rows[1] - shard.rows[0] for _, shard in shards]
    dims = [shard.columns[1] - shard.columns[0] for _, shard in shards]
    return own_kernel(rows, dims, options, [frozen[table] for table, _ in shards] if frozen else ())


def _held(
    paths: Routes, shards: Mapping[str, Sequence[TableShard]], spec: ModelShape, trainer: int
) -> list[list[tuple[int, TableShard]]]:
    """Tables of each lookup of a trainer, with the shard that it looks up."""
    names = spec.table_names
    by_table = [[shard for shard in shards[name] if shard.trainer == trainer] for name in names]
    tables = iter(paths.wanted_T[trainer])
    # A column-wise table occurs once for each shard, in their order.
    return [
        [(table, by_table[table].pop(0)) for table in islice(tables, features)]
        for features in paths.num_features_L
    ]


def _pieces_of(
    kernels: Sequence[TableKernel | None],
    held_L: Sequence[Sequence[tuple[int, TableShard]]],
    spec: ModelShape,
) -> list[Piece]:
    """The weights, then the optimizer states, that a trainer holds of sharded tables."""
    entries: list[tuple[str, int, tuple[int, int], Tensor]] = []
    for kernel, tables in zip(kernels, held_L, strict=True):
        tensors = [] if kernel is None else kernel.tensors()
        for (table, shard), views in zip(tables, tensors, strict=True):
            begin = (shard.rows[0], shard.columns[0])
            entries += [(kind, table, begin, view) for kind, view in views.items()]
    return [
        _piece(f"{spec.table_names[table]}.{kind}", spec, table, begin, view)
        for kind, table, begin, view in sorted(entries, key=lambda x: (x[0] != "weight", *x[:3]))
    ]


def _piece(name: str, spec: ModelShape, table: int, begin: tuple[int, int], view: Tensor) -> Piece:
    group = Group.EMBEDDINGS
    if name.endswith(f".{STEP}"):  # every shard has it; one trainer saves it
        is_copy = begin != (0, 0)
        return Piece(name=name, shape=(1,), begin=(0,), view=view, group=group, is_copy=is_copy)
    shape, dims = (spec.table_rows[table], spec.widths.dims[table]), view.dim()
    return Piece(name=name, shape=shape[:dims], begin=begin[:dims], view=view, group=group)
