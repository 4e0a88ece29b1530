"""Interactions of the bottom MLP's output with the rows of the tables, as modules.

Each maps x_BD, the output of the bottom MLP, and e_BED, the pooled rows of the tables, to the input
of the top MLP. Without a bottom MLP x_BD has no columns and counts as no vector.

Shapes: B batch, F vectors of a row (bottom MLP first, then the tables), D their width, E columns,
P = F(F-1)/2 pairs, W = F D all vectors one after the other (in projections: a table's own width, or
the widest), R rank of a cross layer.
"""

from __future__ import annotations

from typing import Any, cast, final

import torch
from torch import Tensor, nn

from dlrm_hybrid.model.interaction import Cross, Dot, Fm
from dlrm_hybrid.model.layers.mlp import Mlp, hidden_dropout
from dlrm_hybrid.model.layers.products import (
    Precision,
    affine,
    as_type,
    gradient_of_input,
    gradient_of_weight,
    hidden_type,
)
from dlrm_hybrid.model.spec import ModelSpec


@final
class _Projected(torch.autograd.Function):
    """Forward: a product for each column of another width, others as they are; backward: two."""

    @staticmethod
    def forward(
        ctx: Any, e_BEW: Tensor, dim: int, dims_E: tuple[int, ...], *weights: Tensor
    ) -> Tensor:
        z_BED = e_BEW.new_empty(len(e_BEW), len(dims_E), dim)
        operands: list[Tensor] = []
        for column, width in enumerate(dims_E):
            # Contiguous, and so aligned: products round the same wherever rows came from.
            x_BW = e_BEW[:, column, :width].contiguous()
            if width != dim:
                weight_DW = weights[len(operands) // 2]
                operands += (x_BW, weight_DW)
                x_BW = affine(x_BW, weight_DW, None, relu=False)
            z_BED[:, column] = x_BW
        ctx.dim, ctx.dims_E, ctx.shape = dim, dims_E, e_BEW.shape
        ctx.save_for_backward(*operands)
        return z_BED

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (g_BED,) = gradients
        of_e_BEW = g_BED.new_zeros(ctx.shape)
        of_weights: list[Tensor] = []
        for column, width in enumerate(ctx.dims_E):
            g_BD = g_BED[:, column].contiguous()
            if width != ctx.dim:
                at = 2 * len(of_weights)
                x_BW, weight_DW = ctx.saved_tensors[at : at + 2]
                of_weights.append(gradient_of_weight(g_BD, x_BW))
                g_BD = gradient_of_input(g_BD, weight_DW)
            of_e_BEW[:, column, :width] = g_BD
        return (of_e_BEW, None, None, *of_weights)


@final
class Projection(nn.Module):
    """The linear layer of one table: `weight` (D, width), zero until drawn."""

    def __init__(self, dim: int, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(dim, width))


@final
class Projections(nn.Module):
    """Rows of columns whose tables have any width, (B, E, widest) → vectors (B, E, D).

    Mixed dimension embeddings (Ginart et al., 2019, arXiv 1909.11810, section 3): rows of another
    width than D are multiplied by a matrix of their table. In float32, whatever the precision.
    """

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        self._dim, dims = spec.embedding_dim, spec.widths.dims
        self._dims_E = tuple(dims[table] for table in spec.columns)
        layers = {number: Projection(self._dim, width) for number, width in spec.projected.items()}
        for number, layer in layers.items():
            self.add_module(str(number), layer)
        numbers = (table + 1 for table in spec.columns)
        self._flat = tuple(layers[number].weight for number in numbers if number in layers)

    def forward(self, e_BEW: Tensor) -> Tensor:
        """Vectors that interact; `e_BEW` has zeros after rows that are narrower."""
        return cast(Tensor, _Projected.apply(e_BEW, self._dim, self._dims_E, *self._flat))


@final
class _PairDots(torch.autograd.Function):
    """Forward: one batched product and one gather; backward: one gather and one batched product."""

    @staticmethod
    def forward(ctx: Any, x_BD: Tensor, e_BED: Tensor, pair_P: Tensor, column_FF: Tensor) -> Tensor:
        z_BFD = _vectors(x_BD, e_BED)
        dots_BFF = torch.bmm(z_BFD, z_BFD.transpose(1, 2))
        ctx.save_for_backward(z_BFD, column_FF)
        ctx.first = x_BD.shape[1]
        return torch.cat((x_BD, dots_BFF.flatten(1).index_select(1, pair_P)), 1)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (g_BW,) = gradients
        z_BFD, column_FF = ctx.saved_tensors
        num_rows, num_vectors, _ = z_BFD.shape
        # d(z z^T) is symmetric with an empty diagonal: it has every pair's gradient twice. The
        # diagonal reads an arbitrary column and is cleared.
        g_BFF = g_BW.index_select(1, column_FF).view(num_rows, num_vectors, num_vectors)
        g_BFF.diagonal(dim1=1, dim2=2).zero_()
        g_BFD = torch.bmm(g_BFF, z_BFD)
        if not ctx.first:
            return None, g_BFD, None, None
        return g_BFD[:, 0] + g_BW[:, : ctx.first], g_BFD[:, 1:], None, None


@final
class DotInteraction(nn.Module):
    """x_BD and e_BED → (B, D + P): x, then the dots of vectors i and j, for i < F, for j < i.

    Order of pairs and absence of self-pairs as in facebookresearch/dlrm. Without x (B, P), the
    width of FuxiCTR's DLRM without dense columns.

    Args:
        num_vectors: F.
        first: width of x, D or 0.
    """

    _pairs: Tensor
    _columns: Tensor

    def __init__(self, num_vectors: int, first: int) -> None:
        super().__init__()
        row, column = torch.tril_indices(num_vectors, num_vectors, offset=-1)
        position_FF = torch.zeros(num_vectors, num_vectors, dtype=torch.int64)
        position_FF[row, column] = torch.arange(first, first + len(row))
        position_FF += position_FF.t().clone()
        self.register_buffer("_pairs", row * num_vectors + column, persistent=False)
        self.register_buffer("_columns", position_FF.flatten(), persistent=False)

    def forward(self, x_BD: Tensor, e_BED: Tensor) -> Tensor:
        """The input of the top MLP, float32 (B, D + P)."""
        return cast(Tensor, _PairDots.apply(x_BD, e_BED, self._pairs, self._columns))


@final
class _CrossChain(torch.autograd.Function):
    """All cross layers as one node: two products each, and float32 for what is elementwise.

    Without v, a full matrix w and one product each.
    """

    @staticmethod
    def forward(
        ctx: Any, has_v: bool, dtype: torch.dtype, x_BD: Tensor, e_BED: Tensor, *parameters: Tensor
    ) -> Tensor:
        x0_BW = torch.cat((x_BD, e_BED.flatten(1)), 1)
        operands: list[Tensor] = [x0_BW]
        x_BW = x0_BW
        count = 2 + has_v
        for *v, w_WR, bias_W in zip(*(parameters[k::count] for k in range(count)), strict=True):
            v = [as_type(v_RW, dtype) for v_RW in v]
            w_WR, u_BR = as_type(w_WR, dtype), as_type(x_BW, dtype)
            operands.append(u_BR)
            for v_RW in v:
                u_BR = affine(u_BR, v_RW, None, relu=False)
                operands += (v_RW, u_BR)
            y_BW = as_type(affine(u_BR, w_WR, as_type(bias_W, dtype), relu=False), torch.float32)
            operands += (w_WR, y_BW)
            x_BW = torch.addcmul(x_BW, x0_BW, y_BW)
        ctx.has_v, ctx.dtype, ctx.shape, ctx.first = has_v, dtype, e_BED.shape, x_BD.shape[1]
        ctx.save_for_backward(*operands)
        return x_BW

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (g_BW,) = gradients
        x0_BW, *operands = ctx.saved_tensors
        of_x0_BW = torch.zeros_like(x0_BW)
        of_parameters: list[Tensor] = []
        count = 5 if ctx.has_v else 3
        for last in range(len(operands), 0, -count):
            entered_BW, *v, w_WR, y_BW = operands[last - count : last]
            u_BR = v[1] if v else entered_BW
            of_x0_BW.addcmul_(g_BW, y_BW)
            of_y_BW = g_BW * x0_BW
            rounded_BW = as_type(of_y_BW, ctx.dtype)
            of_u_BR = gradient_of_input(rounded_BW, w_WR)
            products = [of_y_BW.sum(0), gradient_of_weight(rounded_BW, u_BR)]
            if v:
                products.append(gradient_of_weight(of_u_BR, entered_BW))
                of_u_BR = gradient_of_input(of_u_BR, v[0])
            of_parameters += (as_type(product, torch.float32) for product in products)
            g_BW = g_BW + as_type(of_u_BR, torch.float32)
        of_x0_BW += g_BW
        first: int = ctx.first
        # The gradient that leaves for the stage before must be contiguous.
        of_x_BD, of_e_BED = of_x0_BW[:, :first].contiguous(), of_x0_BW[:, first:].view(ctx.shape)
        return (None, None, of_x_BD, of_e_BED, *reversed(of_parameters))


@final
class CrossLayer(nn.Module):
    """Parameters of one cross layer: `v` (R, W), `w` (W, R), `bias` (W,); zero until drawn.

    Without a rank `w` is (W, W), and there is no `v`.
    """

    def __init__(self, width: int, rank: int | None) -> None:
        super().__init__()
        if rank is not None:
            self.v = nn.Parameter(torch.zeros(rank, width))
        self.w = nn.Parameter(torch.zeros(width, rank or width))
        self.bias = nn.Parameter(torch.zeros(width))


@final
class CrossNetwork(nn.Module):
    """x_BD and e_BED → (B, W): x0, all vectors one after the other, then x' = x0 * (w v x + b) + x.

    DCN-V2 (Wang et al., 2021, arXiv 2008.13535), section 3.5 eq. 2 with one expert and without
    inner nonlinearity; stacked below the top MLP (section 3.3) as in MLPerf's DLRM-DCNv2 and
    TorchRec's `DLRM_DCN`, whose `LowRankCrossNet` this is. Without a rank eq. 1, with full
    matrices. A deep network over x0 beside the cross layers is the parallel form of section 3.3,
    whose output (B, M) comes after theirs, as in FuxiCTR's DCNv2.
    """

    def __init__(self, spec: ModelSpec, cross: Cross, precision: Precision, seed: int) -> None:
        super().__init__()
        width = spec.num_vectors * spec.embedding_dim
        for layer in range(1, cross.layers + 1):
            self.add_module(str(layer), CrossLayer(width, cross.rank))
        self._has_v = cross.rank is not None
        self._dtype = hidden_type(precision)
        self._flat = tuple(self.parameters())
        self.deep = _deep(spec, cross.deep, precision, seed) if cross.deep else None

    def forward(self, x_BD: Tensor, e_BED: Tensor, rows: range | None = None) -> Tensor:
        """Compute the input of the top MLP, float32 (B, W + M); `rows` as for `Mlp`."""
        kind = (self._has_v, self._dtype)
        crossed_BW = cast(Tensor, _CrossChain.apply(*kind, x_BD, e_BED, *self._flat))
        if self.deep is None:
            return crossed_BW
        x0_BW = torch.cat((x_BD, e_BED.flatten(1)), 1)
        return torch.cat((crossed_BW, self.deep(x0_BW, rows)), 1)


@final
class FactorizationMachine(nn.Module):
    """x_BD and e_BED → (B, D + deep + 1): x, a deep network of all vectors, the sum of all dots.

    DeepFM (Guo et al., 2017, arXiv 1703.04247): the sum of the dots of all pairs is the order-2
    part of eq. 2 in section 2.1, the deep network that of eq. 3 and 4. Laid out as TorchRec's
    `SimpleDeepFMNN`: dense features are one of the vectors, the top MLP replaces the sum of both
    parts, and categories have no order-1 weights. TorchRec's `FactorizationMachine` sums over
    pairs of numbers, not of vectors; this follows the paper.
    """

    def __init__(self, spec: ModelSpec, fm: Fm, precision: Precision, seed: int) -> None:
        super().__init__()
        self.deep = _deep(spec, fm.deep, precision, seed)

    def forward(self, x_BD: Tensor, e_BED: Tensor, rows: range | None = None) -> Tensor:
        """Compute the input of the top MLP, float32 (B, D + deep + 1); `rows` as for `Mlp`."""
        z_BFD = _vectors(x_BD, e_BED)
        deep_BM = self.deep(z_BFD.flatten(1), rows)
        pairs_BD = z_BFD.sum(1).square() - z_BFD.square().sum(1)
        return torch.cat((x_BD, deep_BM, pairs_BD.sum(1, keepdim=True) / 2), 1)


def _deep(spec: ModelSpec, deep: tuple[int, ...], precision: Precision, seed: int) -> Mlp:
    layers = range(1, len(deep) + 1)
    return Mlp(
        (spec.num_vectors * spec.embedding_dim, *deep),
        relu_last=True,
        precision=precision,
        dropout=hidden_dropout("interaction.deep", layers, spec.dropout, seed),
        normed=layers if spec.batch_norm else range(0),
    )


def _vectors(x_BD: Tensor, e_BED: Tensor) -> Tensor:
    return torch.cat((x_BD.unsqueeze(1), e_BED), 1) if x_BD.shape[1] else e_BED


Interacting = DotInteraction | CrossNetwork | FactorizationMachine


def interaction(spec: ModelSpec, precision: Precision, seed: int) -> Interacting:
    """Make the interaction of a model, with zero parameters.

    Args:
        precision: type of the products of cross layers and of deep networks.
    """
    kind = spec.interaction
    match kind:
        case Dot():
            return DotInteraction(spec.num_vectors, spec.embedding_dim if spec.bottom else 0)
        case Cross():
            return CrossNetwork(spec, kind, precision, seed)
        case Fm():
            return FactorizationMachine(spec, kind, precision, seed)
