"""What computes on the CPU only names a tensor of another device; all else runs on any.

On `meta` tensors have no values, so that to wait for one is an error.
"""

from dataclasses import replace
from typing import get_args

import numpy as np
import pytest
import torch
from bag_draws import counted

from dlrm_hybrid.bags import Bags
from dlrm_hybrid.model.columns import ColumnBags
from dlrm_hybrid.model.embeddings import Embeddings, distinct_ids, with_means
from dlrm_hybrid.model.exchange.ids import check_ids
from dlrm_hybrid.model.layers.mlp import Mlp
from dlrm_hybrid.model.layers.products import Precision
from dlrm_hybrid.model.placement import Placement
from dlrm_hybrid.model.spec import ModelSpec
from dlrm_hybrid.model.tables import Fused, TableOptimizer
from dlrm_hybrid.model.tensors import draw_embeddings

SPEC = ModelSpec(embedding_dim=4, bottom=(13, 4), top=(8, 1), table_rows=(10, 20))
META = torch.device("meta")
IDS = Bags(torch.zeros(2, 3, dtype=torch.int64, device=META))


@pytest.mark.parametrize("optimizer", ["sgd", "adagrad"])
def test_tables_refuse_ids_of_another_device(optimizer: TableOptimizer):
    embeddings = Embeddings(SPEC, Fused(optimizer=optimizer))
    with pytest.raises(ValueError, match=r"bags is on meta, .* pass its \.cpu\(\)"):
        embeddings(IDS)


def test_exchanges_refuse_ids_of_another_device():
    with pytest.raises(ValueError, match="bags is on meta"):
        distinct_ids(IDS, np.arange(2))
    with pytest.raises(ValueError, match="bags is on meta"):
        check_ids(IDS, torch.tensor([[10], [20]]))


@pytest.mark.parametrize("optimizer", get_args(TableOptimizer))
def test_tables_of_a_device_are_looked_up_and_learn_there(optimizer: TableOptimizer):
    options = Fused(optimizer=optimizer, weight_decay=0.1)
    tables = Embeddings(SPEC, options, Placement(META, is_apart=True))
    draw_embeddings(tables.weights(), seed=1)
    tables.set_lr(0.1)
    for bags in (Bags(IDS.values.new_zeros(2, 3, device="cpu")), counted(torch.ones(2, 5).long())):
        pooled_BFD = tables(bags)
        assert pooled_BFD.device == META and pooled_BFD.shape == (bags.rows, 2, 4)
        assert with_means(pooled_BFD, replace(bags, averaged=(1,))).device == META
        pooled_BFD.backward(torch.zeros_like(pooled_BFD))
    held = {**tables.weights(), **tables.optimizer_state()}
    assert {name for name, one in held.items() if one.device != META} == {
        name for name in held if name.endswith(".step")
    }
    with pytest.raises(RuntimeError, match="id 10 is out of bounds: table 1 has 10 rows"):
        tables(counted(torch.tensor([[10], [0]])))


def test_rows_of_shared_tables_are_those_of_columns_there():
    columns = ColumnBags((0, 1, 0), META)
    assert columns.by_column(torch.empty(6, 2, 4, device=META)).shape == (3, 3, 4)
    assert columns.gradients(torch.empty(3, 3, 4, device=META)).device == META


@pytest.mark.parametrize("precision", list(Precision))
def test_dense_layers_run_on_another_device(precision: Precision):
    with torch.device("meta"):
        mlp = Mlp((13, 512, 16), relu_last=True, precision=precision)
        x_BN = torch.zeros(5, 13, requires_grad=True)
        y_BM = mlp(x_BN)
        y_BM.sum().backward()
    assert y_BM.device.type == "meta" and y_BM.shape == (5, 16)
    assert [p.grad is not None and p.grad.shape == p.shape for p in mlp.parameters()] == [True] * 4
