"""What computes on the CPU only names a tensor of another device; the dense layers run on any."""

import numpy as np
import pytest
import torch

from dlrm_hybrid.bags import Bags
from dlrm_hybrid.model.embeddings import Embeddings, distinct_ids
from dlrm_hybrid.model.exchange.ids import check_ids
from dlrm_hybrid.model.layers.mlp import Mlp
from dlrm_hybrid.model.layers.products import Precision
from dlrm_hybrid.model.spec import ModelSpec
from dlrm_hybrid.model.tables import Fused, TableOptimizer

SPEC = ModelSpec(embedding_dim=4, bottom=(13, 4), top=(8, 1), table_rows=(10, 20))
IDS = Bags(torch.zeros(2, 3, dtype=torch.int64, device="meta"))


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


@pytest.mark.parametrize("precision", list(Precision))
def test_dense_layers_run_on_another_device(precision: Precision):
    with torch.device("meta"):
        mlp = Mlp((13, 512, 16), relu_last=True, precision=precision)
        x_BN = torch.zeros(5, 13, requires_grad=True)
        y_BM = mlp(x_BN)
        y_BM.sum().backward()
    assert y_BM.device.type == "meta" and y_BM.shape == (5, 16)
    assert [p.grad is not None and p.grad.shape == p.shape for p in mlp.parameters()] == [True] * 4
