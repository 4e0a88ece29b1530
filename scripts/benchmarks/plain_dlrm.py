"""A DLRM in plain PyTorch, put together the way facebookresearch/dlrm is, and its kind of loader.

It is the oracle of the model's equality test and the opponent of `bench.what=step`: one
nn.EmbeddingBag per table, index lists built in every forward pass, sigmoid and BCELoss,
torch.optim.SGD; a DataLoader that fetches row by row and a collate that builds offsets per table
and takes log(x + 1) in every batch.

Shapes: B batch, I integer features, F tables, D embedding dimension.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import sqrt
from typing import Any, cast, final

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from dlrm_hybrid.model.spec import ModelSpec

Row = tuple[npt.NDArray[np.int32], npt.NDArray[np.int32], np.int32]


@dataclass(frozen=True, slots=True)
class PlainBatch:
    """A batch in the form that facebookresearch/dlrm gives to its model.

    Attributes:
        dense_BI: float32.
        offsets_FB: int64, first id of each bag.
        ids_FB: int64.
        label_B1: float32.
    """

    dense_BI: Tensor
    offsets_FB: Tensor
    ids_FB: Tensor
    label_B1: Tensor


@final
class PlainDlrm(nn.Module):
    """One click probability per row; weights as torch and facebookresearch/dlrm draw them.

    Args:
        spec: the model's shape.
        seed: of the initial values.
    """

    def __init__(self, spec: ModelSpec, seed: int) -> None:
        super().__init__()
        rng = np.random.default_rng(seed)
        self.bottom = _network(spec.bottom, nn.ReLU(), rng)
        self.top = _network(spec.top_widths, nn.Sigmoid(), rng)
        self.tables = nn.ModuleList(
            _table(rows, spec.embedding_dim, rng) for rows in spec.table_rows
        )

    def forward(self, batch: PlainBatch) -> Tensor:
        """Probabilities (B, 1)."""
        x_BD: Tensor = self.bottom(batch.dense_BI)
        looked_up: list[Tensor] = [
            table(ids_B, offsets_B)
            for table, ids_B, offsets_B in zip(
                self.tables, batch.ids_FB, batch.offsets_FB, strict=True
            )
        ]
        return self.top(interact(x_BD, looked_up))

    def linears(self) -> dict[str, nn.Linear]:
        """Layers by the names of `ModelSpec.layer_names`."""
        found: dict[str, nn.Linear] = {}
        for part, network in (("bottom", self.bottom), ("top", self.top)):
            layers = (module for module in network if isinstance(module, nn.Linear))
            found.update({f"{part}.{number}": layer for number, layer in enumerate(layers, 1)})
        return found


def interact(x_BD: Tensor, looked_up: Sequence[Tensor]) -> Tensor:
    """What the top network reads: `x_BD`, then its dot products with all rows and theirs."""
    num_rows, dim = x_BD.shape
    vectors_BFD = torch.cat([x_BD, *looked_up], dim=1).view(num_rows, -1, dim)
    dots_BFF = torch.bmm(vectors_BFD, torch.transpose(vectors_BFD, 1, 2))
    count = dots_BFF.shape[1]
    first = torch.tensor([i for i in range(count) for _ in range(i)])
    second = torch.tensor([j for i in range(count) for j in range(i)])
    return torch.cat([x_BD, dots_BFF[:, first, second]], dim=1)


@final
class PlainTraining:
    """The training step around `PlainDlrm`.

    Args:
        model: learns in place.
        lr: of torch.optim.SGD over all parameters.
    """

    def __init__(self, model: PlainDlrm, lr: float) -> None:
        self._model = model
        self._optimizer = torch.optim.SGD(model.parameters(), lr=lr)
        self._loss = nn.BCELoss(reduction="mean")

    def step(self, batch: PlainBatch) -> Tensor:
        """Learn from one batch; the loss before the update."""
        loss: Tensor = self._loss(self._model(batch), batch.label_B1)
        self._optimizer.zero_grad()
        loss.backward()
        self._optimizer.step()
        return loss.detach()


@final
class RowDataset(Dataset[Row]):
    """Rows in memory, fetched one by one: counts_RI and ids_RF int32, label_R int32."""

    def __init__(
        self,
        counts_RI: npt.NDArray[np.int32],
        ids_RF: npt.NDArray[np.int32],
        label_R: npt.NDArray[np.int32],
    ) -> None:
        self._counts_RI, self._ids_RF, self._label_R = counts_RI, ids_RF, label_R

    def __len__(self) -> int:
        return len(self._label_R)

    def __getitem__(self, index: int) -> Row:
        return self._counts_RI[index], self._ids_RF[index], self._label_R[index]


def plain_loader(rows: RowDataset, batch_size: int) -> DataLoader[Any]:
    """Full batches as `PlainBatch`, in file order, without workers."""
    return cast(
        "DataLoader[Any]",
        DataLoader(rows, batch_size, num_workers=0, collate_fn=collate, drop_last=True),
    )


def collate(rows: list[Row]) -> PlainBatch:
    """Batch of rows: log(x + 1), one vector of ids and one of offsets for every table."""
    counts, ids, labels = zip(*rows, strict=True)
    counts_BI = torch.from_numpy(np.array(counts))
    ids_BF = torch.from_numpy(np.array(ids)).long()
    num_rows, num_tables = ids_BF.shape
    return PlainBatch(
        dense_BI=torch.log(counts_BI.float() + 1),
        offsets_FB=torch.stack([torch.tensor(range(num_rows)) for _ in range(num_tables)]),
        ids_FB=torch.stack([ids_BF[:, table] for table in range(num_tables)]),
        label_B1=torch.tensor(labels, dtype=torch.float32).view(-1, 1),
    )


def _network(widths: Sequence[int], last: nn.Module, rng: np.random.Generator) -> nn.Sequential:
    modules: list[nn.Module] = []
    for fan_in, fan_out in zip(widths, widths[1:], strict=False):
        layer = nn.Linear(fan_in, fan_out)
        weight = rng.normal(0.0, sqrt(2 / (fan_in + fan_out)), (fan_out, fan_in))
        bias = rng.normal(0.0, sqrt(1 / fan_out), fan_out)
        layer.weight.data = torch.from_numpy(weight.astype(np.float32))
        layer.bias.data = torch.from_numpy(bias.astype(np.float32))
        modules += [layer, nn.ReLU()]
    return nn.Sequential(*modules[:-1], last)


def _table(rows: int, dim: int, rng: np.random.Generator) -> nn.EmbeddingBag:
    table = nn.EmbeddingBag(rows, dim, mode="sum", sparse=True)
    bound = sqrt(1 / rows)
    table.weight.data = torch.from_numpy(rng.uniform(-bound, bound, (rows, dim)).astype(np.float32))
    return table
