"""The deep learning recommendation model (Naumov et al., 2019, arXiv 1906.00091).

Shapes: B batch, I integer features, F tables, D embedding dimension.
"""

from __future__ import annotations

from typing import final

from torch import Tensor, nn

from dlrm_hybrid.model.embeddings import EmbeddingOptions, Embeddings
from dlrm_hybrid.model.layers import DotInteraction, Mlp, Precision
from dlrm_hybrid.model.spec import ModelSpec
from dlrm_hybrid.model.tensors import draw_dense, draw_embeddings


@final
class Dlrm(nn.Module):
    """Bottom MLP and tables → dot interaction → top MLP → one logit per row.

    Args:
        spec: widths and tables.
        embedding: how the tables learn; they do so in backward.
        precision: of the products in the MLPs; everything else is float32.
        seed: of the initial values.
    """

    def __init__(
        self, spec: ModelSpec, embedding: EmbeddingOptions, precision: Precision, seed: int
    ) -> None:
        super().__init__()
        self.spec = spec
        self.bottom = Mlp(spec.bottom, relu_last=True, precision=precision)
        self.interaction = DotInteraction(spec.num_vectors, spec.embedding_dim)
        self.top = Mlp(spec.top_widths, relu_last=False, precision=precision)
        self.embeddings = Embeddings(spec, embedding)
        draw_dense(self.dense_parameters(), seed)
        draw_embeddings(self.embeddings.weights(), seed)

    def forward(self, dense_BI: Tensor, ids_FB: Tensor) -> Tensor:
        """Logits (B,) of dense_BI float32 and ids_FB int64."""
        return self.logits(dense_BI, self.embeddings(ids_FB))

    def logits(self, dense_BI: Tensor, pooled_BFD: Tensor) -> Tensor:
        """Logits (B,) of dense_BI and of what was looked up in the tables."""
        x_BD: Tensor = self.bottom(dense_BI)
        return self.top(self.interaction(x_BD, pooled_BFD)).squeeze(1)

    def dense_parameters(self) -> dict[str, nn.Parameter]:
        """Parameters of the MLPs by name: `bottom.1.weight` …, in the order of the layers."""
        return dict(self.named_parameters())
