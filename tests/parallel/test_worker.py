from collections import Counter
from dataclasses import replace
from itertools import product

import pytest
import torch
from reference_step import Dlrm, Trainer, predict
from tiny_world import (
    ATTEMPT,
    LR,
    SCHEDULES,
    SEED,
    SGD,
    SMALL,
    TABLES,
    Layout,
    TinyWorld,
    columns,
    draw_batch,
    reads,
    shares,
)
from torch import Tensor

from dlrm_hybrid.bags import Bags
from dlrm_hybrid.model.layers.products import Precision
from dlrm_hybrid.model.optimizer import Optimizer
from dlrm_hybrid.model.spec import ModelSpec
from dlrm_hybrid.parallel.effects import GroupCall
from dlrm_hybrid.parallel.policies import Lockstep
from dlrm_hybrid.parallel.step import train_step
from dlrm_hybrid.types import DlrmError, Tick
from dlrm_hybrid.wire.frame import EVALUATION, Kind

SOME_CUTS = [(), ("bottom.4",), ("bottom.2", "top.2"), ("bottom.1", "bottom.4", "top.3")]
ROWS = 16


def _plain(
    spec: ModelSpec = SMALL, precision: Precision = Precision.FLOAT32, optimizer: Optimizer = SGD
) -> Trainer:
    return Trainer(Dlrm(spec, TABLES, precision, SEED), optimizer)


def _copy(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in tensors.items()}


def _distance(one: dict[str, Tensor], other: dict[str, Tensor]) -> dict[str, float]:
    return {name: float((one[name] - other[name]).abs().max()) for name in one}


def test_no_schedule_and_no_cut_changes_a_bit_of_microbatches_and_trainers():
    layouts = [
        Layout(cuts=cuts, trainers=2, servers=2, microbatches=4, schedule=schedule)
        for cuts in SOME_CUTS[2:]
        for schedule in SCHEDULES
    ]
    worlds = [TinyWorld(SMALL, layout, lr=0.5) for layout in layouts]
    first = _copy(worlds[0].tensors())
    for step in range(8):
        batch = draw_batch(SMALL, 48, step)
        outcomes = [world.step(step, shares(batch, 2)) for world in worlds]
        losses = [[one.loss_sum for one in outcome if one.loss_sum] for outcome in outcomes]
        assert all(loss == losses[0] and len(loss) == 2 for loss in losses)
    last = worlds[0].tensors()
    assert min(_distance(first, last).values()) >= 1e-3
    for world in worlds[1:]:
        assert not any(_distance(world.tensors(), last).values()), world.layout


@pytest.mark.parametrize("staleness", [1, 2])
def test_bounded_computes_with_exactly_the_older_version(staleness: int):
    layouts = [Layout(cuts=cuts, servers=1, policy=Lockstep(staleness)) for cuts in SOME_CUTS]
    worlds = [TinyWorld(SMALL, layout) for layout in layouts]
    model = Dlrm(SMALL, TABLES, Precision.FLOAT32, SEED)
    weights = model.dense_parameters()
    versions = [_copy({name: weight.detach() for name, weight in weights.items()})]
    model.embeddings.set_lr(LR)
    for step in range(20):
        batch = draw_batch(SMALL, ROWS, step)
        dense_BI, ids_FB, label_B = columns(batch)
        with torch.no_grad():
            for name, weight in weights.items():
                weight.copy_(versions[max(0, step - staleness)][name])
        logit_B = model(dense_BI, Bags(ids_FB))
        loss = torch.nn.functional.binary_cross_entropy_with_logits(logit_B, label_B)
        model.zero_grad()
        loss.backward()
        newest = _copy(versions[-1])
        for name, weight in newest.items():
            weight.add_(weights[name].grad, alpha=-LR)
        versions.append(newest)
        for world in worlds:
            assert world.step(step, [batch])[-1].loss_sum == loss.item() * ROWS
    expected = versions[-1] | model.embeddings.weights()
    assert min(_distance(versions[-1], versions[0]).values()) >= 1e-4
    for world in worlds:
        assert not any(_distance(world.tensors(), expected).values()), world.layout


def test_what_travels_in_a_step():
    layout = Layout(
        cuts=("bottom.2", "top.2"), trainers=2, servers=1, microbatches=2, schedule="one_f_one_b"
    )
    world = TinyWorld(SMALL, layout)
    world.step(0, shares(draw_batch(SMALL, 2 * ROWS, 0), 2))
    widths = {0: 16, 1: 16}
    crossings = [
        (kind, t * 3 + sender, t * 3 + to, boundary, microbatch, ROWS // 2 * widths[boundary] * 4)
        for kind, step in ((Kind.ACTIVATION, 1), (Kind.ACTIVATION_GRADIENT, -1))
        for t, boundary, microbatch in product((0, 1), (0, 1), (0, 1))
        for sender, to in [(boundary, boundary + 1)[::step]]
    ]
    num_bytes = 4 * sum(value.numel() for value in world.servers[0].tensors().values())
    seen = Counter(
        (
            sent.frame.kind,
            sent.sender,
            sent.to,
            sent.frame.boundary,
            sent.frame.microbatch,
            sum(len(section.payload) for section in sent.frame.sections),
        )
        for sent in world.sent
        if sent.frame.kind not in (Kind.PUSH, Kind.PARAMETERS)
    )
    assert seen == Counter(crossings)
    pushes = [sent for sent in world.sent if sent.frame.kind is Kind.PUSH]
    assert sum(sent.dense_equivalent_bytes for sent in pushes) == 2 * num_bytes
    assert all(sent.frame.attempt == ATTEMPT and sent.frame.number in (0, 1) for sent in world.sent)
    assert all(
        sent.dense_equivalent_bytes == sum(len(one.payload) for one in sent.frame.sections)
        for sent in world.sent
        if sent.frame.kind is not Kind.PARAMETERS
    )


def test_a_step_looks_up_first_and_updates_the_tables_last():
    (worker,) = TinyWorld(SMALL, Layout(microbatches=2)).workers
    batch = draw_batch(SMALL, ROWS, 0)
    run = train_step(worker, Tick(0), batch)
    lookup = next(run)
    assert isinstance(lookup, GroupCall)
    assert lookup.value.bags is batch.bags
    assert lookup.value.lr == LR
    update = run.send(torch.randn(ROWS, 26, 4))
    assert isinstance(update, GroupCall)
    assert update.value.gradient_BFD.shape == (ROWS, 26, 4)
    with pytest.raises(StopIteration) as end:
        run.send(None)
    assert end.value.value.rows == ROWS


@pytest.mark.parametrize("precision", list(Precision))
@pytest.mark.parametrize("cuts", SOME_CUTS)
def test_predictions_are_those_of_the_whole_model(cuts: tuple[str, ...], precision: Precision):
    world = TinyWorld(SMALL, Layout(cuts=cuts, microbatches=4), precision=precision)
    model = _plain(SMALL, precision).model
    before = _copy(world.tensors())
    for number, rows in enumerate((64, 64, 7)):
        batch = draw_batch(SMALL, rows, number)
        dense_BI, ids_FB, _ = columns(batch)
        *others, logit_B = world.predict(number, [batch])
        assert others == [None] * len(cuts)
        assert logit_B is not None
        assert not logit_B.requires_grad
        assert logit_B.std() > 1e-4
        assert torch.equal(logit_B, predict(model, dense_BI, ids_FB))
    assert not any(_distance(world.tensors(), before).values())
    assert world.waiting() == []
    assert {sent.frame.microbatch for sent in world.sent} <= {EVALUATION}
    confirmations = [sent for sent in world.sent if sent.frame.kind is Kind.RECEIVED]
    assert len(confirmations) == 3 * len(cuts)


def test_activations_of_another_size_are_refused():
    world = TinyWorld(SMALL, Layout(cuts=("bottom.2",)))
    first, second = world.workers
    batch = draw_batch(SMALL, ROWS, 0)
    next(train_step(first, Tick(0), reads(first, batch)))
    run = train_step(second, Tick(0), replace(reads(second, batch), rows=ROWS // 2))
    next(run)
    run.send(torch.zeros(ROWS // 2, 26, 4))
    with pytest.raises(DlrmError, match="batch 0, boundary 0, micro-batch 0: .* of 256, .*8 x 16"):
        run.send(world.sent[0].frame)
