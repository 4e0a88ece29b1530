"""What the ranks of test_device_ranks do: the same steps with compressors here and there.

Ways: "host" on the CPU, "device" as on a GPU over gloo, "mixed" one rank on the CPU and one on two
devices, "direct" from device to device as over nccl, "direct two" from two devices to two. Without
a GPU, plain torch on tensors of the CPU stands for it.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from itertools import cycle, islice
from unittest import mock

import torch
from torch import Tensor, nn

from dlrm_hybrid.compress import CltK, Dct, Deft, Dgc, GradientMethod, Sidco, TopK, host
from dlrm_hybrid.compress.device import residual
from dlrm_hybrid.compress.library import compressor as library
from dlrm_hybrid.compress.library.exchange import Exchange
from dlrm_hybrid.types import DivergedError

WAYS = ("host", "device", "mixed", "direct", "direct two")
TWO = ("mixed", "direct two")
SHAPES = {"matrix": (30, 20), "vector": (20,), "unused": (7,), "none": (0, 3), "scalar": ()}
STEPS, BROKEN = 6, 3
METHODS: dict[str, GradientMethod] = {
    "dct": Dct(density=0.1),
    "half": TopK(density=0.1, precision="bfloat16"),
    "sidco": Sidco(density=0.1),
    "dgc": Dgc(density=0.1, warmup_steps=1),
    "halves": Dct(density=0.1),
    "levels": Dgc(density=0.1, warmup_steps=1, precision="levels"),
    "cltk": CltK(density=0.1, low_pass=0.5),
    "deft": Deft(density=0.1, precision="bfloat16"),
    "leader": Dct(density=0.1, aggregation="leader"),
    "union": TopK(density=0.1, aggregation="union", precision="float16"),
}
HALVES = {"matrix": torch.bfloat16, "vector": torch.float16}  # parameters of this method


@contextmanager
def the_way(
    way: str, rank: int, waits: list[int], gathered: Counter[str]
) -> Iterator[list[torch.device]]:
    """Where this rank's parameters are in turn; there its compressors compute.

    Notes in `waits` how many tensors they fetch each time, and in `gathered` how many bytes of
    which type go from device to device.
    """
    there = way != "host" and (way != "mixed" or rank == 1)
    # Tensors that travel over gloo from device to device must be on the CPU.
    kind = "cuda" if there and torch.cuda.is_available() and "direct" not in way else "cpu"
    names = [f"{kind}:{number}" for number in range(1 + (way in TWO))] if there else ["cpu"]
    places = [torch.device(one) for one in names[: torch.cuda.device_count() or None]]
    made, fetched = Exchange.__init__, host.fetched
    gather_tensor = Exchange.gather_tensor

    def direct(self: Exchange, *given: object) -> None:
        made(self, *given)  # pyright: ignore[reportArgumentType]
        self.is_direct = "direct" in way and self.size > 1

    def gather(self: Exchange, tensor_K: Tensor) -> Tensor:
        gathered[str(tensor_K.dtype).removeprefix("torch.")] += tensor_K.nbytes
        return gather_tensor(self, tensor_K)

    def counted(tensors: Sequence[Tensor]) -> list[Tensor]:
        waits.append(len(tensors))
        return fetched(tensors)

    def homes_of(parameters: Sequence[Tensor]) -> list[torch.device]:
        return [*islice(cycle(places), len(parameters))] if there else []

    with ExitStack() as patches:
        patches.enter_context(mock.patch.object(library, "homes_of", homes_of))
        patches.enter_context(mock.patch.object(Exchange, "__init__", direct))
        patches.enter_context(mock.patch.object(Exchange, "gather_tensor", gather))
        for module in (host, residual):
            patches.enter_context(mock.patch.object(module, "fetched", counted))
        yield places


def gradients(rank: int, step: int) -> dict[str, Tensor]:
    draws = torch.Generator().manual_seed(100 * step + rank)
    made = {name: torch.randn(shape, generator=draws) for name, shape in SHAPES.items()}
    if step == BROKEN and rank == 1:
        made["vector"][3] = torch.nan
    return made


def steps_of(method: GradientMethod, way: str, rank: int) -> dict[str, object]:
    """Means of each step, what failed, the state, the traffic and the waits of the last step."""
    waits: list[int] = []
    gathered: Counter[str] = Counter()
    with the_way(way, rank, waits, gathered) as places:
        homes = dict(zip(SHAPES, cycle(places), strict=False))
        dtypes = HALVES if method is METHODS["halves"] else {}
        named = [
            (name, nn.Parameter(torch.zeros(shape, dtype=dtypes.get(name), device=homes[name])))
            for name, shape in SHAPES.items()
        ]
        compressor = method.for_parameters(named)
        means: list[list[Tensor | None]] = []
        failures: list[str] = []
        for step in range(STEPS):
            own = gradients(rank, step)
            waits.clear()
            for name, one in named:
                uses = name != "unused" or (rank == 0 and step == 4)
                one.grad = own[name].to(one) if uses else None
            try:
                compressor.reduce_gradients()
            except DivergedError as error:
                failures.append(str(error))
            means.append([None if one.grad is None else one.grad.cpu() for _, one in named])
        tensors = {name: one.cpu() for name, one in compressor.state_dict()["tensors"].items()}
    sent = compressor.traffic.sent
    found = {"means": means, "failures": failures, "state": tensors, "sent": sent}
    return {**found, "waits": len(waits), "gathered": gathered}


def every_way(rank: int) -> dict[str, dict[str, dict[str, object]]]:
    """By method and way."""
    return {
        name: {way: steps_of(method, way, rank) for way in WAYS} for name, method in METHODS.items()
    }


TASKS = (every_way,)
