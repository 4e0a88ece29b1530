"""Servers that tell means of ternary gradients, and replicas that learn from them."""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch
from server_world import EVERY_OPTIMIZER, SHAPES, World, assert_same, travel
from torch import Tensor

from dlrm_hybrid.compress.gradient.compressor import Compressor
from dlrm_hybrid.compress.gradient.layout import Layout
from dlrm_hybrid.compress.gradient.ternary import TernaryCompressor
from dlrm_hybrid.model.optimizer import Optimizer, Sgd
from dlrm_hybrid.parallel.policies import Lockstep
from dlrm_hybrid.types import DlrmError
from dlrm_hybrid.wire.section import Encoding

LARGE = "bottom.1.weight"


def alike(trainer: int, step: int) -> dict[str, Tensor]:
    """Gradients of which the largest element is that of all trainers."""
    rng = np.random.default_rng((trainer, step))
    gradients = {
        name: np.clip(rng.standard_normal(shape), -0.9, 0.9).astype(np.float32)
        for name, shape in SHAPES.items()
    }
    gradients[LARGE][step % 33, trainer] = -0.96875 * 1.1**step
    return {name: torch.from_numpy(gradient) for name, gradient in gradients.items()}


def drawn_apart(trainer: int, step: int) -> dict[str, Tensor]:
    """Of each trainer another one."""
    return {name: (1 + trainer) * one for name, one in alike(trainer, step).items()}


def ternary(trainers: int) -> Callable[[Layout], Compressor]:
    """One compressor after the other, for trainer after trainer."""
    numbers = iter(range(trainers))

    def make(layout: Layout) -> Compressor:
        large = [spec for spec in layout.specs if spec.count >= 256]
        return TernaryCompressor(
            layout, large, clip=None, sharing=False, encoding="bits", seed=1, trainer=next(numbers)
        )

    return make


def world(
    optimizer: Optimizer, *, publishes_means: bool, gradients=alike, staleness: int = 0
) -> World:
    return World(
        3,
        Lockstep(staleness),
        optimizer=optimizer,
        servers=2,
        publishes_means=publishes_means,
        make=ternary(3),
        gradients=gradients,
    )


@EVERY_OPTIMIZER
def test_replicas_learn_what_servers_learn(optimizer: Optimizer) -> None:
    told, learned = (world(optimizer, publishes_means=one) for one in (False, True))
    used = told.run(0, 9)
    for found, expected in zip(learned.run(0, 9), used, strict=True):
        assert_same(found, expected)
    assert_same(learned.held(), told.held())
    frames = [one.frame for one in learned.mail if one.frame.number == 9]
    encodings = {
        section.tensor: section.encoding for frame in frames for section in frame.sections[:-1]
    }
    assert encodings == {0: Encoding.LEVELS, 1: Encoding.DENSE, 2: Encoding.DENSE}
    levels = next(frame.sections[0] for frame in frames if len(frame.sections[0].payload) > 100)
    assert len(levels.payload) == 8 + -(-33 * 13 * 3 // 8)  # -3 … 3


@EVERY_OPTIMIZER
@pytest.mark.parametrize("staleness", [0, 2])
def test_a_resumed_replica_remembers_what_its_server_does(
    optimizer: Optimizer, staleness: int
) -> None:
    straight = world(optimizer, publishes_means=True, staleness=staleness)
    straight.run(0, 5)
    held = straight.held()
    resumed = world(optimizer, publishes_means=True, staleness=staleness)
    resumed.restart(5, held)
    expected = straight.run(5, 9)
    for found, one in zip(resumed.run(5, 9), expected, strict=True):
        assert_same(found, one)
    assert_same(resumed.held(), straight.held())


def test_scales_that_differ_are_told_as_weights() -> None:
    apart = world(Sgd(), publishes_means=True, gradients=drawn_apart)
    apart.run(0, 3)
    sections = [section for one in apart.mail for section in one.frame.sections]
    assert {section.encoding for section in sections} == {Encoding.DENSE}


def test_a_broken_mean_names_who_told_it() -> None:
    broken = world(Sgd(), publishes_means=True)
    broken.run(0, 1)
    answer = next(one for one in broken.mail if len(travel(one).sections[0].payload) > 100)
    frame = travel(answer)
    short = frame.sections[0]._replace(payload=bytes(20))
    with pytest.raises(DlrmError, match=rf"PARAMETERS 1 of rank {frame.sender}: tensor 0: no LEV"):
        broken.clients[answer.to].apply(replace(frame, sections=(short, *frame.sections[1:])))
