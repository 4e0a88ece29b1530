"""The model in standard torch operators, as `torch.export` and ONNX need it.

Shapes: B batch, I dense columns, F tables, S of them with one id per row, L ids per row of others,
D embedding dimension, R rows of a table; V vectors of the interaction, one for each table and one
of the bottom MLP if there are dense columns.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from itertools import count
from typing import final

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from dlrm_hybrid.data.preprocessing import Preprocessing
from dlrm_hybrid.model.interaction import Cross, Dot, Fm
from dlrm_hybrid.model.layers.norm import folded
from dlrm_hybrid.model.layers.own import made
from dlrm_hybrid.model.own import INTERACTION, OwnModel
from dlrm_hybrid.model.spec import ModelShape, ModelSpec
from dlrm_hybrid.saved.inputs import NO_LISTS, ListInputs


def plain_interaction(spec: ModelSpec, tensors: Mapping[str, Tensor]) -> nn.Module:
    """Make the module from all vectors (B, V, D) to the top MLP's input; it shares `tensors`."""
    has_bottom = bool(spec.bottom)
    match spec.interaction:
        case Dot():
            return _Dots(spec.num_vectors, has_bottom)
        case Cross(layers=layers, rank=rank, deep=deep):
            kinds = ("w", "bias") if rank is None else ("v", "w", "bias")
            hidden = plain_mlp("interaction.deep", len(deep), tensors, relu_last=True)
            return _CrossLayers(layers, kinds, hidden if deep else None, tensors)
        case Fm(deep=deep):
            hidden = plain_mlp("interaction.deep", len(deep), tensors, relu_last=True)
            return _Machine(hidden, has_bottom)


def plain_mlp(
    part: str,
    layers: int,
    tensors: Mapping[str, Tensor],
    *,
    relu_last: bool,
    masks: Mapping[str, nn.Module] | None = None,
) -> nn.Sequential:
    """Make the layers `<part>.1`, `<part>.2` … of a model, some with a mask after them.

    Batch norm with running statistics is folded into their weights and biases.
    """
    modules: list[nn.Module] = []
    for layer in range(1, layers + 1):
        weight_MN, bias_M = _layer(f"{part}.{layer}", tensors)
        outputs, inputs = weight_MN.shape
        linear = nn.Linear(inputs, outputs, device="meta")
        linear.weight = nn.Parameter(weight_MN.detach())
        linear.bias = nn.Parameter(bias_M.detach())
        modules += [linear, nn.ReLU()]
        if masks and f"{part}.{layer}" in masks:
            modules.append(masks[f"{part}.{layer}"])
    return nn.Sequential(*(modules if relu_last else modules[:-1]))


def _layer(name: str, tensors: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
    weight_MN = tensors[f"{name}.weight"]
    if f"{name}.bias" in tensors:
        return weight_MN, tensors[f"{name}.bias"]
    kinds = ("weight", "bias", "running_mean", "running_var")
    return folded(weight_MN, *(tensors[f"{name}.norm.{kind}"] for kind in kinds))


@final
class _Dots(nn.Module):
    _pairs_P: Tensor

    def __init__(self, vectors: int, has_bottom: bool) -> None:
        super().__init__()
        self._has_bottom = has_bottom
        first_P, second_P = torch.tril_indices(vectors, vectors, offset=-1)
        self.register_buffer("_pairs_P", first_P * vectors + second_P, persistent=False)

    def forward(self, z_BVD: Tensor) -> Tensor:
        dots_BVV = torch.bmm(z_BVD, z_BVD.transpose(1, 2))
        dots_BP = dots_BVV.flatten(1).index_select(1, self._pairs_P)
        return torch.cat((z_BVD[:, 0], dots_BP), 1) if self._has_bottom else dots_BP


@final
class _CrossLayers(nn.Module):
    def __init__(
        self,
        layers: int,
        kinds: Sequence[str],
        deep: nn.Sequential | None,
        tensors: Mapping[str, Tensor],
    ) -> None:
        super().__init__()
        self.deep = deep
        self._kinds = kinds
        for kind in kinds:
            parameters = [
                nn.Parameter(tensors[f"interaction.{layer}.{kind}"].detach())
                for layer in range(1, layers + 1)
            ]
            self.add_module(kind, nn.ParameterList(parameters))

    def forward(self, z_BVD: Tensor) -> Tensor:
        x0_BW = x_BW = z_BVD.flatten(1)
        of_layers = (self.get_submodule(kind).parameters() for kind in self._kinds)
        for *v, w_WR, bias_W in zip(*of_layers, strict=True):
            u_BR = functional.linear(x_BW, v[0]) if v else x_BW
            x_BW = x_BW + x0_BW * functional.linear(u_BR, w_WR, bias_W)
        return x_BW if self.deep is None else torch.cat([x_BW, self.deep(x0_BW)], 1)


@final
class _Machine(nn.Module):
    def __init__(self, deep: nn.Sequential, has_bottom: bool) -> None:
        super().__init__()
        self.deep = deep
        self._has_bottom = has_bottom

    def forward(self, z_BVD: Tensor) -> Tensor:
        pairs_BD = z_BVD.sum(1).square() - z_BVD.square().sum(1)
        pairs_B1 = pairs_BD.sum(1, keepdim=True) / 2
        bottom = [z_BVD[:, 0]] if self._has_bottom else []
        return torch.cat([*bottom, self.deep(z_BVD.flatten(1)), pairs_B1], 1)


def with_sums(
    tensors: Mapping[str, Tensor],
    spec: ModelShape,
    preprocessing: Preprocessing,
    columns: Collection[int],
) -> Mapping[str, Tensor]:
    """Replace each row of the tables of some expanded columns by the sum of its whole bag."""
    summed = dict(tensors)
    for column in columns:
        name = f"{spec.table_names[spec.columns[column]]}.weight"
        rows_RD = tensors[name]
        sums_RD = torch.empty_like(rows_RD)
        size = preprocessing.schema.categorical[column].expand_to
        block = max(1, BLOCK_ELEMENTS // (size * rows_RD.shape[1]))
        for start in range(0, len(rows_RD), block):
            id_B = np.arange(start, min(start + block, len(rows_RD)))
            ids_BS = torch.from_numpy(preprocessing.bag_of(column, id_B))
            sums_RD[start : start + block] = rows_RD[ids_BS].sum(1)
        summed[name] = sums_RD
    return summed


LEVELS = 255  # steps of an 8-bit row from its least value to its greatest
BLOCK_ELEMENTS = 1 << 22  # elements of a table computed at a time
INT8_KINDS = ("weight_scale", "weight_offset")  # tensors beside an 8-bit `weight`


@final
class PlainDlrm(nn.Module):
    """Bottom MLP and tables → interaction → top MLP, or a user's parts, with named inputs.

    Args:
        tensors: tensors by their names in a checkpoint, or `quantised`; shared, not copied.
        lists: the multi-hot columns, whose rows are summed or averaged.
        masks: masks of activations, by the layer that they follow.
    """

    def __init__(
        self,
        spec: ModelShape,
        tensors: Mapping[str, Tensor],
        lists: ListInputs = NO_LISTS,
        masks: Mapping[str, nn.Module] | None = None,
    ) -> None:
        super().__init__()
        self._lists, self._tables = lists, spec.columns
        self.embedding = nn.ModuleList(_table(tensors, name) for name in spec.table_names)
        self.own = PlainParts(spec, tensors, masks or {}) if isinstance(spec, OwnModel) else None
        if isinstance(spec, ModelSpec):
            layers = len(spec.bottom[1:])
            self.bottom = plain_mlp("bottom", layers, tensors, relu_last=True, masks=masks)
            self.project = nn.ModuleDict(
                {str(number): _projection(tensors, number) for number in spec.projected}
            )
            self.interaction = plain_interaction(spec, tensors)
            self.top = plain_mlp("top", len(spec.top), tensors, relu_last=False, masks=masks)
        self.requires_grad_(False)
        self.eval()

    def forward(
        self,
        *,
        ids: Tensor,
        dense: Tensor | None = None,
        lists: Sequence[Tensor] = (),
        weights: Sequence[Tensor] = (),
    ) -> tuple[Tensor, Tensor]:
        """Logits and probabilities of a click, both float32 (B,).

        Args:
            dense: float32 (B, I), transformed; None for a model without dense columns.
            ids: int64 (B, S), ids of the columns that are not multi-hot; -1 is a row of zeros.
            lists: int64 (B, L) for each multi-hot column, with -1 after the last id of a row.
            weights: float32 (B, L) for each weighted one of them.
        """
        single, multi, factors = count(), iter(lists), iter(weights)
        rows = [
            _pooled(
                *(self.embedding[table], next(multi), number in self._lists.averaged),
                next(factors) if number in self._lists.weighted else None,
            )
            if number in self._lists.columns
            else _rows(self.embedding[table], ids[:, next(single)])
            for number, table in enumerate(self._tables)
        ]
        if self.own is not None:
            return _outputs(self.own(dense, torch.stack(rows, 1)))
        for column, table in enumerate(self._tables):
            if (number := str(table + 1)) in self.project:
                rows[column] = self.project[number](rows[column])
        bottom = [] if dense is None else [self.bottom(dense)]
        z_BVD = torch.stack([*bottom, *rows], 1)
        return _outputs(self.top(self.interaction(z_BVD)))


def _outputs(output_BL: Tensor) -> tuple[Tensor, Tensor]:
    """Logits and probabilities, (B,) of one label, else (B, L); ONNX squeezes lengths of 1 only."""
    logit_B = output_BL.squeeze(1) if output_BL.shape[1] == 1 else output_BL
    return logit_B, torch.sigmoid(logit_B)


@final
class PlainParts(nn.Module):
    """The parts of a model of the user's own, with trained values and masks between them."""

    def __init__(
        self, spec: OwnModel, tensors: Mapping[str, Tensor], masks: Mapping[str, nn.Module]
    ) -> None:
        super().__init__()
        self.model = made(spec, seed=0)
        self._names, self._masks = spec.layer_names, dict(masks)
        with torch.no_grad():
            for name, parameter in self.model.named_parameters():
                parameter.copy_(tensors[name])

    def forward(self, dense_BI: Tensor | None, pooled_BFD: Tensor) -> Tensor:
        """Logits (B, 1) of dense columns, None without any, and rows of all tables."""
        x_BN = pooled_BFD.new_zeros(pooled_BFD.shape[0], 0) if dense_BI is None else dense_BI
        for name in self._names:
            part = self.model.get_submodule(name)
            x_BN = part(x_BN, pooled_BFD) if name == INTERACTION else part(x_BN)
            x_BN = self._masks[name](x_BN) if name in self._masks else x_BN
        return x_BN


def _projection(tensors: Mapping[str, Tensor], number: int) -> nn.Linear:
    """The layer from the rows of a table of another width to vectors that interact."""
    weight_DW = tensors[f"interaction.project.{number}.weight"]
    linear = nn.Linear(*reversed(weight_DW.shape), bias=False, device="meta")
    linear.weight = nn.Parameter(weight_DW.detach())
    return linear


def _rows(table: nn.Module, ids: Tensor) -> Tensor:
    """Look up rows (…, D) of ids (…); zeros for -1, which ONNX would count from the end."""
    rows: Tensor = table(ids.clamp(min=0))
    return rows * (ids >= 0).unsqueeze(-1)


def _pooled(
    table: nn.Module, ids_BL: Tensor, is_averaged: bool, weights_BL: Tensor | None
) -> Tensor:
    """Pool the rows of lists of ids, which end in -1; zeros for an empty one."""
    rows_BLD = _rows(table, ids_BL)
    sum_BD = (rows_BLD if weights_BL is None else rows_BLD * weights_BL.unsqueeze(-1)).sum(1)
    return sum_BD / (ids_BL >= 0).sum(1, keepdim=True).clamp(min=1) if is_averaged else sum_BD


@final
class Int8Table(nn.Module):
    """An embedding table of rows in 8 bits; see `quantised`."""

    weight: Tensor
    weight_scale: Tensor
    weight_offset: Tensor

    def __init__(self, tensors: Mapping[str, Tensor], name: str) -> None:
        super().__init__()
        for kind in ("weight", *INT8_KINDS):
            self.register_buffer(kind, tensors[f"{name}.{kind}"])

    def forward(self, ids: Tensor) -> Tensor:
        """Look up float32 rows (…, D) of ids (…)."""
        steps = functional.embedding(ids, self.weight).float()
        scale, offset = self.weight_scale[ids], self.weight_offset[ids]
        return steps * scale.unsqueeze(-1) + offset.unsqueeze(-1)


def quantised(spec: ModelShape, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Quantise the tables of a model to 8-bit integers, with a scale and an offset for each row.

    value = offset + scale × integer, where the offset is the row's least value and 255 steps lead
    to its greatest: the error is at most half a step and float32's rounding.
    """
    quantised_tensors = dict(tensors)
    for name in spec.table_names:
        table_RD = tensors[f"{name}.weight"]
        low_R, high_R = torch.aminmax(table_RD, dim=1)
        scale_R = (high_R - low_R) / LEVELS
        integers_RD = torch.empty(table_RD.shape, dtype=torch.uint8)
        block_rows = max(1, BLOCK_ELEMENTS // table_RD.shape[1])
        for start in range(0, len(table_RD), block_rows):
            block = slice(start, start + block_rows)
            step_R = torch.where(scale_R[block] > 0, scale_R[block], 1.0)  # rows of equal values: 0
            steps_RD = (table_RD[block] - low_R[block, None]) / step_R[:, None]
            integers_RD[block] = steps_RD.round_().clamp_(0, LEVELS)
        values = (integers_RD, scale_R, low_R)
        quantised_tensors |= {
            f"{name}.{kind}": x for kind, x in zip(("weight", *INT8_KINDS), values, strict=True)
        }
    return quantised_tensors


def _table(tensors: Mapping[str, Tensor], name: str) -> nn.Module:
    if f"{name}.{INT8_KINDS[0]}" in tensors:
        return Int8Table(tensors, name)
    return nn.Embedding.from_pretrained(tensors[f"{name}.weight"].detach())
