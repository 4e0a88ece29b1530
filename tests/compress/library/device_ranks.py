"""What the ranks of test_device_ranks do: the same steps with compressors here and there.

Ways: "host" on the CPU, "device" as on a GPU over gloo, "mixed" one rank each, "direct" from device
to device as over nccl. Without a GPU, plain torch on tensors of the CPU stands for it.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

import torch
from torch import Tensor, nn

from dlrm_hybrid.compress import Dct, Dgc, GradientMethod, Sidco, TopK
from dlrm_hybrid.compress.library import compressor as library
from dlrm_hybrid.compress.library.exchange import Exchange
from dlrm_hybrid.types import DivergedError

WAYS = ("host", "device", "mixed", "direct")
SHAPES = {"matrix": (30, 20), "vector": (20,), "unused": (7,), "none": (0, 3), "scalar": ()}
STEPS, BROKEN = 6, 3
METHODS: dict[str, GradientMethod] = {
    "dct": Dct(density=0.1),
    "half": TopK(density=0.1, precision="bfloat16"),
    "sidco": Sidco(density=0.1),
    "dgc": Dgc(density=0.1, warmup_steps=1),
}


@contextmanager
def the_way(way: str, rank: int) -> Iterator[torch.device]:
    """Where this rank's parameters are; there its compressors compute."""
    there = way in ("device", "direct") or (way == "mixed" and rank == 1)
    # Tensors that travel over gloo from device to device must be on the CPU.
    has_gpu = torch.cuda.is_available() and way != "direct"
    device = torch.device("cuda", 0) if there and has_gpu else torch.device("cpu")
    made = Exchange.__init__

    def direct(self: Exchange, *given: object) -> None:
        made(self, *given)  # pyright: ignore[reportArgumentType]
        self.is_direct = way == "direct"

    home = mock.patch.object(library, "home_of", lambda parameters: device if there else None)
    with home, mock.patch.object(Exchange, "__init__", direct):
        yield device


def gradients(rank: int, step: int) -> dict[str, Tensor]:
    draws = torch.Generator().manual_seed(100 * step + rank)
    made = {name: torch.randn(shape, generator=draws) for name, shape in SHAPES.items()}
    if step == BROKEN and rank == 1:
        made["vector"][3] = torch.nan
    return made


def steps_of(method: GradientMethod, way: str, rank: int) -> dict[str, object]:
    """Means of each step, what failed, the state and the traffic."""
    with the_way(way, rank) as device:
        named = [(name, nn.Parameter(torch.zeros(shape))) for name, shape in SHAPES.items()]
        named = [(name, nn.Parameter(one.detach().to(device))) for name, one in named]
        compressor = method.for_parameters(named)
        means: list[list[Tensor | None]] = []
        failures: list[str] = []
        for step in range(STEPS):
            own = gradients(rank, step)
            for name, one in named:
                uses = name != "unused" or (rank == 0 and step == 4)
                one.grad = own[name].to(device) if uses else None
            try:
                compressor.reduce_gradients()
            except DivergedError as error:
                failures.append(str(error))
            means.append([None if one.grad is None else one.grad.cpu() for _, one in named])
        tensors = {name: one.cpu() for name, one in compressor.state_dict()["tensors"].items()}
    return {"means": means, "failures": failures, "state": tensors, "sent": compressor.traffic.sent}


def every_way(rank: int) -> dict[str, dict[str, dict[str, object]]]:
    """By method and way."""
    return {
        name: {way: steps_of(method, way, rank) for way in WAYS} for name, method in METHODS.items()
    }


TASKS = (every_way,)
