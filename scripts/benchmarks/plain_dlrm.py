"""A DLRM in plain PyTorch, built like facebookresearch/dlrm, and random rows for it.

It is the oracle of the model's equality test and the opponent in `step.py`: one nn.EmbeddingBag per
table, index lists built in every forward pass, sigmoid and BCELoss, torch.optim.SGD; a DataLoader
that fetches row by row, and a collate function that builds offsets per table and takes log(x + 1)
in every batch. Rows have Criteo's shape and table sizes, and ids by a power law.

Shapes: B batch, R rows, I = 13 integer features, F = 26 tables, D embedding dimension.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import sqrt
from pathlib import Path
from typing import Any, cast, final

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from dlrm_hybrid.compress.gradient.layout import Spec
from dlrm_hybrid.data import manifest as manifests
from dlrm_hybrid.data.arrays import ArrayWriter, StoredArray
from dlrm_hybrid.data.manifest import Manifest, Semantics
from dlrm_hybrid.data.prepare import count_clicks
from dlrm_hybrid.data.profile import NUM_DENSE
from dlrm_hybrid.data.schemas.reading import builtin
from dlrm_hybrid.model.spec import ModelSpec

CLICK_RATE = 0.256  # of Criteo Kaggle
# Kaggle's table sizes, the large ones cut at 100 000: 54 MB instead of 2.2 GB.
CRITEO_TABLE_ROWS = (
    *(1460, 583, 100_000, 100_000, 305, 24, 12_517, 633, 3, 93_145, 5683, 100_000, 3194),
    *(27, 14_992, 100_000, 10, 5652, 2173, 4, 100_000, 18, 15, 100_000, 105, 100_000),
)
PAPER_SPEC = ModelSpec(
    embedding_dim=16,
    bottom=(13, 512, 256, 64, 16),
    top=(512, 256, 128, 1),
    table_rows=CRITEO_TABLE_ROWS,
)

Row = tuple[npt.NDArray[np.int32], npt.NDArray[np.int32], np.int32]
Gradients = Mapping[str, Tensor]
"""Of the layers of a model in one step, by name."""


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
@dataclass(frozen=True, slots=True)
class RandomRows(Dataset[Row]):
    """Rows in memory, fetched one by one: counts_RI and ids_RF int32, label_R int32 of 0 and 1."""

    counts_RI: npt.NDArray[np.int32]
    ids_RF: npt.NDArray[np.int32]
    label_R: npt.NDArray[np.int32]

    def __len__(self) -> int:
        return len(self.label_R)

    def __getitem__(self, index: int) -> Row:
        return self.counts_RI[index], self.ids_RF[index], self.label_R[index]


def plain_loader(rows: RandomRows, batch_size: int) -> DataLoader[Any]:
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


def specs_of(gradients: Gradients) -> list[Spec]:
    """The tensors, as compressors want to know them."""
    return [
        Spec(number, name, tuple(one.shape)) for number, (name, one) in enumerate(gradients.items())
    ]


def add(sums: Sequence[Tensor], gradients: Gradients) -> None:
    """One pass over memory, which compressors are compared with."""
    for total, gradient in zip(sums, gradients.values(), strict=True):
        total.add_(gradient)


def layer_gradients(steps: int, batch_size: int) -> list[Gradients]:
    """Gradients of the paper's 8 layers over steps of plain training on random rows."""
    # Small tables: their gradients are not compressed.
    spec = replace(PAPER_SPEC, table_rows=(1000,) * len(CRITEO_TABLE_ROWS))
    model = PlainDlrm(spec, seed=0)
    training = PlainTraining(model, lr=0.1)
    made: list[Gradients] = []
    for batch in plain_loader(draw_rows(spec.table_rows, steps * batch_size, seed=0), batch_size):
        training.step(batch)
        made.append(
            {
                f"{name}.{part}": parameter.grad.clone()
                for name, layer in model.linears().items()
                for part, parameter in layer.named_parameters()
                if parameter.grad is not None
            }
        )
    return made


def draw_rows(table_rows: tuple[int, ...], rows: int, seed: int) -> RandomRows:
    """Draw rows; the id of rank r of a table comes with probability about 1/r."""
    rng = np.random.default_rng(seed)
    counts_RI = np.minimum(rng.pareto(0.7, (rows, NUM_DENSE)), 1e6).astype(np.int32)
    sizes_F = np.array(table_rows, np.float64)
    ids_RF = (sizes_F + 1) ** rng.random((rows, len(table_rows))) - 1
    label_R = rng.random(rows) < CLICK_RATE
    return RandomRows(
        counts_RI, np.minimum(ids_RF, sizes_F - 1).astype(np.int32), label_R.astype(np.int32)
    )


def write_shards(folder: Path, rows: RandomRows, table_rows: tuple[int, ...]) -> None:
    """Write rows as a prepared folder; the test part holds the last row only."""
    count = len(rows.label_R)
    dense_RI = np.log1p(rows.counts_RI, dtype=np.float32)
    arrays = (
        _write(folder / "label.npy", rows.label_R.astype(np.float32), None),
        _write(folder / "dense.npy", dense_RI, dense_RI.shape[1]),
        _write(folder / "ids.npy", rows.ids_RF, len(table_rows)),
    )
    semantics = Semantics(
        days=2,
        day_split="files",
        vocabulary="all_days",
        min_count=0,
        max_ind_range=0,
        on_bad_row="error",
        schema=builtin("criteo_kaggle"),
    )
    manifest = Manifest(
        format=manifests.FORMAT,
        semantics=semantics,
        sources=(),
        parts=count_clicks(folder, arrays[0], (count - 1, 0, 1)),
        arrays=arrays,
        table_rows=table_rows,
        out_of_vocabulary=(False,) * len(table_rows),
        vocabulary_xxh3=32 * "0",
        scales=(None,) * dense_RI.shape[1],
        bad_rows=0,
        zero_keys=0,
    )
    manifests.write(folder, manifest)


def _write(path: Path, rows: npt.NDArray[Any], width: int | None) -> StoredArray:
    with ArrayWriter(path, rows.dtype, width) as file:
        file.append(rows)
        return file.finish()
