from math import sqrt

import numpy as np
import pytest
import torch
from plain_dlrm import PlainBatch, PlainDlrm, PlainTraining
from reference_step import Dlrm, Trainer, predict
from torch import Tensor

from dlrm_hybrid.bags import Bags
from dlrm_hybrid.model.layers.products import Precision
from dlrm_hybrid.model.optimizer import Adagrad, Adam, Momentum, Optimizer, Sgd
from dlrm_hybrid.model.spec import ModelSpec
from dlrm_hybrid.model.tables import Fused, TableOptimizer
from dlrm_hybrid.parallel.stage import count_correct

PAPER = ModelSpec(
    embedding_dim=16,
    bottom=(13, 512, 256, 64, 16),
    top=(512, 256, 128, 1),
    table_rows=tuple(2 + 7 * table for table in range(26)),
)
SMALL = ModelSpec(embedding_dim=4, bottom=(13, 16, 4), top=(16, 1), table_rows=(30,) * 26)
BATCH = 64

Batch = tuple[Tensor, Tensor, Tensor]


def _model(
    spec: ModelSpec,
    precision: Precision = Precision.FLOAT32,
    optimizer: TableOptimizer = "sgd",
    seed: int = 1,
) -> Dlrm:
    return Dlrm(spec, Fused(optimizer=optimizer), precision, seed)


def _batch(spec: ModelSpec, seed: int) -> Batch:
    rng = np.random.default_rng(seed)
    dense_BI = np.log1p(rng.pareto(1, (BATCH, 13))).astype(np.float32)
    ids_FB = np.stack([rng.integers(0, rows, BATCH) for rows in spec.table_rows])
    label_B = (rng.random(BATCH) < 0.3).astype(np.float32)
    return torch.from_numpy(dense_BI), torch.from_numpy(ids_FB), torch.from_numpy(label_B)


def _plain_batch(batch: Batch) -> PlainBatch:
    dense_BI, ids_FB, label_B = batch
    return PlainBatch(dense_BI, torch.arange(BATCH).expand_as(ids_FB), ids_FB, label_B.view(-1, 1))


def _twin(model: Dlrm) -> PlainDlrm:
    """A plain model with the same weights."""
    plain = PlainDlrm(model.spec, seed=0)
    with torch.no_grad():
        for name, tensor in _plain_weights(plain).items():
            tensor.copy_({**model.dense_parameters(), **model.embeddings.weights()}[name])
    return plain


def _plain_weights(plain: PlainDlrm) -> dict[str, Tensor]:
    weights: dict[str, Tensor] = {}
    for name, layer in plain.linears().items():
        weights |= {f"{name}.weight": layer.weight, f"{name}.bias": layer.bias}
    for number, table in enumerate(plain.tables, 1):
        weights[f"embedding.{number}.weight"] = table.weight
    return weights


def test_twenty_sgd_steps_equal_the_plain_model():
    model = _model(PAPER)
    plain = _twin(model)
    trainer, opponent = Trainer(model, Sgd()), PlainTraining(plain, lr=0.1)
    first = {name: tensor.clone() for name, tensor in trainer.tensors().items()}
    for step in range(20):
        batch = _batch(PAPER, step)
        result = trainer.step(*batch, lr=0.1, embedding_lr=0.1)
        torch.testing.assert_close(
            result.loss, opponent.step(_plain_batch(batch)), rtol=0, atol=1e-6
        )
    mine = trainer.tensors()
    assert len(mine) == 16 + 26
    for name, weight in _plain_weights(plain).items():
        assert (mine[name] - first[name]).abs().max() > 1e-4, name
        torch.testing.assert_close(mine[name], weight.detach(), rtol=0, atol=1e-6, msg=name)


def test_initial_values_follow_the_laws_and_only_the_seed():
    spec = ModelSpec(
        embedding_dim=16, bottom=(13, 512, 16), top=(512, 1), table_rows=(4000, 20, 4000)
    )
    tensors = Trainer(_model(spec), Sgd()).tensors()
    again = Trainer(_model(spec, Precision.BFLOAT16), Sgd()).tensors()
    other = Trainer(_model(spec, seed=2), Sgd()).tensors()
    assert all(torch.equal(tensors[name], again[name]) for name in tensors)
    assert not any(torch.equal(tensors[name], other[name]) for name in tensors)
    assert tensors["bottom.1.weight"].std() == pytest.approx(sqrt(2 / 525), rel=0.05)
    assert tensors["bottom.1.bias"].std() == pytest.approx(sqrt(1 / 512), rel=0.15)
    for name, rows in (("embedding.1.weight", 4000), ("embedding.2.weight", 20)):
        bound = 1 / sqrt(rows)
        assert 0.95 * bound < tensors[name].abs().max() <= bound
        assert tensors[name].mean().abs() < 0.1 * bound
    assert not torch.equal(tensors["embedding.1.weight"], tensors["embedding.3.weight"])


@pytest.mark.parametrize(
    ("optimizer", "embedding"),
    [
        (Sgd(), "sgd"),
        (Momentum(momentum=0.9), "adagrad"),
        (Adagrad(eps=1e-10), "rowwise_adagrad"),
        (Adam(betas=(0.9, 0.999), eps=1e-8), "sgd"),
    ],
)
@pytest.mark.parametrize("precision", list(Precision))
def test_resuming_from_saved_tensors_is_exact(
    optimizer: Optimizer, embedding: TableOptimizer, precision: Precision
):
    def learn(trainer: Trainer, steps: range) -> None:
        for step in steps:
            trainer.step(*_batch(SMALL, step), lr=0.1, embedding_lr=0.05)

    unbroken = Trainer(_model(SMALL, precision, embedding), optimizer)
    learn(unbroken, range(5))
    saved = {name: tensor.clone() for name, tensor in unbroken.tensors().items()}
    learn(unbroken, range(5, 10))
    resumed = Trainer(_model(SMALL, precision, embedding, seed=9), optimizer)
    for name, tensor in resumed.tensors().items():
        tensor.copy_(saved[name])
    learn(resumed, range(5, 10))
    for name, tensor in unbroken.tensors().items():
        assert not torch.equal(tensor, saved[name]), name
        assert torch.equal(tensor, resumed.tensors()[name]), name


def test_prediction_learns_nothing_and_counts_the_right_side():
    model = _model(SMALL)
    before = {name: tensor.clone() for name, tensor in Trainer(model, Sgd()).tensors().items()}
    dense_BI, ids_FB, label_B = _batch(SMALL, 0)
    logit_B = predict(model, dense_BI, ids_FB)
    after = Trainer(model, Sgd()).tensors()
    assert all(torch.equal(before[name], after[name]) for name in before)
    with torch.no_grad():
        assert torch.equal(logit_B, model(dense_BI, Bags(ids_FB)))
    expected = sum(
        (logit > 0) == (label == 1) for logit, label in zip(logit_B, label_B, strict=True)
    )
    assert count_correct(logit_B, label_B) == expected


def test_bfloat16_learns_as_well_as_float32():
    losses: dict[Precision, float] = {}
    for precision in Precision:
        trainer = Trainer(_model(PAPER, precision), Sgd())
        results: list[float] = []
        for step in range(150):
            dense_BI, ids_FB, _ = _batch(PAPER, step)
            label_B = (dense_BI[:, 0] + dense_BI[:, 1] > 1.5).float()
            result = trainer.step(dense_BI, ids_FB, label_B, lr=0.1, embedding_lr=0.1)
            results.append(result.loss.item())
        losses[precision] = sum(results[-20:]) / 20
        assert losses[precision] < results[0] - 0.3
    assert losses[Precision.BFLOAT16] == pytest.approx(losses[Precision.FLOAT32], abs=0.05)
    assert losses[Precision.BFLOAT16] != losses[Precision.FLOAT32]
