"""The torch module of one pipeline stage.

Shapes: B batch, N width of the stage's input, M width of its output, F tables,
D embedding dimension.
"""

from __future__ import annotations

from typing import final

from torch import Tensor, nn

from dlrm_hybrid.model.layers import DotInteraction, Mlp, Precision
from dlrm_hybrid.model.spec import ModelSpec, StagePart
from dlrm_hybrid.model.tensors import draw_dense


@final
class StageModel(nn.Module):
    """The dense layers of one stage: names, initial values and bits as in the full `Dlrm`.

    The tables are no part of it: the stage with the interaction is given their pooled rows.

    Args:
        spec: the full model.
        part: of it, from `Partition.of(spec, …)`.
        precision: of the products in the MLPs; activations that enter and leave are float32.
        seed: of the initial values.
    """

    def __init__(self, spec: ModelSpec, part: StagePart, precision: Precision, seed: int) -> None:
        super().__init__()
        self.part = part
        self.bottom = (
            Mlp(spec.bottom, relu_last=True, precision=precision, layers=part.bottom)
            if part.bottom
            else None
        )
        self.interaction = (
            DotInteraction(spec.num_vectors, spec.embedding_dim) if part.has_interaction else None
        )
        self.top = (
            Mlp(spec.top_widths, relu_last=False, precision=precision, layers=part.top)
            if part.top
            else None
        )
        self._dense_parameters = dict(self.named_parameters())
        draw_dense(self._dense_parameters, seed)

    def forward(self, x_BN: Tensor, pooled_BFD: Tensor | None) -> Tensor:
        """What leaves the stage, float32 (B, M).

        Args:
            x_BN: float32, what enters.
            pooled_BFD: float32 rows of all tables; not None where the interaction is.
        """
        if self.bottom is not None:
            x_BN = self.bottom(x_BN)
        if self.interaction is not None:
            assert pooled_BFD is not None
            x_BN = self.interaction(x_BN, pooled_BFD)
        return x_BN if self.top is None else self.top(x_BN)

    def dense_parameters(self) -> dict[str, nn.Parameter]:
        """Parameters by name, in the order of `ModelSpec.dense_shapes()`."""
        return dict(self._dense_parameters)
