"""Rows of table servers learn what tables of one process learn, whoever owns them."""

from typing import get_args

import numpy as np
import pytest
import torch
from torch import Tensor

from dlrm_hybrid.bags import Bags
from dlrm_hybrid.compress.embedding.memory import Rows
from dlrm_hybrid.model.embeddings import Embeddings, distinct_bags, distinct_ids
from dlrm_hybrid.model.spec import ModelSpec
from dlrm_hybrid.model.table_rows import TableRows, owned_rows
from dlrm_hybrid.model.tables import BY_FBGEMM, Fused, TableOptimizer
from dlrm_hybrid.model.tensors import draw_embeddings

SPEC = ModelSpec(embedding_dim=8, bottom=(13, 8), top=(1,), table_rows=(1, 2, 7, 50) + (20,) * 22)
ORDER_F = np.arange(26)
STEPS, LR = 12, 0.5


def batch(seed: int) -> tuple[Tensor, Tensor]:
    rng = np.random.default_rng(seed)
    ids_FB = np.stack([rng.integers(0, rows, 24) for rows in SPEC.table_rows])
    gradient_BFD = rng.standard_normal((24, 26, 8)).astype(np.float32)
    return torch.from_numpy(ids_FB), torch.from_numpy(gradient_BFD)


def restored(servers: list[TableRows]) -> dict[str, Tensor]:
    """Full tensors from the pieces of all servers."""
    full: dict[str, Tensor] = {}
    for server in servers:
        for piece in server.pieces():
            tensor = full.setdefault(piece.name, torch.full(piece.shape, torch.nan))
            tensor[piece.begin[0] :: piece.every] = piece.view
    return full


def share(ids_K: np.ndarray, counts_F: np.ndarray, server: int, servers: int) -> tuple:
    """The part of distinct ids that a server owns, and where it is among them."""
    mine_K = ids_K % servers == server
    table_K = np.repeat(ORDER_F, counts_F)[mine_K]
    owned = Rows(ids_K[mine_K] // servers, np.bincount(table_K, minlength=26))
    return owned, np.flatnonzero(mine_K)


@pytest.mark.parametrize("optimizer", get_args(TableOptimizer))
@pytest.mark.parametrize(("trainers", "servers"), [(1, 1), (1, 3), (3, 1), (2, 2)])
def test_learn_what_tables_in_one_process_learn(
    optimizer: TableOptimizer, trainers: int, servers: int
) -> None:
    options = Fused(optimizer=optimizer)
    oracle = Embeddings(SPEC, options)
    draw_embeddings(oracle.weights(), 1)
    first = {name: table.clone() for name, table in oracle.weights().items()}
    rows = [TableRows(SPEC, options, server, servers) for server in range(servers)]
    for one in rows:
        one.draw(1)
    for name, table in first.items():
        assert torch.equal(restored(rows)[name], table), name
    for step in range(STEPS):
        batches = [batch(trainers * step + trainer) for trainer in range(trainers)]
        found = [distinct_ids(Bags(ids_FB), ORDER_F) for ids_FB, _ in batches]
        sums = [ids.sum_by_id(grad) for ids, (_, grad) in zip(found, batches, strict=True)]
        bags = distinct_bags(
            np.concatenate([ids.ids_K for ids in found]), np.stack([ids.counts_F for ids in found])
        )
        oracle.set_lr(LR)
        pooled_NW = oracle.pooled(bags)
        expected_KD = bags.gather(pooled_NW.detach(), 8)
        pooled_NW.backward(bags.scatter(torch.cat(sums), pooled_NW.shape))
        begins = np.cumsum([0, *(len(ids.ids_K) for ids in found)])
        for server, one in enumerate(rows):
            gradients = []
            for begin, ids, sum_KD in zip(begins, found, sums, strict=False):
                owned, where_K = share(ids.ids_K, ids.counts_F, server, servers)
                assert torch.allclose(one.look_up(owned), expected_KD[begin + where_K], atol=1e-6)
                gradients.append((owned, sum_KD[where_K]))
            one.update(gradients, LR)
    expected, learned = oracle.weights() | oracle.optimizer_state(), restored(rows)
    assert expected.keys() == learned.keys()
    for name, tensor in expected.items():
        if optimizer == "sgd" or optimizer not in BY_FBGEMM:
            assert torch.equal(tensor, learned[name]), name
        assert torch.allclose(tensor, learned[name], atol=1e-6, rtol=1e-6), name
    assert min((learned[name] - table).abs().max() for name, table in first.items()) > 0.1


@pytest.mark.parametrize("servers", [1, 2, 3, 7])
def test_every_row_has_one_owner(servers: int) -> None:
    owned = [owned_rows((1, 2, 10), server, servers) for server in range(servers)]
    assert [sum(rows) for rows in zip(*owned, strict=True)] == [1, 2, 10]
    assert owned == [
        tuple(len(range(server, rows, servers)) for rows in (1, 2, 10)) for server in range(servers)
    ]
