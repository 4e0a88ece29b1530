"""Worlds whose columns share tables learn what plain torch learns, in one process and in many."""

from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional

from dlrm_hybrid.bags import jagged
from dlrm_hybrid.data.loader import Batch
from dlrm_hybrid.export.plain import PlainDlrm
from dlrm_hybrid.model.spec import ModelSpec
from dlrm_hybrid.saved.inputs import ListInputs, inputs_of
from dlrm_hybrid.types import DataError
from dlrm_hybrid.world.world import World

COLUMNS, LISTS = (0, 1, 0, 0), ListInputs((2,))
SPEC = ModelSpec(
    **{"embedding_dim": 4, "bottom": (3, 8, 4), "top": (8, 1)},
    **{"table_rows": (20, 7), "table_of_column": COLUMNS, "table_dims": (6, 4)},
)
ROWS, STEPS, LR = 32, 12, 0.1


def batch_of(seed: int, rows: int = ROWS) -> Batch:
    rng = np.random.default_rng(seed)
    lengths_FB = np.ones((len(COLUMNS), rows), np.int64)
    lengths_FB[[*LISTS.columns]] = rng.integers(0, 5, rows)
    counts = zip(COLUMNS, lengths_FB.sum(1).tolist(), strict=True)
    values_N = np.concatenate([rng.integers(0, SPEC.table_rows[one], n) for one, n in counts])
    label_B = (rng.random(rows) < 0.4).astype(np.float32)
    return Batch(rng.random((rows, 3), np.float32), jagged(values_N, lengths_FB), label_B)


def score(model: PlainDlrm, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
    inputs = inputs_of(batch.dense_BI, batch.bags, LISTS)
    named = {name: torch.from_numpy(one) for name, one in inputs.items()}
    return model(dense=named["dense"], ids=named["ids"], lists=[named["ids_3"]])


def plain_steps(world: World, optimizer: str) -> PlainDlrm:
    """The world's model in modules of torch, trained by torch's optimizers on the same batches."""
    values = {name: one.clone() for name, one in world.state_dict().items()}
    model = PlainDlrm(SPEC, {name: values[name] for name in values}, LISTS).requires_grad_(True)
    tables = list(model.embedding.parameters())
    dense = [one for one in model.parameters() if all(one is not table for table in tables)]
    optimizers: list[Any] = [torch.optim.SGD(dense, lr=LR)]
    is_adagrad = optimizer == "adagrad"
    make = torch.optim.Adagrad if is_adagrad else torch.optim.SGD
    optimizers.append(make(tables, lr=LR, **({"eps": 1e-8} if is_adagrad else {})))
    for step in range(STEPS):
        batch = batch_of(step)
        logit_B, _ = score(model, batch)
        label_B = torch.from_numpy(batch.label_B)
        loss = functional.binary_cross_entropy_with_logits(logit_B, label_B)
        for one in optimizers:
            one.zero_grad()
        loss.backward()
        for one in optimizers:
            one.step()
    return model


@pytest.mark.parametrize("optimizer", ["sgd", "adagrad"])
@pytest.mark.parametrize("served", [False, True])
def test_a_world_learns_what_torch_learns(optimizer: str, served: bool) -> None:
    keys = {"optimizer.lr": LR, "embedding.optimizer": optimizer}
    if served:
        keys |= {"embedding": "served", "parallel.table_servers": 2}
    layout: dict[str, Any] = {"trainers": 1, "cuts": [], "servers": 1, "batch_size": ROWS}
    with World.in_process(SPEC, **layout, config=keys) as world:
        first = {name: one.clone() for name, one in world.state_dict().items()}
        expected = plain_steps(world, optimizer)
        for step in range(STEPS):
            world.step(batch_of(step))
        found = world.state_dict()
        for number, table in enumerate(expected.embedding, 1):
            name = f"embedding.{number}.weight"
            assert (found[name] - table.weight).abs().max() <= 1e-6  # type: ignore[operator]
            assert (found[name] - first[name]).abs().max() > 1e-3
        assert (found["bottom.1.weight"] - expected.bottom[0].weight).abs().max() <= 1e-6
        scores_B = world.predict([batch_of(99)])
        assert np.abs(scores_B - score(expected, batch_of(99))[1].detach().numpy()).max() <= 1e-6


def test_ids_are_those_of_a_columns_table() -> None:
    layout: dict[str, Any] = {"trainers": 1, "cuts": [], "servers": 0, "batch_size": 2}
    dense, label = np.zeros((2, 3)), np.zeros(2)
    with World.in_process(SPEC, **layout) as world:
        with pytest.raises(DataError, match=r"ids of 2 rows × 2 columns, must be 2 × 4: "):
            world.step((dense, np.zeros((2, 2), int), label))
        wrong = np.zeros((2, 4), int)
        wrong[1, 3] = 20
        with pytest.raises(DataError, match=r"id 20 of row 1 in embedding.1, which has 20 rows"):
            world.step((dense, wrong, label))
