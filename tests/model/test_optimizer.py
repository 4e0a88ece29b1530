from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from dlrm_hybrid.model.optimizer import Adagrad, DenseOptimizer, Momentum, Sgd, init_state

OPTIMIZERS: list[DenseOptimizer] = [Sgd(), Momentum(momentum=0.9), Adagrad(eps=1e-10)]
TORCH: list[Callable[[list[Tensor]], torch.optim.Optimizer]] = [
    lambda weights: torch.optim.SGD(weights, lr=0.1),
    lambda weights: torch.optim.SGD(weights, lr=0.1, momentum=0.9),
    lambda weights: torch.optim.Adagrad(weights, lr=0.1, eps=1e-10),
]


@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=lambda optimizer: type(optimizer).__name__)
@given(size=st.integers(1, 300), share=st.floats(0.01, 1.0), seed=st.integers(0, 2**32))
def test_a_gathered_update_equals_the_dense_one_bit_for_bit(
    optimizer: DenseOptimizer, size: int, share: float, seed: int
):
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(size, generator=generator)
    state = {name: torch.rand(size, generator=generator) for name in optimizer.state_names}
    gradient = torch.randn(size, generator=generator) * 10 ** torch.randn(1, generator=generator)
    chosen = torch.randperm(size, generator=generator)[: max(1, int(size * share))]
    gathered = weight[chosen]
    gathered_state = {slot: tensor[chosen] for slot, tensor in state.items()}
    before = gathered.clone()
    optimizer.apply(gathered, gradient[chosen], gathered_state, 0.1)
    optimizer.apply(weight, gradient, state, 0.1)
    assert torch.equal(weight[chosen], gathered)
    assert all(torch.equal(state[slot][chosen], gathered_state[slot]) for slot in state)
    assert not torch.equal(before, gathered)


@pytest.mark.parametrize(
    ("optimizer", "torch_optimizer"),
    list(zip(OPTIMIZERS, TORCH, strict=True)),
    ids=[type(optimizer).__name__ for optimizer in OPTIMIZERS],
)
def test_steps_equal_those_of_torch(
    optimizer: DenseOptimizer, torch_optimizer: Callable[[list[Tensor]], torch.optim.Optimizer]
):
    torch.manual_seed(5)
    first = torch.randn(40, 7)
    mine, theirs = first.clone(), first.clone().requires_grad_()
    reference = torch_optimizer([theirs])
    state = init_state(optimizer, {"w": mine})["w"]
    for _ in range(10):
        gradient = torch.randn_like(first)
        theirs.grad = gradient
        reference.step()
        optimizer.apply(mine, gradient, state, 0.1)
    assert (mine - first).abs().max() > 0.1
    torch.testing.assert_close(mine, theirs.detach(), rtol=0, atol=1e-6)
