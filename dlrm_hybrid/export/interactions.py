"""Interactions out of torch's standard operators alone.

Shapes: B batch, V vectors of a row that meet, D their width, P = V(V-1)/2 pairs of them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import final

import torch
from torch import Tensor, nn
from torch.nn import functional

from dlrm_hybrid.model.interaction import Cross, Dot, Fm
from dlrm_hybrid.model.layers.norm import folded
from dlrm_hybrid.model.spec import ModelSpec


def plain_interaction(spec: ModelSpec, tensors: Mapping[str, Tensor]) -> nn.Module:
    """Takes all vectors (B, V, D), and gives the input of the top MLP.

    Args:
        spec: of the model.
        tensors: by the names of a checkpoint; they are shared, not copied.
    """
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
    """The layers `<part>.1`, `<part>.2` … of a model, some with a mask after them.

    Batch norm by running statistics is a part of their weights and biases.
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
    """Weight and bias of a layer, its batch norm folded in."""
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
            held = [
                nn.Parameter(tensors[f"interaction.{layer}.{kind}"].detach())
                for layer in range(1, layers + 1)
            ]
            self.add_module(kind, nn.ParameterList(held))

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
        first = [z_BVD[:, 0]] if self._has_bottom else []
        return torch.cat([*first, self.deep(z_BVD.flatten(1)), pairs_B1], 1)
