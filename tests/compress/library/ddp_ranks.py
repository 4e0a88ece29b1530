"""What the ranks of test_ddp do: two processes, gloo, small models."""

import os
import pickle
import socket
import struct
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel

from dlrm_hybrid.compress import (
    CltK,
    Dct,
    Deft,
    Dgc,
    Gaussian,
    Hard,
    NoCompression,
    RandomK,
    RedSync,
    Sidco,
    TernGrad,
    TopK,
    ddp_hook,
)
from dlrm_hybrid.types import DivergedError

METHODS = [
    NoCompression(),
    Dct(density=0.05),
    Dct(density=0.05, precision="levels"),
    Dct(density=0.05, aggregation="union", precision="bfloat16"),
    Dct(density=0.05, aggregation="leader"),
    TopK(density=0.05, scope="stage"),
    Dgc(density=0.05, warmup_steps=1),
    RedSync(density=0.05),
    Gaussian(density=0.05),
    Hard(density=0.05),
    Sidco(density=0.05),
    CltK(density=0.05),
    Deft(density=0.05),
    RandomK(density=0.05),
    TernGrad(smallest=8),
    TernGrad(smallest=8, sharing=False),
]
# They keep what they do not send.
KEEPING = [
    TopK(density=0.1),
    Dct(density=0.1, precision="levels"),
    Dct(density=0.1, aggregation="union", precision="bfloat16"),
    Dct(density=0.1, aggregation="leader"),
    CltK(density=0.1, precision="float16"),
    CltK(density=0.1, low_pass=0.5),
    Deft(density=0.1),
    RandomK(density=0.1),
]


def network(width: int = 24) -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(
        nn.Linear(8, width), nn.ReLU(), nn.Linear(width, width), nn.Linear(width, 1)
    )


def loss_of(model: nn.Module, rank: int, step: int) -> Tensor:
    draws = torch.Generator().manual_seed(2 * step + rank)
    x = torch.randn(16, 8, generator=draws)
    return ((model(x)[:, 0] - x.sum(1).sin()) ** 2).mean()


def weights(model: nn.Module) -> list[bytes]:
    return [one.detach().float().numpy().tobytes() for one in model.parameters()]


def steps(model: nn.Module, rank: int, numbers: range, reduce: Callable[[], None]) -> list[float]:
    """Train; the losses."""
    optimizer, losses = torch.optim.SGD(model.parameters(), lr=0.1), list[float]()
    for step in numbers:
        optimizer.zero_grad()
        loss = loss_of(model, rank, step)
        loss.backward()
        reduce()
        optimizer.step()
        losses.append(loss.item())
    return losses


def nothing() -> None:
    """DDP has reduced."""


def hooked(method, *, cap: float = 0.001, **options) -> tuple[DistributedDataParallel, object]:
    ddp = DistributedDataParallel(network(), bucket_cap_mb=cap, **options)
    state = method.ddp_state(ddp)
    ddp.register_comm_hook(state, ddp_hook)
    return ddp, state


def each_method(rank: int) -> list[list[list[bytes]]]:
    """Weights after five steps: in many buckets, in one, and without DDP."""
    found = []
    for method in METHODS:
        ways = []
        for cap in (0.001, 25):
            ddp, _ = hooked(method, cap=cap)
            steps(ddp, rank, range(5), nothing)
            ways.append(weights(ddp))
        plain = network()
        compressor = method.for_parameters(plain.named_parameters())
        steps(plain, rank, range(5), compressor.reduce_gradients)
        ways.append(weights(plain))
        found.append(ways)
    return found


def nameless(rank: int) -> list[list[bytes]]:
    """Weights after five steps with a state that knows the model, and with one that does not."""
    method, ways = TopK(density=0.05), []
    for knows in (True, False):
        ddp = DistributedDataParallel(network(), bucket_cap_mb=0.001)
        ddp.register_comm_hook(method.ddp_state(ddp if knows else None), ddp_hook)
        steps(ddp, rank, range(5), nothing)
        ways.append(weights(ddp))
    return ways


def resumed(rank: int) -> list[tuple[list[bytes], list[bytes], list[bytes]]]:
    """Weights after six steps: in one go; by a state dict after three; by pickled states."""
    found = []
    methods = TopK(density=0.05), Dgc(density=0.05, warmup_steps=1), CltK(density=0.05)
    for method in (*methods, Dct(density=0.05, precision="levels")):
        ddp, state = hooked(method)
        steps(ddp, rank, range(3), nothing)
        saved, held = state.state_dict(), pickle.dumps(state)
        values = {name: one.clone() for name, one in ddp.module.state_dict().items()}
        steps(ddp, rank, range(3, 6), nothing)
        ways = [weights(ddp)]
        for how in ("state_dict", "pickle", "pickle and bind"):
            other = DistributedDataParallel(network(), bucket_cap_mb=0.001)
            other.module.load_state_dict(values)
            if how != "state_dict":
                again = pickle.loads(held)
                if how == "pickle and bind":
                    again.bind(other)
            else:
                again = method.ddp_state(other)
                again.load_state_dict(saved)
            other.register_comm_hook(again, ddp_hook)
            steps(other, rank, range(3, 6), nothing)
            ways.append(weights(other))
        found.append(tuple(ways))
    return found


def wrapped(rank: int) -> dict[str, list[bytes]]:
    """Weights after two steps in which torch's wrappers hand over other types."""
    found = {}
    for name in ("bf16", "fp16"):
        wrapper = getattr(default_hooks, f"{name}_compress_wrapper")
        ddp = DistributedDataParallel(network(), bucket_cap_mb=0.001)

        def hook(state, bucket, wrapped=wrapper(ddp_hook)):  # noqa: B008
            """Under a name of its own: DDP refuses that of bf16's wrapper without nccl."""
            return wrapped(state, bucket)

        ddp.register_comm_hook(TopK(density=1.0).ddp_state(ddp), hook)
        steps(ddp, rank, range(2), nothing)
        found[name] = weights(ddp)
    plain = DistributedDataParallel(network())
    steps(plain, rank, range(2), nothing)
    found["plain"] = weights(plain)
    return found


def unsynchronised(rank: int) -> tuple[list[bytes], list[bytes]]:
    """Weights after a step of two batches: summed by no_sync, or by hand without DDP."""
    method = TopK(density=0.2)
    ddp, state = hooked(method)
    with ddp.no_sync():
        loss_of(ddp, rank, 0).backward()
    loss_of(ddp, rank, 1).backward()
    plain = network()
    compressor = method.for_parameters(plain.named_parameters())
    (loss_of(plain, rank, 0)).backward()
    (loss_of(plain, rank, 1)).backward()
    compressor.reduce_gradients()
    assert state.traffic.steps == 1
    pairs = zip(ddp.module.parameters(), plain.parameters(), strict=True)
    return [torch.equal(one.grad, other.grad) for one, other in pairs]


class Branches(nn.Module):
    """Uses one of two layers."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x: Tensor, branch: int) -> Tensor:
        return (self.first, self.second)[branch](x)


def unused(rank: int) -> dict[str, float]:
    """What arrived, what is kept and what was given, of a layer that some steps do not use."""
    ddp = DistributedDataParallel(Branches(), find_unused_parameters=True, bucket_cap_mb=0.0001)
    state = TopK(density=0.2).ddp_state(ddp)
    ddp.register_comm_hook(state, ddp_hook)
    arrived, given = torch.zeros(6, 6), torch.zeros(6, 6)
    for step, branch in enumerate((0, 1, 1, 0, 1)):
        x = torch.randn(4, 6, generator=torch.Generator().manual_seed(2 * step + rank))
        ddp.zero_grad(set_to_none=True)
        alone = Branches()
        alone(x, branch).square().sum().backward()
        ddp(x, branch).square().sum().backward()
        if alone.first.weight.grad is not None:
            given += alone.first.weight.grad
        if ddp.module.first.weight.grad is not None:
            arrived += ddp.module.first.weight.grad
    held = state.state_dict()["tensors"]
    kept = held["first.weight.residual"]
    both = torch.stack([given - kept])
    dist.all_reduce(both)
    owed = held.get("first.weight.owed", torch.zeros(6, 6))
    return {
        "error": float((both[0] / 2 - arrived - owed).abs().max()),
        "owed": float(owed.abs().sum()),
    }


def not_finite(rank: int) -> list[str]:
    """What both ranks are told where a gradient of one is not finite."""
    told = []
    for method in (TopK(), Dct(aggregation="union"), TernGrad(smallest=8), CltK()):
        ddp, _ = hooked(method)
        loss = loss_of(ddp, rank, 0)
        try:
            (loss * torch.inf if rank == 1 else loss).backward()
        except DivergedError as error:
            told.append(str(error))
        dist.barrier()
    return told


def after_a_failure(rank: int) -> list[tuple[bool, list[bytes]]]:
    """Whether weights are finite, and weights, after a step that one rank's gradient has ended."""
    found = []
    for method in METHODS[1:]:
        plain = network()
        compressor = method.for_parameters(plain.named_parameters())
        steps(plain, rank, range(1), compressor.reduce_gradients)
        loss = loss_of(plain, rank, 1)
        (loss * torch.nan if rank == 1 else loss).backward()
        try:
            compressor.reduce_gradients()
        except DivergedError:
            steps(plain, rank, range(2, 4), compressor.reduce_gradients)
        finite = all(bool(one.isfinite().all()) for one in plain.parameters())
        found.append((finite, weights(plain)))
    return found


def failed_alone(rank: int) -> list[str]:
    """What both ranks are told where one has a sparse gradient, or a state that does not fit."""
    told = []

    def note(reduce: Callable[[], None]) -> None:
        try:
            reduce()
        except (DivergedError, ValueError) as error:
            told.append(str(error))
        dist.barrier()

    for method in (NoCompression(), TopK(), CltK()):
        plain = network()
        compressor = method.for_parameters(plain.named_parameters())
        loss_of(plain, rank, 0).backward()
        if rank == 1:
            plain[0].weight.grad = plain[0].weight.grad.to_sparse()
        note(compressor.reduce_gradients)
    plain = network()
    compressor = TopK().for_parameters(plain.named_parameters())
    if rank == 1:
        compressor.load_state_dict({"method": repr(TopK()), "step": 1, "tensors": {}})
    loss_of(plain, rank, 0).backward()
    note(compressor.reduce_gradients)
    ddp, state = hooked(TopK())
    if rank == 1:
        state.load_state_dict({"method": repr(TopK()), "step": 1, "tensors": {}})
    note(loss_of(ddp, rank, 0).backward)
    return told


def without_names(rank: int) -> str:
    """What pickling says of a state that remembers residuals of parameters without names."""
    ddp = DistributedDataParallel(network())
    state = TopK().ddp_state()
    pickle.dumps(state)  # remembers nothing yet
    ddp.register_comm_hook(state, ddp_hook)
    steps(ddp, rank, range(1), nothing)
    try:
        pickle.dumps(state)
    except ValueError as error:
        return str(error)
    return "nothing"


def two_models(rank: int) -> str:
    """What is said to whom gives one state to two models."""
    ddp, state = hooked(TopK())
    other = DistributedDataParallel(network())
    other.register_comm_hook(state, ddp_hook)
    steps(ddp, rank, range(1), nothing)
    try:
        steps(other, rank, range(1), nothing)
    except ValueError as error:
        return str(error)
    return "nothing"


def socket_bytes() -> tuple[int, int]:
    """Payload that TCP has sent and received on all sockets of this process (struct tcp_info)."""
    sent = received = 0
    for entry in Path("/proc/self/fd").iterdir():
        try:
            if not str(entry.readlink()).startswith("socket:"):
                continue
            with socket.socket(fileno=os.dup(int(entry.name))) as one:
                if (
                    one.family in (socket.AF_INET, socket.AF_INET6)
                    and one.type == socket.SOCK_STREAM
                ):
                    info = one.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
                    bytes_sent, bytes_again = struct.unpack_from("QQ", info, 200)
                    sent += bytes_sent - bytes_again  # a busy machine acknowledges late
                    received += struct.unpack_from("Q", info, 128)[0]
        except OSError:
            continue
    return sent, received


def counted(rank: int) -> dict[str, list[tuple[int, int]]]:
    """By method: bytes counted and bytes on sockets of ten steps, of a small and a large model."""
    found = {}
    for method in (NoCompression(), TopK(density=0.1), CltK(density=0.1), TernGrad(smallest=8)):
        rows = []
        for width in (16, 128):
            plain = network(width)
            compressor = method.for_parameters(plain.named_parameters())
            steps(plain, rank, range(1), compressor.reduce_gradients)  # connects
            dist.barrier()
            before, counted_before = socket_bytes(), compressor.traffic.sent
            steps(plain, rank, range(1, 11), compressor.reduce_gradients)
            after, counted_after = socket_bytes(), compressor.traffic.sent
            rows.append((counted_after - counted_before, after[0] - before[0]))
        found[method.name] = rows
    return found


TASKS = (
    *(each_method, nameless, resumed, wrapped, unsynchronised, unused, counted),
    *(not_finite, after_a_failure, failed_alone, without_names, two_models),
)
