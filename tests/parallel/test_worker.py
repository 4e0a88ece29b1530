from itertools import combinations

import pytest
import torch
from tiny_world import (
    PAPER,
    SEED,
    SMALL,
    TABLES,
    Layout,
    TinyWorld,
    columns,
    draw_batch,
)
from torch import Tensor

from dlrm_hybrid.model.dlrm import Dlrm
from dlrm_hybrid.model.mlp import Precision
from dlrm_hybrid.model.optimizer import Sgd
from dlrm_hybrid.model.partition import possible_cuts
from dlrm_hybrid.model.spec import ModelSpec
from dlrm_hybrid.model.step import Trainer
from dlrm_hybrid.parallel.worker import StepOutcome

CUTS = [cuts for number in range(4) for cuts in combinations(possible_cuts(SMALL), number)]
ROWS = 16


def _plain(spec: ModelSpec, precision: Precision = Precision.FLOAT32) -> Trainer:
    return Trainer(Dlrm(spec, TABLES, precision, SEED), Sgd())


def _copy(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in tensors.items()}


def _check_equal_to_plain(
    spec: ModelSpec, layouts: list[Layout], precision: Precision, steps: int, lr: float
) -> None:
    """Every world of one trainer makes the plain trainer's steps, bit for bit."""
    plain = _plain(spec, precision)
    first = _copy(plain.tensors())
    worlds = [TinyWorld(spec, layout, precision=precision, lr=lr) for layout in layouts]
    for step in range(steps):
        batch = draw_batch(spec, ROWS, step)
        result = plain.step(*columns(batch), lr=lr, embedding_lr=lr)
        expected = StepOutcome(
            loss_sum=float(result.loss) * ROWS, correct=int(result.correct), rows=ROWS
        )
        for world in worlds:
            assert world.step(step, [batch])[-1] == expected, (world.layout, step)
    last = plain.tensors()
    moved = {name: float((last[name] - first[name]).abs().max()) for name in last}
    assert min(moved.values()) >= 1e-3, moved
    for world in worlds:
        tensors = world.tensors()
        assert list(tensors) == list(last)
        for name, tensor in tensors.items():
            assert torch.equal(tensor, last[name]), (world.layout, name)
        assert world.waiting_frames() == world.layout.servers * world.topology.stages


@pytest.mark.parametrize("precision", list(Precision))
def test_no_cut_changes_a_bit(precision: Precision):
    assert len(CUTS) == 64
    layouts = [Layout(cuts=cuts) for cuts in CUTS]
    _check_equal_to_plain(SMALL, layouts, precision, steps=20, lr=0.5)


@pytest.mark.slow
@pytest.mark.parametrize("precision", list(Precision))
@pytest.mark.parametrize("spec", [SMALL, PAPER])
def test_no_cut_changes_a_bit_in_200_steps(spec: ModelSpec, precision: Precision):
    layouts = [Layout(cuts=cuts) for cuts in CUTS]
    _check_equal_to_plain(spec, layouts, precision, steps=200, lr=0.1)
