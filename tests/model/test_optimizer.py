from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from dlrm_hybrid.model.optimizer import (
    STEP,
    Adagrad,
    Adam,
    Constant,
    Momentum,
    Optimizer,
    Sgd,
    init_state,
)
from dlrm_hybrid.parallel.dense.master import MasterWeights, OptimizerConfig

OPTIMIZERS: list[Optimizer] = [
    Sgd(),
    Momentum(momentum=0.9),
    Adagrad(eps=1e-10),
    Adam(betas=(0.9, 0.999), eps=1e-8),
]
TORCH: list[Callable[[list[Tensor]], torch.optim.Optimizer]] = [
    lambda weights: torch.optim.SGD(weights, lr=0.1),
    lambda weights: torch.optim.SGD(weights, lr=0.1, momentum=0.9),
    lambda weights: torch.optim.Adagrad(weights, lr=0.1, eps=1e-10),
    lambda weights: torch.optim.Adam(weights, lr=0.1),
]


@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=lambda optimizer: type(optimizer).__name__)
@given(size=st.integers(1, 300), share=st.floats(0.01, 1.0), seed=st.integers(0, 2**32))
def test_a_gathered_update_equals_the_dense_one_bit_for_bit(
    optimizer: Optimizer, size: int, share: float, seed: int
):
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(size, generator=generator)
    state = dict(init_state(optimizer, {"w": weight})["w"])
    state |= {name: torch.rand(size, generator=generator) for name in optimizer.state_names}
    gradient = torch.randn(size, generator=generator) * 10 ** torch.randn(1, generator=generator)
    chosen = torch.randperm(size, generator=generator)[: max(1, int(size * share))]
    gathered = weight[chosen]
    gathered_state = {slot: state[slot][chosen] for slot in optimizer.state_names}
    gathered_state |= {slot: one.clone() for slot, one in state.items() if slot == STEP}
    before = gathered.clone()
    optimizer.apply(gathered, gradient[chosen], gathered_state, 0.1)
    optimizer.apply(weight, gradient, state, 0.1)
    assert torch.equal(weight[chosen], gathered)
    for slot in optimizer.state_names:
        assert torch.equal(state[slot][chosen], gathered_state[slot])
    assert not torch.equal(before, gathered)


@pytest.mark.parametrize(
    ("optimizer", "torch_optimizer"),
    list(zip(OPTIMIZERS, TORCH, strict=True)),
    ids=[type(optimizer).__name__ for optimizer in OPTIMIZERS],
)
def test_steps_equal_those_of_torch(
    optimizer: Optimizer, torch_optimizer: Callable[[list[Tensor]], torch.optim.Optimizer]
):
    torch.manual_seed(5)
    first = torch.randn(40, 7)
    mine, theirs = first.clone(), first.clone().requires_grad_()
    reference = torch_optimizer([theirs])
    state = init_state(optimizer, {"w": mine})["w"]
    for _ in range(20):
        gradient = torch.randn_like(first)
        theirs.grad = gradient
        reference.step()
        optimizer.apply(mine, gradient, state, 0.1)
    assert (mine - first).abs().max() > 0.1
    torch.testing.assert_close(mine, theirs.detach(), rtol=0, atol=1e-6)


@pytest.mark.parametrize("betas", [(0.9, 0.999), (0.0, 0.5)])
@pytest.mark.parametrize("decay", [0.0, 0.1])
def test_decoupled_decay_equals_adamw_of_torch(betas: tuple[float, float], decay: float):
    torch.manual_seed(6)
    first = torch.randn(40, 7)
    mine, theirs = first.clone(), first.clone().requires_grad_()
    reference = torch.optim.AdamW([theirs], lr=0.1, betas=betas, eps=1e-6, weight_decay=decay)
    optimizer = Adam(betas=betas, eps=1e-6, weight_decay=decay, decoupled_weight_decay=True)
    state = init_state(optimizer, {"w": mine})["w"]
    for step in range(20):
        theirs.grad = torch.randn_like(first) * 10.0 ** (step % 5 - 3)
        reference.step()
        optimizer.apply(mine, theirs.grad, state, 0.1)
    torch.testing.assert_close(mine, theirs.detach(), rtol=0, atol=1e-6)
    assert (mine - first).abs().max() > 0.1


@pytest.mark.parametrize("share", [0.02, 0.5])
def test_gradients_of_some_elements_move_these_as_sparse_adam_of_torch(share: float):
    torch.manual_seed(7)
    first = torch.randn(900)
    mine, theirs = first.clone(), first.clone().requires_grad_()
    reference = torch.optim.SparseAdam([theirs], lr=0.01)
    config = OptimizerConfig(
        optimizer=Adam(betas=(0.9, 0.999), eps=1e-8), schedule=Constant(base_lr=0.01)
    )
    master = MasterWeights({"w": mine}, config)
    for step in range(20):
        index_K = torch.nonzero(torch.rand(900) < share).squeeze(1)
        gradient_K = torch.randn(len(index_K))
        gradient_K += 0.05 * gradient_K.sign()  # theirs has another eps where bias is corrected
        theirs.grad = torch.sparse_coo_tensor(index_K[None], gradient_K, (900,))
        reference.step()
        before = mine.clone()
        index = index_K.to(torch.int32).numpy()
        new_K = master.apply_sparse("w", index, gradient_K.numpy(), step)
        assert torch.equal(mine[index_K], torch.from_numpy(new_K))
        untouched = torch.ones(900, dtype=torch.bool).index_fill(0, index_K, False)
        assert torch.equal(mine[untouched], before[untouched])
    torch.testing.assert_close(mine, theirs.detach(), rtol=0, atol=1e-6)
    assert (mine - first).abs().max() > 0.015
    assert float(master.tensors()["w.step"]) == 20
