"""What the ranks of test_ddp do: two processes, gloo, and what goes wrong or is unusual."""

import logging
from unittest import mock

import ddp_ranks
import torch
import torch.distributed as dist
from ddp_ranks import KEEPING, hooked, loss_of, network, nothing, steps
from torch.nn.parallel import DistributedDataParallel

from dlrm_hybrid.compress import CltK, TernGrad, TopK, ddp_hook
from dlrm_hybrid.compress.library import compressor as library
from dlrm_hybrid.types import DivergedError


def ddp_after_a_failure(rank: int) -> list[tuple[list[str], list[float], list[bytes]]]:
    """What five steps in DDP said, one of them failing; its gradients, and the last weights."""
    found = []
    for method in (TopK(density=0.1), CltK(density=0.1)):
        for bad in (0, 1, 3):  # before DDP rebuilds its buckets, at once after it, later
            ddp, _ = hooked(method)
            optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
            said, left = [], [1.0]
            for step in range(5):
                optimizer.zero_grad()
                loss = loss_of(ddp, rank, step)
                try:
                    (loss * torch.nan if rank == 1 and step == bad else loss).backward()
                    said.append("")
                except DivergedError as error:
                    said.append(str(error))
                    left = [float(one.grad.abs().sum()) for one in ddp.parameters()]
                optimizer.step()
            found.append((said, left, ddp_ranks.weights(ddp)))
    return found


def alone(rank: int) -> tuple[int, bool]:
    """Bytes sent, and whether gradients are a rank's own, where DDP has a group of each rank."""
    groups = [dist.new_group([one]) for one in range(2)]
    ddp = DistributedDataParallel(network(), process_group=groups[rank])
    state = TopK(density=1.0).ddp_state(ddp)
    ddp.register_comm_hook(state, ddp_hook)
    loss_of(ddp, rank, 0).backward()
    plain = network()
    loss_of(plain, rank, 0).backward()
    pairs = zip(ddp.parameters(), plain.parameters(), strict=True)
    return state.traffic.sent, all(torch.equal(one.grad, other.grad) for one, other in pairs)


def compiled(rank: int) -> list[tuple[list[str], int, list[float], list[bytes]]]:
    """Names that are saved, bytes, losses and weights: as it is; DDP or the model in it compiled.

    Then without DDP, and the same with what compresses on a device.
    """
    found = []
    ways = ((False, False, False), (False, True, False), (True, False, False), (True, False, True))
    for inner, outer, is_there in ways:
        torch._dynamo.reset()
        method, homes = TopK(density=0.1), [torch.device("cpu")] * is_there
        model = torch.compile(network(), backend="aot_eager") if inner else network()
        ddp = DistributedDataParallel(model)
        whole = torch.compile(ddp, backend="aot_eager") if outer else ddp
        state = method.ddp_state(whole)
        ddp.register_comm_hook(state, ddp_hook)
        with mock.patch.object(library, "homes_of", lambda ps, homes=homes: homes * len(ps)):
            losses = steps(whole, rank, range(4), nothing)
        names = sorted(state.state_dict()["tensors"])
        found.append((names, state.traffic.sent, losses, ddp_ranks.weights(ddp)))
    model = network()
    whole = torch.compile(model, backend="aot_eager")
    compressor = TopK(density=0.1).for_parameters(model.named_parameters())
    losses = steps(whole, rank, range(4), compressor.reduce_gradients)
    names = sorted(compressor.state_dict()["tensors"])
    found.append((names, compressor.traffic.sent, losses, ddp_ranks.weights(model)))
    return found


def sharded(rank: int) -> list[str]:
    """What is said of models in FSDP, both of its versions."""
    from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard  # takes seconds

    first = FullyShardedDataParallel(network(), device_id=torch.device("cpu"))
    said = []
    for model in (first, fully_shard(network())):
        for make in (TopK().ddp_state, lambda one: TopK().for_parameters(one.named_parameters())):
            try:
                make(model)
            except ValueError as error:
                said.append(str(error))
    return said


def loaded_alone(rank: int) -> list[str]:
    """What is said where one rank goes on from a state and the other begins."""
    said = []
    for method in (TopK(), CltK(), TernGrad(smallest=8)):
        model = network()
        compressor = method.for_parameters(model.named_parameters())
        steps(model, rank, range(3), compressor.reduce_gradients)
        again = method.for_parameters(model.named_parameters())
        if rank == 1:
            again.load_state_dict(compressor.state_dict())
        try:
            steps(model, rank, range(1), again.reduce_gradients)
        except ValueError as error:
            said.append(str(error))
        dist.barrier()
    return said


def joined(rank: int) -> tuple[list[bytes], str]:
    """Weights where rank 1 has fewer batches and rank 0 fails meanwhile, and what is said of it."""
    ddp, _ = hooked(TopK(density=0.1))
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    logged = _Logged()
    logging.getLogger("dlrm_hybrid").addHandler(logged)
    said = ""
    with ddp.join():
        for step in range(5 - 3 * rank):
            optimizer.zero_grad()
            loss = loss_of(ddp, rank, step)
            try:
                (loss * torch.nan if step == 3 else loss).backward()
            except DivergedError as error:
                said = str(error)
            optimizer.step()
    logging.getLogger("dlrm_hybrid").removeHandler(logged)
    return ddp_ranks.weights(ddp), said or " ".join(logged.lines)


def divided(rank: int) -> list[list[bytes]]:
    """Weights where rank 1 has fewer batches, by what DDP's join is told to divide by."""
    ways = []
    for initial in (True, False):
        ddp, _ = hooked(TopK(density=0.1))
        with ddp.join(divide_by_initial_world_size=initial):
            steps(ddp, rank, range(4 - 2 * rank), nothing)
        ways.append(ddp_ranks.weights(ddp))
    return ways


class _Logged(logging.Handler):
    """Keeps lines."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def sparse(rank: int) -> str:
    """What is said of sparse gradients, which DDP hands over without their parameters."""
    table = torch.nn.EmbeddingBag(10, 4, sparse=True)
    ddp = DistributedDataParallel(torch.nn.Sequential(table, torch.nn.Linear(4, 1)))
    ddp.register_comm_hook(TopK().ddp_state(ddp), ddp_hook)
    try:
        ddp(torch.arange(6).view(2, 3)).sum().backward()
    except ValueError as error:
        return str(error)
    return ""


def kept(rank: int) -> list[float]:
    """By method: largest error of residual plus gradient after a step that the other has ended."""
    found = []
    for method in KEEPING:
        model = network()
        compressor = method.for_parameters(model.named_parameters())
        steps(model, rank, range(2), compressor.reduce_gradients)
        before = compressor.state_dict()["tensors"]
        model.zero_grad()
        loss = loss_of(model, rank, 2)
        (loss * torch.nan if rank == 1 else loss).backward()
        given = {name: one.grad.clone() for name, one in model.named_parameters()}
        try:
            compressor.reduce_gradients()
        except DivergedError:
            after = compressor.state_dict()["tensors"]
            names = [f"{name}.residual" for name in given]
            part = getattr(method, "low_pass", 1.0)
            joined = [part * one if rank == 0 else 0.0 for one in given.values()]
            errors = [
                float((after[name] - before[name] - one).abs().max())
                for name, one in zip(names, joined, strict=True)
            ]
            found.append(max(errors))
    return found


TASKS = (
    *(ddp_after_a_failure, alone, compiled, sharded, loaded_alone, joined, divided, kept, sparse),
)
