"""A model as somebody writes it outside the package: DeepFM (Guo et al., 2017), in parts."""

from itertools import pairwise

import torch
from torch import Tensor, nn

from dlrm_hybrid import Features


class Pairs(nn.Module):
    """All vectors one after the other, then the sum of the products of all pairs."""

    def forward(self, x_BD: Tensor, pooled_BFD: Tensor) -> Tensor:
        z_BVD = torch.cat((x_BD.unsqueeze(1), pooled_BFD), 1) if x_BD.shape[1] else pooled_BFD
        pairs_BD = (z_BVD.sum(1).square() - z_BVD.square().sum(1)) / 2
        return torch.cat((z_BVD.flatten(1), pairs_BD), 1)


class DeepFm(nn.Module):
    """DeepFM with widths of one's own.

    Attributes:
        bottom: widths of the layers for the dense columns, but the last.
        top: widths of the layers over all vectors, but the last.
    """

    def __init__(
        self,
        features: Features,
        bottom: tuple[int, ...] = (16, 8, 8),
        top: tuple[int, ...] = (16, 16, 8),
    ) -> None:
        super().__init__()
        dim, vectors = features.embedding_dim, features.tables
        if features.dense:
            vectors += 1
            for number, (fan_in, out) in enumerate(pairwise((features.dense, *bottom, dim)), 1):
                layers = nn.Linear(fan_in, out), nn.LayerNorm(out), nn.ReLU()
                self.add_module(f"bottom{number}", nn.Sequential(*layers))
        self.interaction = Pairs()
        for number, (fan_in, out) in enumerate(pairwise(((vectors + 1) * dim, *top)), 1):
            self.add_module(f"top{number}", nn.Sequential(nn.Linear(fan_in, out), nn.ReLU()))
        self.logit = nn.Linear(top[-1], features.labels)


class Narrow(DeepFm):
    """With one logit, however many labels there are."""

    def __init__(self, features: Features) -> None:
        super().__init__(features)
        self.logit = nn.Linear(8, 1)
