"""The stages of the deep learning recommendation model (Naumov et al., 2019, arXiv 1906.00091).

With other interactions it is DCN-V2 or DeepFM; see `layers.interactions`.

Shapes: B batch, F tables, D embedding dimension; a stage's N inputs, M outputs.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import cast, final

from torch import Tensor, nn

from dlrm_hybrid.model.layers.interactions import (
    DotInteraction,
    Interacting,
    Projections,
    interaction,
)
from dlrm_hybrid.model.layers.mlp import Mlp, hidden_dropout
from dlrm_hybrid.model.layers.norm import statistics
from dlrm_hybrid.model.layers.own import OwnLayers, initial
from dlrm_hybrid.model.layers.products import Precision
from dlrm_hybrid.model.own import OwnModel
from dlrm_hybrid.model.spec import ModelShape, ModelSpec, StagePart
from dlrm_hybrid.model.tensors import draw_dense

_PROJECT = "project"  # in names of parameters


@final
class DlrmLayers(nn.Module):
    """The layers of one stage of a DLRM, with its initial values and bits; see `StageModel`."""

    def __init__(self, spec: ModelSpec, part: StagePart, precision: Precision, seed: int) -> None:
        super().__init__()
        self.bottom = _bottom(spec, part.bottom, precision, seed) if part.bottom else None
        self.interaction = interaction(spec, precision, seed) if part.has_interaction else None
        self._has_projections = self.interaction is not None and bool(spec.projected)
        if self.interaction is not None and self._has_projections:
            self.interaction.add_module(_PROJECT, Projections(spec))
        self.top = _top(spec, part.top, precision, seed) if part.top else None
        draw_dense(dict(self.named_parameters()), seed)

    def forward(self, x_BN: Tensor, pooled_BFD: Tensor | None, rows: range | None = None) -> Tensor:
        """Compute the output, as `StageModel`."""
        if self.bottom is not None:
            x_BN = self.bottom(x_BN, rows)
        if self.interaction is not None:
            assert pooled_BFD is not None
            if self._has_projections:
                project = self.interaction.get_submodule(_PROJECT)
                pooled_BFD = cast(Tensor, project(pooled_BFD))
            x_BN = _interacted(self.interaction, x_BN, pooled_BFD, rows)
        return x_BN if self.top is None else self.top(x_BN, rows)


@final
class StageModel(nn.Module):
    """The dense layers of one stage, with names, initial values and bits of the full model.

    It has no tables: the stage with the interaction is given their pooled rows.

    Args:
        part: the stage, from `Partition.of(spec, …)`.
        precision: type of the products in a DLRM's MLPs; inputs and outputs are float32.
        seed: seed of the initial values and of dropout.
    """

    def __init__(self, spec: ModelShape, part: StagePart, precision: Precision, seed: int) -> None:
        super().__init__()
        self.part = part
        if isinstance(spec, OwnModel):
            self.layers = OwnLayers(spec, part.layer_names, seed)
        else:
            self.layers = DlrmLayers(spec, part, precision, seed)
        self._dense_parameters = dict(self.layers.named_parameters())

    def forward(self, x_BN: Tensor, pooled_BFD: Tensor | None, rows: range | None = None) -> Tensor:
        """Compute the stage's output, float32 (B, M).

        Args:
            pooled_BFD: float32 rows of all tables, as wide as the widest, others with zeros behind
                them; not None at the stage with the interaction.
            rows: row numbers as for `Mlp.forward`.
        """
        return self.layers.forward(x_BN, pooled_BFD, rows)

    def dense_parameters(self) -> dict[str, nn.Parameter]:
        """Parameters by name, in the order of `ModelSpec.dense_shapes()`."""
        return dict(self._dense_parameters)

    def statistics(self) -> dict[str, Tensor]:
        """Running means and variances of the stage's layers by name."""
        return statistics(self.layers)

    def fill(self, values: Mapping[str, Tensor]) -> None:
        """Copy parameters and statistics from tensors by name; others among them are ignored."""
        for name, tensor in (*self._dense_parameters.items(), *self.statistics().items()):
            tensor.detach().copy_(values[name])


def draw_initial(spec: ModelShape, tensors: Mapping[str, Tensor], seed: int) -> None:
    """Fill some of a model's dense parameters, by name, with their initial values."""
    if not isinstance(spec, OwnModel):
        draw_dense(tensors, seed)
        return
    values = initial(spec, seed)
    for name, tensor in tensors.items():
        tensor.copy_(values[name])


def _bottom(spec: ModelSpec, layers: range, precision: Precision, seed: int) -> Mlp:
    share = spec.dropout if spec.bottom_dropout is None else spec.bottom_dropout
    hidden = range(1, len(spec.bottom) - 1)
    return Mlp(
        spec.bottom,
        relu_last=True,
        precision=precision,
        layers=layers,
        dropout=hidden_dropout("bottom", hidden, share, seed),
        normed=hidden if spec.batch_norm else range(0),
    )


def _top(spec: ModelSpec, layers: range, precision: Precision, seed: int) -> Mlp:
    hidden = range(1, len(spec.top))
    return Mlp(
        spec.top_widths,
        relu_last=False,
        precision=precision,
        layers=layers,
        dropout=hidden_dropout("top", hidden, spec.dropout, seed),
        normed=hidden if spec.batch_norm else range(0),
    )


def _interacted(
    module: Interacting, x_BD: Tensor, pooled_BFD: Tensor, rows: range | None
) -> Tensor:
    if isinstance(module, DotInteraction):
        return module(x_BD, pooled_BFD)
    return module(x_BD, pooled_BFD, rows)
