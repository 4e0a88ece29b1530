"""Bags of any size: pooled and learned as torch does, and as ids are where each bag has one."""

from dataclasses import replace
from typing import get_args

import numpy as np
import pytest
import torch
from bag_draws import counted, drawn_bags, pooled_by_torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from dlrm_hybrid.bags import Bags
from dlrm_hybrid.model.embeddings import Embeddings, distinct_ids, tensor_bags, with_means
from dlrm_hybrid.model.placement import HOST, Placement
from dlrm_hybrid.model.spec import ModelSpec
from dlrm_hybrid.model.tables import Fused, TableOptimizer
from dlrm_hybrid.model.tensors import draw_embeddings

SPEC = ModelSpec(embedding_dim=8, bottom=(13, 8), top=(4, 1), table_rows=(3, 50, 1, 17, 9))
TABLES, DIM, LR, EPS = 5, 8, 0.1, 1e-8
STEPS, ROWS = 12, 33


DEVICE = Placement(torch.device("cpu"), is_apart=True)  # the CPU stands for one


def embeddings_of(optimizer: TableOptimizer, place: Placement = HOST) -> Embeddings:
    embeddings = Embeddings(SPEC, Fused(optimizer=optimizer, eps=EPS), place)
    draw_embeddings(embeddings.weights(), seed=4)
    embeddings.set_lr(LR)
    return embeddings


def gradient_of(step: int, rows: int) -> Tensor:
    generator = torch.Generator().manual_seed(step)
    return torch.randn((rows, TABLES, DIM), generator=generator)


def ids_of(step: int, rows: int) -> Tensor:
    rng = np.random.default_rng(step)
    return torch.from_numpy(np.stack([rng.integers(0, one, rows) for one in SPEC.table_rows]))


@pytest.mark.parametrize("optimizer", get_args(TableOptimizer))
@pytest.mark.parametrize("rows", [0, 1, ROWS])
@pytest.mark.parametrize("place", [HOST, DEVICE], ids=["host", "device"])
def test_bags_of_one_id_learn_the_bits_of_ids(
    place: Placement, optimizer: TableOptimizer, rows: int
) -> None:
    one, other = embeddings_of(optimizer, place), embeddings_of(optimizer, place)
    for step in range(STEPS):
        ids_FB, gradient_BFD = ids_of(step, rows), gradient_of(step, rows)
        looked_up, also = one(Bags(ids_FB)), other(counted(ids_FB))
        assert torch.equal(looked_up, also)
        looked_up.backward(gradient_BFD)
        also.backward(gradient_BFD)
    first = embeddings_of(optimizer).weights()
    for name, weight in one.weights().items():
        assert torch.equal(weight, other.weights()[name])
        assert torch.equal(weight, first[name]) is (rows == 0)
    for name, state in one.optimizer_state().items():
        assert torch.equal(state, other.optimizer_state()[name])


@given(st.integers(0, 2**32 - 1), st.integers(0, 12), st.permutations(range(TABLES)), st.booleans())
def test_distinct_ids_pool_and_sum_what_all_ids_do(
    seed: int, rows: int, order: list[int], weighted: bool
) -> None:
    bags = tensor_bags(drawn_bags(seed, SPEC.table_rows, rows, weighted))
    order_F = np.array(order)
    ids = distinct_ids(bags, order_F)
    weights = {
        name: torch.nn.Parameter(weight.clone())
        for name, weight in embeddings_of("sgd").weights().items()
    }
    tables = list(weights.values())
    parts = np.split(ids.ids_K, np.cumsum(ids.counts_F)[:-1])
    assert all((np.diff(part) > 0).all() for part in parts)
    rows_KD = torch.cat([tables[t][torch.from_numpy(x)] for t, x in zip(order, parts, strict=True)])
    expected_BFD, gradient_BFD = pooled_by_torch(weights, bags), gradient_of(seed, rows)
    assert torch.equal(ids.pool(rows_KD.detach()), expected_BFD)
    expected_BFD.backward(gradient_BFD)
    sum_KD = ids.sum_by_id(gradient_BFD)
    assert len(sum_KD) == len(ids.ids_K)
    sums = sum_KD.split(ids.counts_F.tolist())
    for table, part, sum_XD in zip(order, parts, sums, strict=True):
        full_RD = torch.zeros_like(tables[table])
        full_RD[torch.from_numpy(part)] = sum_XD
        assert torch.allclose(full_RD, tables[table].grad, rtol=1e-6, atol=1e-5)
    assert ids.most == np.diff(bags.offsets[:: max(rows, 1)]).max(initial=0) if rows else True


@pytest.mark.parametrize("averaged", [(1,), (0, 1, 3, 4)])
def test_means_and_their_gradients_are_those_of_torch(averaged: tuple[int, ...]) -> None:
    bags = replace(tensor_bags(drawn_bags(3, SPEC.table_rows, ROWS)), averaged=averaged)
    embeddings, gradient_BFD = embeddings_of("sgd"), gradient_of(1, ROWS)
    first = {name: weight.clone() for name, weight in embeddings.weights().items()}
    leaves = {name: weight.clone().requires_grad_() for name, weight in first.items()}
    expected_BFD, sum_BFD = pooled_by_torch(leaves, bags), embeddings(bags)
    expected_BFD.backward(gradient_BFD)
    assert (with_means(sum_BFD.detach(), bags) - expected_BFD).abs().max() <= 1e-6
    assert (sum_BFD - expected_BFD).abs().max() > 0.1
    sum_BFD.backward(with_means(gradient_BFD, bags))
    for name, weight in embeddings.weights().items():
        gradient = leaves[name].grad
        assert gradient is not None
        assert (first[name] - LR * gradient - weight).abs().max() <= 1e-6, name


@given(st.integers(0, 2**32 - 1), st.integers(0, 12))
def test_distinct_ids_of_bags_of_one_id_are_those_of_ids(seed: int, rows: int) -> None:
    ids_FB, order_F = ids_of(seed, rows), np.arange(TABLES)[::-1].copy()
    one, other = distinct_ids(Bags(ids_FB), order_F), distinct_ids(counted(ids_FB), order_F)
    assert np.array_equal(one.ids_K, other.ids_K)
    assert np.array_equal(one.counts_F, other.counts_F)
    assert one.most == other.most == rows
    rows_KD = torch.randn(len(one.ids_K), DIM)
    assert torch.equal(one.pool(rows_KD), other.pool(rows_KD))
    gradient_BFD = gradient_of(seed, rows)
    assert torch.equal(one.sum_by_id(gradient_BFD), other.sum_by_id(gradient_BFD))


def test_ids_of_the_largest_tables_are_told_apart() -> None:
    """Where keys have no bits left for places."""
    tables = 2000
    ids_FB = torch.from_numpy(np.random.default_rng(0).integers(2**31 - 3, 2**31, (tables, 9)))
    order_F = np.random.default_rng(1).permutation(tables)
    for values_FB in (ids_FB, ids_FB.repeat(1, 500)):
        one, other = (
            distinct_ids(Bags(values_FB), order_F),
            distinct_ids(counted(values_FB), order_F),
        )
        assert np.array_equal(one.ids_K, other.ids_K)
        assert np.array_equal(one.counts_F, other.counts_F)
        rows_KD = torch.arange(len(one.ids_K), dtype=torch.float32)[:, None]
        assert torch.equal(one.pool(rows_KD), other.pool(rows_KD))


@pytest.mark.parametrize("bad_id", [-1, 2**31, 2**33])
def test_an_id_that_no_table_has_is_an_error_among_distinct_ones(bad_id: int) -> None:
    bags = tensor_bags(drawn_bags(1, SPEC.table_rows, ROWS))
    bags.values[3] = bad_id
    with pytest.raises(RuntimeError, match="out of bounds"):
        distinct_ids(bags, np.arange(TABLES))


def test_offsets_that_are_none_are_an_error() -> None:
    bags = Bags(torch.zeros(6, dtype=torch.int64), torch.tensor([0, 1, 2, 3, 4, 7]), TABLES)
    message = "offsets of 5 bags of 5 tables"
    with pytest.raises(ValueError, match=message):
        embeddings_of("sgd")(bags)
    with pytest.raises(ValueError, match=message):
        distinct_ids(bags, np.arange(TABLES))
