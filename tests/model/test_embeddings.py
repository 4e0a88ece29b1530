from typing import get_args

import pytest
import torch
from torch import Tensor
from torchrec.modules.embedding_configs import EmbeddingBagConfig, PoolingType
from torchrec.modules.fused_embedding_modules import FusedEmbeddingBagCollection
from torchrec.optim import RowWiseAdagrad
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from dlrm_hybrid.bags import Bags
from dlrm_hybrid.model.embeddings import DistinctBags, Embeddings
from dlrm_hybrid.model.rows.kernels import SMALL_IDS
from dlrm_hybrid.model.spec import ModelSpec
from dlrm_hybrid.model.tables import BY_FBGEMM, Fused, TableOptimizer
from dlrm_hybrid.model.tensors import draw_embeddings

SPEC = ModelSpec(embedding_dim=8, bottom=(13, 8), top=(4, 1), table_rows=(3, 50, 1, 17))
EPS = 1e-8
TORCHREC_OPTIMIZERS = {
    "sgd": torch.optim.SGD,
    "adagrad": torch.optim.Adagrad,
    "rowwise_adagrad": RowWiseAdagrad,
}


def _embeddings(optimizer: TableOptimizer) -> Embeddings:
    embeddings = Embeddings(SPEC, Fused(optimizer=optimizer, eps=EPS))
    draw_embeddings(embeddings.weights(), seed=4)
    embeddings.set_lr(0.1)
    return embeddings


def _ids(seed: int, rows: int = 32) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.stack(
        [torch.randint(0, limit, (rows,), generator=generator) for limit in SPEC.table_rows]
    )


def _learn(embeddings: Embeddings, steps: range) -> None:
    for step in steps:
        out_BFD = embeddings(Bags(_ids(step)))
        gradient = torch.randn(out_BFD.shape, generator=torch.Generator().manual_seed(step))
        out_BFD.backward(gradient)


def test_looks_up_the_row_of_every_id():
    embeddings = _embeddings("sgd")
    tables = list(embeddings.weights().values())
    for rows in (5, 32, 1):
        ids_FB = _ids(rows, rows)
        expected = torch.stack([table[ids] for table, ids in zip(tables, ids_FB, strict=True)], 1)
        assert torch.equal(embeddings(Bags(ids_FB)).detach(), expected)


@pytest.mark.parametrize("optimizer", BY_FBGEMM)
def test_learns_the_bits_that_torchrec_learns(optimizer: TableOptimizer):
    embeddings = _embeddings(optimizer)
    torchrec = FusedEmbeddingBagCollection(
        tables=[
            EmbeddingBagConfig(
                name=name.replace(".", "_"),
                embedding_dim=SPEC.embedding_dim,
                num_embeddings=rows,
                feature_names=[name],
                pooling=PoolingType.SUM,
            )
            for name, rows in zip(SPEC.table_names, SPEC.table_rows, strict=True)
        ],
        optimizer_type=TORCHREC_OPTIMIZERS[optimizer],
        optimizer_kwargs={"lr": 0.1, "eps": EPS} if optimizer != "sgd" else {"lr": 0.1},
    )
    theirs = list(torchrec.state_dict().values())
    for weight, their_weight in zip(embeddings.weights().values(), theirs, strict=True):
        their_weight.copy_(weight)
    for step in range(3):
        ids_FB = _ids(step)
        lengths = torch.ones(ids_FB.numel(), dtype=torch.int64)
        features = KeyedJaggedTensor(list(SPEC.table_names), ids_FB.flatten(), lengths=lengths)
        looked_up = embeddings(Bags(ids_FB))
        theirs_looked_up = torchrec(features).values()
        assert torch.equal(theirs_looked_up.view(32, 4, 8), looked_up)
        gradient_BFD = torch.randn((32, 4, 8), generator=torch.Generator().manual_seed(step))
        looked_up.backward(gradient_BFD)
        theirs_looked_up.backward(gradient_BFD.view(32, -1))
    for weight, their_weight in zip(embeddings.weights().values(), theirs, strict=True):
        assert torch.equal(weight, their_weight)


@pytest.mark.parametrize("rows", [1, 32, SMALL_IDS // 4, SMALL_IDS // 4 + 1])
def test_any_batch_learns_the_bits_that_fbgemm_learns(rows: int):
    ours, fbgemm = _embeddings("sgd"), _embeddings("sgd")
    for step in range(3):
        ids_FB = _ids(step, rows)
        bags_K = torch.arange(ids_FB.numel())
        bags = DistinctBags(ids_FB.flatten(), torch.arange(ids_FB.numel() + 1), bags_K)
        gradient_BFD = torch.randn((rows, 4, 8), generator=torch.Generator().manual_seed(step))
        ours(Bags(ids_FB)).backward(gradient_BFD)
        fbgemm.pooled(bags).backward(gradient_BFD.view(rows, -1))
    before = _embeddings("sgd").weights()
    for name, weight in ours.weights().items():
        assert not torch.equal(weight, before[name])
        assert torch.equal(weight, fbgemm.weights()[name])


@pytest.mark.parametrize("optimizer", get_args(TableOptimizer))
@pytest.mark.parametrize("rows", [32, SMALL_IDS])
@pytest.mark.parametrize("bad_id", [-1, 17])
def test_an_id_outside_its_table_is_an_error(bad_id: int, rows: int, optimizer: TableOptimizer):
    ids_FB = _ids(1, rows)
    ids_FB[3, 5] = bad_id
    with pytest.raises(RuntimeError, match=r"out of bounds|num_rows"):
        _embeddings(optimizer)(Bags(ids_FB))


def test_building_and_learning_warn_of_nothing(
    recwarn: pytest.WarningsRecorder, caplog: pytest.LogCaptureFixture
):
    _learn(_embeddings("rowwise_adagrad"), range(1))
    assert [str(warning.message) for warning in recwarn] == []
    assert caplog.records == []
