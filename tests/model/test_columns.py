"""Columns that share tables, held against torch: one weight, which several columns look up."""

from typing import Any

import numpy as np
import pytest
import torch
from bag_draws import drawn_bags, pooled_by_torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from dlrm_hybrid.bags import Bags
from dlrm_hybrid.model.columns import ColumnBags
from dlrm_hybrid.model.embeddings import Embeddings, tensor_bags
from dlrm_hybrid.model.interaction import Dot
from dlrm_hybrid.model.spec import ModelSpec
from dlrm_hybrid.model.tables import Fused
from dlrm_hybrid.model.tensors import draw_embeddings
from dlrm_hybrid.types import ConfigError

SHAPE: dict[str, Any] = {"embedding_dim": 8, "bottom": (13, 8), "top": (4, 1)}
SPEC = ModelSpec(**SHAPE, table_rows=(30, 50, 7), table_of_column=(0, 1, 0, 2, 0, 1))
COLUMNS = ColumnBags(SPEC.table_of_column)
ROWS, STEPS, LR, EPS = 40, 12, 0.1, 1e-8


def bags_of(seed: object, rows: int) -> Bags[Tensor]:
    """Lists, but for the first column; those of the last one are empty."""
    return tensor_bags(drawn_bags(seed, [SPEC.table_rows[one] for one in SPEC.columns], rows))


def gradient_of(step: int, rows: int) -> Tensor:
    drawn = torch.Generator().manual_seed(step)
    return torch.randn((rows, len(SPEC.columns), 8), generator=drawn) / 16


def by_torch(tables: list[Tensor], bags: Bags[Tensor], is_sparse: bool = False) -> Tensor:
    """Each column looks up the one weight of its table."""
    weights = {str(place): tables[one] for place, one in enumerate(SPEC.columns)}
    return pooled_by_torch(weights, bags, is_sparse)


def drawn(optimizer: Any, kernel: Any) -> Embeddings:
    embeddings = Embeddings(SPEC, Fused(optimizer=optimizer, eps=EPS, kernel=kernel))
    draw_embeddings(embeddings.weights(), seed=4)
    embeddings.set_lr(LR)
    return embeddings


def rowwise(weights: list[Tensor], sums: list[Tensor]) -> None:
    """FBGEMM's row-wise Adagrad, of rows that have gradients."""
    for weight, sum_R in zip(weights, sums, strict=True):
        gradient_RD = weight.grad.to_dense()
        sum_R += gradient_RD.square().mean(1)
        with torch.no_grad():
            weight -= LR * gradient_RD / (sum_R.sqrt() + EPS).unsqueeze(1)


@pytest.mark.parametrize("kernel", ["fbgemm", "numba"])
@pytest.mark.parametrize("optimizer", ["sgd", "adagrad", "rowwise_adagrad", "adam"])
def test_a_row_that_several_columns_look_up_is_updated_once(optimizer: str, kernel: str) -> None:
    embeddings = drawn(optimizer, kernel)
    first = [one.clone() for one in embeddings.weights().values()]
    weights = [one.clone().requires_grad_() for one in first]
    sums = [torch.zeros(rows) for rows in SPEC.table_rows]
    by_name: dict[str, Any] = {
        "sgd": torch.optim.SGD(weights, lr=LR),
        "adagrad": torch.optim.Adagrad(weights, lr=LR, eps=EPS),
        "adam": torch.optim.SparseAdam(weights, lr=LR, eps=EPS),
    }
    for step in range(STEPS):
        bags, gradient_BCD = bags_of(step, ROWS), gradient_of(step, ROWS)
        found = COLUMNS.by_column(embeddings(COLUMNS.by_table(bags)))
        expected = by_torch(weights, bags, is_sparse=True)
        assert (found - expected).abs().max() <= 1e-6
        found.backward(gradient_BCD)
        for one in weights:
            one.grad = None
        expected.backward(gradient_BCD)
        if optimizer in by_name:
            by_name[optimizer].step()
        else:
            rowwise(weights, sums)
    for before, one, other in zip(first, embeddings.weights().values(), weights, strict=True):
        assert (one - other).abs().max() <= 1e-6
        assert (one - before).abs().min() > 0


@given(st.integers(0, 2**32 - 1), st.integers(0, 9))
def test_columns_get_their_own_rows_and_tables_all_gradients(seed: int, rows: int) -> None:
    bags, gradient_BCD = bags_of(seed, rows), gradient_of(seed, rows)
    tables = [torch.randn(one, 8).requires_grad_() for one in SPEC.table_rows]
    of_tables = COLUMNS.by_table(bags)
    assert (of_tables.tables, of_tables.rows) == (3, 3 * rows)
    pooled_NFD = pooled_by_torch({str(i): one for i, one in enumerate(tables)}, of_tables)
    expected_BCD = by_torch(tables, bags)
    assert torch.equal(COLUMNS.by_column(pooled_NFD), expected_BCD)
    given_to = torch.autograd.grad(expected_BCD, tables, gradient_BCD)
    found = torch.autograd.grad(pooled_NFD, tables, COLUMNS.gradients(gradient_BCD))
    for one, other in zip(found, given_to, strict=True):
        assert torch.allclose(one, other, rtol=1e-6, atol=1e-5)


def test_ids_of_one_a_row_are_bags_too() -> None:
    ids_CB = torch.from_numpy(np.random.default_rng(0).integers(0, 7, (6, 5)))
    embeddings = drawn("sgd", "fbgemm")
    found = COLUMNS.by_column(embeddings(COLUMNS.by_table(Bags(ids_CB))))
    tables = list(embeddings.weights().values())
    for column, table in enumerate(SPEC.columns):
        assert torch.equal(found[:, column], tables[table][ids_CB[column]])


def test_as_many_vectors_meet_as_there_are_columns() -> None:
    assert ColumnBags.of(ModelSpec(**SHAPE, table_rows=(3, 4))).most == 1
    pair = {**SHAPE, "bottom": (), "table_rows": (9,), "interaction": Dot()}
    assert (SPEC.num_vectors, SPEC.table_names) == (
        7,
        ("embedding.1", "embedding.2", "embedding.3"),
    )
    assert ModelSpec(**pair, table_of_column=(0, 0)).num_vectors == 2
    with pytest.raises(ConfigError, match="one table and no bottom MLP make no pair"):
        ModelSpec(**pair)


@pytest.mark.parametrize("wrong", [(0,), (1, 0), (0, 2), (0, 1, 2), (-1, 0, 1)])
def test_tables_are_numbered_as_columns_name_them(wrong: tuple[int, ...]) -> None:
    with pytest.raises(ConfigError, match=r"model.table_of_column: .* must number 2 tables from 0"):
        ModelSpec(**SHAPE, table_rows=(3, 4), table_of_column=wrong)
