from dataclasses import replace
from itertools import combinations

import numpy as np
import pytest
import torch
from reference_step import Dlrm
from tiny_world import CROSS, DROPPING, MACHINE, PAPER, SEED, SMALL, TABLES, columns, draw_batch
from torch import Tensor

from dlrm_hybrid.bags import Bags, jagged
from dlrm_hybrid.model.dlrm import StageModel
from dlrm_hybrid.model.embeddings import tensor_bags
from dlrm_hybrid.model.layers.products import Precision
from dlrm_hybrid.model.spec import ModelSpec, Partition
from dlrm_hybrid.parallel.stage import (
    Inputs,
    Stage,
    StageResult,
    aligned,
    count_correct,
    predict_stage,
)
from dlrm_hybrid.telemetry.metrics import BinaryMetrics
from dlrm_hybrid.types import BatchNumber, ConfigError

ROWS = 24
NUMBER = BatchNumber(5)
# Every stage that can be lies between two of these, the first or the last layer.
CUTS = [cuts for number in range(3) for cuts in combinations(PAPER.layer_names[:-1], number)]


def _models(
    spec: ModelSpec, cuts: tuple[str, ...], precision: Precision = Precision.FLOAT32
) -> list[StageModel]:
    return [StageModel(spec, part, precision, SEED) for part in Partition.of(spec, cuts).stages]


def _step(
    models: list[StageModel], batch: Inputs, pooled_BFD: Tensor, microbatches: int = 1
) -> list[StageResult]:
    """One micro-batch after the other through all stages and back."""
    return _run([Stage(model, microbatches) for model in models], batch, pooled_BFD)


def _run(stages: list[Stage], batch: Inputs, pooled_BFD: Tensor) -> list[StageResult]:
    for stage in stages:
        stage.begin(NUMBER, batch, pooled_BFD)
    for microbatch in range(stages[0].microbatches):
        carried: Tensor | None = None
        for stage in stages:
            carried = stage.forward(NUMBER, microbatch, carried)
            assert carried is None or not carried.requires_grad
        assert carried is None
        for stage in reversed(stages):
            carried = stage.backward(NUMBER, microbatch, carried)
        assert carried is None
    return [stage.finish(NUMBER) for stage in stages]


def _begun(model: StageModel, batch: Inputs, pooled_BFD: Tensor | None, microbatches: int) -> Stage:
    stage = Stage(model, microbatches)
    stage.begin(NUMBER, batch, pooled_BFD)
    return stage


def _whole(
    spec: ModelSpec, batch: Inputs, precision: Precision
) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Pooled rows of a whole model, its loss, and all gradients; `pooled` among them."""
    dense_BI, ids_FB, label_B = columns(batch)
    model = Dlrm(spec, TABLES, precision, SEED)
    pooled_BFD = model.embeddings(Bags(ids_FB)).detach().requires_grad_()
    logit_B = model.logits(dense_BI, pooled_BFD, range(NUMBER * ROWS, (NUMBER + 1) * ROWS))
    loss = torch.nn.functional.binary_cross_entropy_with_logits(logit_B, label_B)
    loss.backward()
    gradients = {name: weight.grad for name, weight in model.dense_parameters().items()}
    gradients |= {"pooled": pooled_BFD.grad}
    found = {name: gradient for name, gradient in gradients.items() if gradient is not None}
    assert len(found) == len(gradients)
    return pooled_BFD.detach(), loss.detach(), found


def _gathered(results: list[StageResult]) -> dict[str, Tensor]:
    gradients = {name: value for one in results for name, value in one.gradients.items()}
    (pooled,) = [one.pooled_gradient_BFD for one in results if one.pooled_gradient_BFD is not None]
    return gradients | {"pooled": pooled}


@pytest.mark.parametrize("precision", list(Precision))
@pytest.mark.parametrize(
    "spec",
    [SMALL, PAPER, CROSS, MACHINE, DROPPING],
    ids=["small", "paper", "cross", "machine", "dropping"],
)
def test_every_list_of_cuts_gives_loss_and_gradients_of_the_whole_model(
    spec: ModelSpec, precision: Precision
):
    batch = draw_batch(spec, ROWS, 0)
    pooled_BFD, loss, expected = _whole(spec, batch, precision)
    assert all(gradient.abs().max() > 1e-5 for gradient in expected.values())
    assert len(CUTS) == 29
    for cuts in CUTS:
        models = _models(spec, cuts, precision)
        results = _step(models, batch, pooled_BFD)
        gradients = _gathered(results)
        assert list(gradients) == list(expected)
        for name, gradient in gradients.items():
            assert gradient.dtype == torch.float32
            assert torch.equal(gradient, expected[name]), (cuts, name)
        assert [one.loss_sum for one in results] == [0] * len(cuts) + [loss.item() * ROWS]
        assert all(weight.grad is None for model in models for weight in model.parameters())


@pytest.mark.parametrize("spec", [SMALL, CROSS, DROPPING], ids=["dot", "cross", "dropping"])
@pytest.mark.parametrize("microbatches", [2, 3, 4])
def test_microbatches_sum_to_the_gradients_of_the_batch(microbatches: int, spec: ModelSpec):
    batch = draw_batch(spec, ROWS, 0)
    pooled_BFD, loss, expected = _whole(spec, batch, Precision.FLOAT32)
    results = _step(_models(spec, ("bottom.2", "top.1")), batch, pooled_BFD, microbatches)
    for name, gradient in _gathered(results).items():
        assert expected[name].abs().max() > 1e-5
        torch.testing.assert_close(gradient, expected[name], rtol=0, atol=1e-7, msg=name)
    assert results[-1].loss_sum == pytest.approx(loss.item() * ROWS, rel=1e-6)


@pytest.mark.parametrize("weights", [(), (1.0, 0.25, 3.0)], ids=["one", "several"])
@pytest.mark.parametrize("is_weighted", [False, True])
@pytest.mark.parametrize("microbatches", [1, 3])
def test_losses_of_labels_and_rows_are_added_by_their_weights(
    microbatches: int, is_weighted: bool, weights: tuple[float, ...]
):
    """The loss of a batch is Σ λ Σ w l / B, over labels and rows, whatever the sum of weights."""
    spec, draw = SMALL, torch.Generator().manual_seed(0)
    batch = draw_batch(SMALL, ROWS, 0)
    if weights:
        spec = replace(SMALL, top=(*SMALL.top[:-1], 3), loss_weights=weights)
        label_BL = torch.rand(ROWS, 3, generator=draw) < torch.tensor([0.5, 0.2, 0.8])
        batch = replace(batch, label_B=label_BL.float())
    weight_B = torch.ones(ROWS)
    if is_weighted:
        weight_B = torch.rand(ROWS, generator=draw) * 3
        weight_B[::5] = 0
        batch = replace(batch, weight_B=weight_B)
    dense_BI, ids_FB, label_B = columns(batch)
    label_BL = label_B.view(ROWS, -1)
    model = Dlrm(spec, TABLES, Precision.FLOAT32, SEED)
    pooled_BFD = model.embeddings(Bags(ids_FB)).detach().requires_grad_()
    chance_BL = model.logits(dense_BI, pooled_BFD).sigmoid().view(ROWS, -1)
    losses_BL = -(label_BL * chance_BL.log() + (1 - label_BL) * (1 - chance_BL).log())
    loss = (torch.tensor(weights or (1.0,)) * weight_B[:, None] * losses_BL).sum() / ROWS
    loss.backward()
    expected = {name: weight.grad for name, weight in model.dense_parameters().items()}
    expected |= {"pooled": pooled_BFD.grad}
    right_B = (chance_BL[:, 0] >= 0.5) == (label_BL[:, 0] == 1)
    assert 0 < right_B.sum() < ROWS
    for cuts in (("bottom.2", "top.1"), (), (spec.layer_names[-2],)):
        stages = [Stage(one, microbatches, loss_weights=weights) for one in _models(spec, cuts)]
        stages = [stage.empty() for stage in stages]  # as threads have them
        results = _run(stages, batch, pooled_BFD.detach())
        assert results[-1].loss_sum == pytest.approx(loss.item() * ROWS, rel=1e-6)
        for name, gradient in _gathered(results).items():
            wanted = expected[name]
            assert wanted is not None and wanted.abs().max() > 1e-5
            torch.testing.assert_close(gradient, wanted, rtol=0, atol=1e-6, msg=name)
        assert [one.correct for one in results] == [0] * len(cuts) + [int(right_B.sum())]


@pytest.mark.parametrize("microbatches", [1, 3])
def test_sums_of_rows_become_means_and_gradients_are_of_sums(microbatches: int):
    batch, averaged = draw_batch(SMALL, ROWS, 0), (0, 3)
    lengths_FB = np.random.default_rng(0).integers(0, 4, (26, ROWS))
    weights_N = np.arange(lengths_FB.sum(), dtype=np.float32)
    jagged_bags = jagged(np.zeros(len(weights_N), np.int64), lengths_FB, averaged, weights_N)
    batch = replace(batch, bags=tensor_bags(jagged_bags))
    sum_BFD = torch.randn(ROWS, 26, 4, generator=torch.Generator().manual_seed(0))
    sum_BFD.requires_grad_()
    mean_BFD = sum_BFD.clone()
    for table in averaged:
        length_B1 = torch.from_numpy(lengths_FB[table]).clamp(min=1).unsqueeze(1)
        mean_BFD[:, table] = sum_BFD[:, table] / length_B1
    model = Dlrm(SMALL, TABLES, Precision.FLOAT32, SEED)
    logit_B = model.logits(columns(batch)[0], mean_BFD)
    assert batch.label_B is not None
    torch.nn.functional.binary_cross_entropy_with_logits(logit_B, batch.label_B).backward()
    (layers,) = _models(SMALL, ())
    stage = _begun(layers, batch, None, microbatches)
    stage.take_rows(NUMBER, sum_BFD.detach())
    saved = stage.state_dict()
    stage.load_state_dict({name: one.clone() for name, one in saved.items()})
    assert stage.bags(NUMBER).averaged == averaged
    assert stage.bags(NUMBER).weights.tolist() == weights_N.tolist()
    for microbatch in range(microbatches):
        stage.forward(NUMBER, microbatch, None)
        stage.backward(NUMBER, microbatch, None)
    found = stage.finish(NUMBER).pooled_gradient_BFD
    assert found is not None and sum_BFD.grad is not None
    torch.testing.assert_close(found, sum_BFD.grad, rtol=0, atol=1e-7)
    logit_again_B = predict_stage(stage, batch, None, sum_BFD.detach())
    torch.testing.assert_close(logit_again_B, logit_B.detach(), rtol=0, atol=1e-6)


@pytest.mark.parametrize("offset", [1, 2, 3])
def test_bits_do_not_depend_on_where_the_features_lie(offset: int):
    # MKL rounds products of such narrow layers by their operands' addresses, on AMD at least.
    narrow = ModelSpec(embedding_dim=4, bottom=(13, 8, 4), top=(1,), table_rows=(3,))
    batch = draw_batch(narrow, ROWS, 0)
    dense_BI, _, _ = columns(batch)
    memory = torch.empty(dense_BI.numel() + 4)
    moved_BI = memory[offset : offset + dense_BI.numel()].view_as(dense_BI).copy_(dense_BI)
    assert moved_BI.data_ptr() % 16 == 4 * offset
    moved = Inputs(rows=ROWS, dense_BI=moved_BI, bags=None, label_B=None)
    first = _models(narrow, ("bottom.1",))[0]
    left_BN = _begun(first, batch, None, 1).forward(NUMBER, 0, None)
    assert left_BN is not None
    for same_BN in (
        _begun(first, moved, None, 1).forward(NUMBER, 0, None),
        predict_stage(Stage(first, 1), moved, None, None),
    ):
        assert same_BN is not None
        assert torch.equal(same_BN, left_BN)
    assert aligned(dense_BI) is dense_BI


def test_unequal_microbatches_are_refused():
    first = _models(SMALL, ("bottom.2",))[0]
    with pytest.raises(ConfigError, match=r"train\.batch_size=24 .*schedule\.microbatches=5"):
        _begun(first, draw_batch(SMALL, ROWS, 0), None, 5)


def test_batches_in_flight_do_not_mix():
    model = _models(SMALL, ())[0]
    rows_BFD = torch.randn(ROWS, len(SMALL.table_rows), SMALL.embedding_dim)
    batches = {BatchNumber(n): draw_batch(SMALL, ROWS, n) for n in range(3)}
    alone: dict[int, StageResult] = {}
    for number, batch in batches.items():
        (alone[number],) = _step([model], batch, rows_BFD)
    stage = Stage(model, 1)
    for number, batch in batches.items():
        stage.begin(number, batch, rows_BFD)
        stage.forward(number, 0, None)
    for number in (1, 2, 0):
        stage.backward(BatchNumber(number), 0, None)
        found = stage.finish(BatchNumber(number))
        assert found.loss_sum == alone[number].loss_sum
        for name, gradient in alone[number].gradients.items():
            assert torch.equal(found.gradients[name], gradient)
    assert alone[0].loss_sum != alone[1].loss_sum


def test_a_dropped_graph_is_computed_again_with_the_weights_of_then():
    model = _models(SMALL, ())[0]
    batch = draw_batch(SMALL, ROWS, 0)
    rows_BFD = torch.randn(ROWS, len(SMALL.table_rows), SMALL.embedding_dim)
    (before,) = _step([model], batch, rows_BFD)
    stage = _begun(model, batch, rows_BFD, 1)
    stage.forward(NUMBER, 0, None)
    stage.drop_graphs()
    for weight in model.parameters():
        weight.detach().mul_(1.5)
    stage.backward(NUMBER, 0, None)
    found = stage.finish(NUMBER)
    (after,) = _step([model], batch, rows_BFD)
    for name, gradient in after.gradients.items():
        assert torch.equal(found.gradients[name], gradient)
        assert not torch.equal(gradient, before.gradients[name])


def test_training_and_evaluation_count_the_same_rows_as_right() -> None:
    """A probability of one half is no click."""
    logit_B = torch.tensor([0.0, 0.0, 1e-30, -1e-30, 2.0, -0.0])
    label_B = torch.tensor([0.0, 1.0, 1.0, 0.0, 0.0, 0.0])
    evaluation = BinaryMetrics()
    evaluation.add(logit_B.numpy(), label_B.numpy())
    assert count_correct(logit_B, label_B).item() == 4 == 6 * evaluation.scores().accuracy
