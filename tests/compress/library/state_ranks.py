"""What the ranks of test_states do: two processes, gloo; steps fail and states are loaded."""

from functools import partial

import torch
import torch.distributed as dist
from ddp_ranks import KEEPING, hooked, loss_of, network, nothing, steps, weights
from torch import Tensor, nn

from dlrm_hybrid.compress import CltK, Dct, NoCompression, TopK

LEVELS = Dct(density=0.1, precision="levels")
AGREEING = [CltK(density=0.5), TopK(density=0.5), LEVELS, NoCompression()]


def differing(rank: int) -> list[list[str]]:
    """What is said of parameters in another order, and of other sizes; gradients are zeros then."""
    found = []
    for method in AGREEING:
        said = []
        names = "ab" if rank == 0 else "ba"
        for order, size in ((names, 16), ("ab", 8 + 8 * rank)):
            named = [(name, nn.Parameter(torch.zeros(size))) for name in order]
            for _, one in named:
                one.grad = torch.ones(size)
            try:
                method.for_parameters(named).reduce_gradients()
            except ValueError as error:
                assert not any(one.grad.any() for _, one in named)
                said.append(str(error))
            dist.barrier()
        found.append(said)
    return found


class _Cut:
    """A way that fails when all has been encoded, as a connection that is lost."""

    def gather(self, *given: object) -> object:
        raise RuntimeError("the connection is lost")

    def restart(self) -> None:
        """Nothing is remembered."""


def undelivered(rank: int) -> list[float]:
    """By method: largest error of residual plus gradient after a step that reached nobody."""
    found = []
    for method in KEEPING:
        model = network()
        compressor = method.for_parameters(model.named_parameters())
        steps(model, rank, range(2), compressor.reduce_gradients)
        before = compressor.state_dict()["tensors"]
        model.zero_grad()
        loss_of(model, rank, 2).backward()
        given = {name: one.grad.clone() for name, one in model.named_parameters()}
        compressor._averaging = _Cut()
        try:
            compressor.reduce_gradients()
        except RuntimeError as error:
            assert "the connection is lost" in str(error)
            assert not any(one.grad.any() for one in model.parameters())
            after = compressor.state_dict()["tensors"]
            part = getattr(method, "low_pass", 1.0)
            errors = [
                float(
                    (after[f"{name}.residual"] - before[f"{name}.residual"] - part * one)
                    .abs()
                    .max()
                )
                for name, one in given.items()
            ]
            found.append(max(errors))
    return found


def one_of_two_is_new(rank: int) -> list[tuple[list[bytes], list[bytes]]]:
    """Weights with the tables of levels, then where one rank has forgotten them, in two ways."""
    found = []
    for loads in (True, False):  # the rank that remembers loads its state; or has another group
        model = network()
        compressor = LEVELS.for_parameters(model.named_parameters())
        steps(model, rank, range(4), compressor.reduce_gradients)
        state, saved = compressor.state_dict(), weights(model)
        values = [one.detach().clone() for one in model.parameters()]
        steps(model, rank, range(4, 6), compressor.reduce_gradients)
        unbroken = weights(model)
        with torch.no_grad():
            for one, value in zip(model.parameters(), values, strict=True):
                one.copy_(value)
        assert weights(model) == saved
        group = None if loads else dist.new_group([0, 1])
        if rank == 1:
            compressor = LEVELS.for_parameters(model.named_parameters())
        if loads or rank == 1:
            compressor.load_state_dict(state)
        else:  # the state alone, as if it had never gone on
            held = compressor._compressor.tensors()
            for name, view in held.items():
                view.copy_(state["tensors"][name])
            compressor._reduced = state["step"]
        steps(model, rank, range(4, 6), partial(compressor.reduce_gradients, group))
        found.append((unbroken, weights(model)))
    return found


def owed(rank: int) -> list[Tensor]:
    """Gradients of a parameter that was not used: unbroken, resumed, loaded twice in place."""
    method = TopK(density=0.1)
    named = [(name, nn.Parameter(torch.zeros(20))) for name in ("w", "v")]
    rows = torch.arange(1.0, 21.0) * (1 + rank)

    def step(compressor, uses_v: bool) -> Tensor:
        for name, one in named:
            one.grad = rows.clone() if name == "w" or uses_v else torch.zeros(20)
        compressor.reduce_gradients()
        return named[1][1].grad.clone()

    first = method.for_parameters(named)
    for uses_v in (True, False, False):
        step(first, uses_v)
    state = first.state_dict()
    assert state["tensors"]["v.owed"].any()
    again = method.for_parameters(named)
    again.load_state_dict(state)
    found = [step(first, True), step(again, True)]
    for _ in range(2):
        first.load_state_dict(state)
        step(first, False)  # adds to what is owed
        found.append(step(first, True))
    return found


def dense(rank: int) -> tuple[int, int]:
    """Steps of a state without compression: resumed at 3, and after two more."""
    model = network()
    first, again = (NoCompression().for_parameters(model.named_parameters()) for _ in range(2))
    steps(model, rank, range(3), first.reduce_gradients)
    again.load_state_dict(first.state_dict())
    resumed = again.state_dict()["step"]
    steps(model, rank, range(2), again.reduce_gradients)
    return resumed, again.state_dict()["step"]


def rolled_back(rank: int) -> tuple[list[bytes], list[bytes]]:
    """Weights of two steps from the beginning, and again after the first state was loaded."""
    ddp, state = hooked(TopK(density=0.1))
    begin, values = state.state_dict(), [one.detach().clone() for one in ddp.parameters()]
    steps(ddp, rank, range(2), nothing)
    once = weights(ddp)
    state.load_state_dict(begin)
    with torch.no_grad():
        for one, value in zip(ddp.parameters(), values, strict=True):
            one.copy_(value)
    steps(ddp, rank, range(2), nothing)
    return once, weights(ddp)


TASKS = (differing, undelivered, one_of_two_is_new, owed, dense, rolled_back)
