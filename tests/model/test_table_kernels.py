"""Tables that FBGEMM cannot hold, and those of a device, learn what torch's optimizers learn.

The CPU stands for a device.
"""

from math import sqrt
from typing import get_args

import numpy as np
import pytest
import torch
from bag_draws import drawn_bags, pooled_by_torch
from torch import Tensor

from dlrm_hybrid.bags import Bags, jagged
from dlrm_hybrid.model.embeddings import Embeddings, tensor_bags
from dlrm_hybrid.model.placement import HOST, Placement
from dlrm_hybrid.model.rows.optimizer import key_shift
from dlrm_hybrid.model.spec import ModelSpec
from dlrm_hybrid.model.tables import BY_FBGEMM, Fused, TableOptimizer
from dlrm_hybrid.model.tensors import draw_embeddings
from dlrm_hybrid.types import ConfigError, ResourceError

ROWS, STEPS, LR, EPS, BETAS = (3, 50, 1, 17, 9), 20, 0.05, 1e-8, (0.8, 0.99)
SGD, ADAM = "sgd", "adam"
DEVICE = Placement(torch.device("cpu"), is_apart=True)
PLACES = pytest.mark.parametrize("place", [HOST, DEVICE], ids=["host", "device"])
# Any two choices meet.
CASES = [
    (8, 0.0, False, HOST),
    (8, 0.1, True, DEVICE),
    (10, 0.0, False, DEVICE),
    (10, 0.1, True, HOST),
    (3, 0.0, True, DEVICE),
    (3, 0.1, False, HOST),
]


def tables_of(
    dim: int,
    optimizer: TableOptimizer,
    decay: float = 0.0,
    frozen: tuple[bool, ...] = (),
    place: Placement = HOST,
) -> Embeddings:
    shape = {"embedding_dim": dim, "bottom": (13, dim), "top": (1,)}
    spec = ModelSpec(**shape, table_rows=ROWS, frozen=frozen)
    options = Fused(optimizer=optimizer, eps=EPS, betas=BETAS, weight_decay=decay)
    embeddings = Embeddings(spec, options, place)
    draw_embeddings(embeddings.weights(), 4)
    embeddings.set_lr(LR)
    return embeddings


def gradient_of(shape: torch.Size, step: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(step)) / 12


def all_ids() -> Bags[Tensor]:
    """One bag of all ids of every table."""
    ids = [np.arange(rows) for rows in ROWS]
    return tensor_bags(jagged(np.concatenate(ids), np.array([[rows] for rows in ROWS])))


class Rowwise(torch.optim.Optimizer):
    """Of sparse gradients, with one number for each row: what FBGEMM documents of its kernels."""

    def __init__(self, parameters: list[torch.nn.Parameter], is_adam: bool) -> None:
        super().__init__(parameters, {})
        self.is_adam = is_adam
        self.steps = 0

    def step(self) -> None:
        self.steps += 1
        for weight in self.param_groups[0]["params"]:
            state = self.state[weight]
            if not state:
                state["mean"], state["square"] = torch.zeros_like(weight), torch.zeros(len(weight))
            gradient = weight.grad.coalesce()
            rows, values = gradient.indices()[0], gradient.values()
            square, mean = values.square().mean(1), values
            with torch.no_grad():
                if self.is_adam:
                    first, second = BETAS
                    state["mean"][rows] = first * state["mean"][rows] + (1 - first) * values
                    square = second * state["square"][rows] + (1 - second) * square
                    state["square"][rows] = square
                    mean = state["mean"][rows] / (1 - first**self.steps)
                    square = square / (1 - second**self.steps)
                else:
                    state["square"][rows] += square
                    square = state["square"][rows]
                weight[rows] -= LR * mean / (square.sqrt() + EPS).unsqueeze(1)


def by_torch(
    optimizer: TableOptimizer, parameters: list[torch.nn.Parameter]
) -> torch.optim.Optimizer:
    if optimizer == SGD:
        return torch.optim.SGD(parameters, lr=LR)
    if optimizer == "adagrad":
        return torch.optim.Adagrad(parameters, lr=LR, eps=EPS)
    if optimizer == ADAM:
        return torch.optim.SparseAdam(parameters, lr=LR, betas=BETAS, eps=EPS)
    return Rowwise(parameters, optimizer == "rowwise_adam")


@pytest.mark.parametrize(("dim", "decay", "weighted", "place"), CASES)
@pytest.mark.parametrize("optimizer", get_args(TableOptimizer))
def test_rows_that_were_looked_up_learn_what_torch_learns(
    optimizer: TableOptimizer, dim: int, decay: float, weighted: bool, place: Placement
) -> None:
    ours = tables_of(dim, optimizer, decay, place=place)
    first = {name: weight.clone() for name, weight in ours.weights().items()}
    theirs = {name: torch.nn.Parameter(weight.clone()) for name, weight in first.items()}
    rule = by_torch(optimizer, list(theirs.values()))
    seen = {name: torch.zeros(len(weight), dtype=torch.bool) for name, weight in first.items()}
    for step in range(STEPS):
        bags = tensor_bags(drawn_bags(step, ROWS, 12, weighted))
        pooled_BFD, expected_BFD = ours(bags), pooled_by_torch(theirs, bags, is_sparse=True)
        torch.testing.assert_close(pooled_BFD, expected_BFD, rtol=1e-6, atol=1e-6)
        rule.zero_grad()
        gradient_BFD = gradient_of(pooled_BFD.shape, step)
        pooled_BFD.backward(gradient_BFD)
        expected_BFD.backward(gradient_BFD)
        for name, weight in theirs.items():
            gradient = weight.grad.coalesce()
            seen[name][gradient.indices()[0]] = True
            gradient.values().add_(weight.detach()[gradient.indices()[0]], alpha=decay)
            weight.grad = gradient
        rule.step()
    for name, weight in ours.weights().items():
        assert (weight - theirs[name]).abs().max() <= 1e-6, name
        assert torch.equal((weight - first[name]).abs().amax(1) > 1e-3, seen[name]), name
    assert 0 < sum(int(rows.sum()) for rows in seen.values()) < sum(ROWS)


@pytest.mark.parametrize(("dim", "decay", "weighted", "place"), CASES)
@pytest.mark.parametrize("optimizer", get_args(TableOptimizer))
def test_frozen_tables_are_those_of_torch_and_others_learn_as_beside_them(
    optimizer: TableOptimizer, dim: int, decay: float, weighted: bool, place: Placement
) -> None:
    frozen = (False, True, True, False, True)
    ours = tables_of(dim, optimizer, decay, frozen, place)
    without = tables_of(dim, optimizer, decay)
    first = {name: weight.clone() for name, weight in ours.weights().items()}
    fixed = [
        torch.nn.EmbeddingBag.from_pretrained(
            weight, freeze=True, mode="sum", include_last_offset=True
        )
        for weight in first.values()
    ]
    for step in range(STEPS):
        bags = tensor_bags(drawn_bags(step, ROWS, 12, weighted))
        pooled_BFD, of_others_BFD = ours(bags), without(bags)
        gradient_BFD = gradient_of(pooled_BFD.shape, step)
        pooled_BFD.backward(gradient_BFD)
        of_others_BFD.backward(gradient_BFD)
        starts = bags.offsets[:: bags.rows].tolist()
        for table, bag in enumerate(fixed):
            if frozen[table]:
                begin, rows = starts[table], slice(table * bags.rows, (table + 1) * bags.rows + 1)
                ids = slice(begin, starts[table + 1])
                weights = None if bags.weights is None else bags.weights[ids]
                expected_BD = bag(bags.values[ids], bags.offsets[rows] - begin, weights)
                torch.testing.assert_close(pooled_BFD[:, table], expected_BD, rtol=0, atol=1e-6)
    weights, states = ours.weights(), ours.optimizer_state()
    for table, (name, weight) in enumerate(without.weights().items()):
        if frozen[table]:
            assert torch.equal(weights[name], first[name])
            own = [one for state, one in states.items() if state.startswith(name[:-6])]
            assert not any(one.any() for one in own)
        else:
            torch.testing.assert_close(weights[name], weight, rtol=0, atol=1e-6)
            assert not torch.equal(weight, first[name])


def test_frozen_tables_are_as_many_as_tables() -> None:
    with pytest.raises(ConfigError, match="model.frozen: 2 values for "):
        tables_of(8, SGD, frozen=(True, False))


@PLACES
def test_a_table_counts_its_updates_and_its_bias_corrections_follow(place: Placement) -> None:
    """Two tables with counts of their own, as a checkpoint of another program may have them."""
    ours = tables_of(8, ADAM, place=place)
    ours.optimizer_state()["embedding.2.step"].fill_(1000.0)
    before = {name: weight.clone() for name, weight in ours.weights().items()}
    bags = all_ids()
    pooled_BFD = ours(bags)
    pooled_BFD.backward(torch.ones_like(pooled_BFD))
    steps = [ours.optimizer_state()[f"embedding.{table}.step"].item() for table in (1, 2)]
    assert steps == [1.0, 1001.0]
    moved = [before[name] - weight for name, weight in ours.weights().items()]
    first, second = BETAS
    late = (1 - first) / sqrt(1 - second) * sqrt(1 - second**1001) / (1 - first**1001)
    for found, expected in ((moved[0], LR), (moved[1], LR * late)):
        torch.testing.assert_close(found, torch.full_like(found, expected), rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize("optimizer", get_args(TableOptimizer))
def test_fbgemm_holds_what_it_can(optimizer: TableOptimizer) -> None:
    options = Fused(optimizer=optimizer, eps=EPS)
    assert options.fit_fbgemm(8) is (optimizer in BY_FBGEMM)
    assert not options.fit_fbgemm(10)
    assert not Fused(optimizer=optimizer, kernel="numba").fit_fbgemm(8)
    assert not Fused(optimizer=optimizer, eps=EPS, weight_decay=0.1).fit_fbgemm(8)


def test_keys_that_have_no_room_are_refused() -> None:
    assert key_shift(2**40 - 1, 2**20) == 21
    with pytest.raises(ResourceError, match="more than 63 bits together; needs smaller batches"):
        key_shift(2**43, 2**20)
