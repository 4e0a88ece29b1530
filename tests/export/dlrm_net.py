"""DLRM as facebookresearch/dlrm lays it out, for the tests: names, order of pairs, ReLUs."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor


class DlrmNet(nn.Module):
    """`emb_l` of summed bags, `bot_l` with ReLU after each layer, `top_l` ending in a sigmoid."""

    def __init__(self, bottom: Sequence[int], top: Sequence[int], tables: Sequence[int]) -> None:
        super().__init__()
        dim, vectors = bottom[-1], len(tables) + 1
        self.emb_l = nn.ModuleList(nn.EmbeddingBag(rows, dim, mode="sum") for rows in tables)
        self.bot_l = mlp(bottom, nn.ReLU())
        self.top_l = mlp([dim + vectors * (vectors - 1) // 2, *top], nn.Sigmoid())

    def forward(self, dense: Tensor, ids: Tensor) -> Tensor:
        x = self.bot_l(dense)
        offsets = torch.arange(len(ids))
        rows = [table(ids[:, k], offsets) for k, table in enumerate(self.emb_l)]
        together = torch.cat([x, *rows], 1).view(len(ids), -1, x.shape[1])
        dots = torch.bmm(together, together.transpose(1, 2))
        of_i = [i for i in range(len(rows) + 1) for _ in range(i)]
        of_j = [j for i in range(len(rows) + 1) for j in range(i)]
        return self.top_l[:-1](torch.cat([x, dots[:, of_i, of_j]], 1)).squeeze(1)


def torchrec_tables(tables: Sequence[int], dim: int) -> EmbeddingBagCollection:
    """Tables of these sizes as TorchRec's DLRM has them."""
    configs = [
        EmbeddingBagConfig(
            name=f"t_cat_{number}",
            embedding_dim=dim,
            num_embeddings=rows,
            feature_names=[f"cat_{number}"],
        )
        for number, rows in enumerate(tables)
    ]
    return EmbeddingBagCollection(tables=configs)


def torchrec_rows(ids_FB: Tensor) -> KeyedJaggedTensor:
    """Rows of one id in each of these tables."""
    return KeyedJaggedTensor.from_offsets_sync(
        keys=[f"cat_{number}" for number in range(len(ids_FB))],
        values=ids_FB.flatten(),
        offsets=torch.arange(ids_FB.numel() + 1),
    )


def mlp(widths: Sequence[int], last: nn.Module) -> nn.Sequential:
    modules: list[nn.Module] = []
    for before, after in zip(widths, widths[1:], strict=False):
        modules += [nn.Linear(before, after), nn.ReLU()]
    return nn.Sequential(*modules[:-1], last)
