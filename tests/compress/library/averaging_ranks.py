"""What the ranks of test_averaging do: three processes, gloo, tensors of all kinds of shapes."""

from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import Tensor, nn

from dlrm_hybrid.compress import CltK, Dct, Deft, NoCompression, TernGrad, TopK
from dlrm_hybrid.compress.gradient.collective import encode_together
from dlrm_hybrid.compress.update import DenseUpdate, decode
from dlrm_hybrid.wire.sparse import Destination, Elements

RANKS, STEPS = 3, 5
SHAPES = {"conv": (6, 4, 3, 3), "matrix": (30, 20), "vector": (20,), "scalar": (), "none": (0, 3)}
METHODS = [
    Dct(density=0.1, precision="levels"),
    CltK(density=0.1, precision="levels"),
    CltK(density=0.1),
    CltK(density=0.1, precision="bfloat16"),
    Deft(density=0.1),
    Dct(density=0.1, aggregation="union", precision="bfloat16"),
    Dct(density=0.1, aggregation="leader", precision="float16"),
    TopK(density=0.1),
    TernGrad(smallest=8),
]
TRAFFIC = {
    "NoCompression": NoCompression(),
    "TopK": TopK(density=0.02),
    "CltK": CltK(density=0.02),
    "CltK half": CltK(density=0.02, precision="bfloat16"),
    "Deft": Deft(density=0.02),
    "half": Dct(density=0.02, precision="bfloat16"),
    "levels": Dct(density=0.02, precision="levels"),
}


def parameters() -> list[tuple[str, nn.Parameter]]:
    return [(name, nn.Parameter(torch.zeros(shape))) for name, shape in SHAPES.items()]


def gradients(trainer: int, step: int) -> dict[str, Tensor]:
    draws = torch.Generator().manual_seed(100 * step + trainer)
    return {name: torch.randn(shape, generator=draws) for name, shape in SHAPES.items()}


def means(rank: int) -> list[list[tuple[list[Tensor], list[Tensor]]]]:
    """By method and step: the means, and what they should be."""
    found = []
    for method in METHODS:
        named = parameters()
        compressor = method.for_parameters(named)
        expected = expected_means(method, dist.get_world_size())
        steps = []
        for step in range(STEPS):
            for (_, parameter), own in zip(named, gradients(rank, step).values(), strict=True):
                parameter.grad = own
            compressor.reduce_gradients()
            steps.append(([one.grad for _, one in named], next(expected)))
        found.append(steps)
    return found


def expected_means(method, ranks: int) -> Iterator[list[Tensor]]:
    """By the compressors of all trainers in this process, from the sections that they make."""
    made = [method.for_parameters(parameters())._at(one, ranks) for one in range(ranks)]
    count = made[0].layout.size
    for step in range(STEPS):
        encodings = [one.encode(gradients(at, step), step) for at, one in enumerate(made)]
        sums = [torch.zeros(shape) for shape in SHAPES.values()]
        destination = Destination([one.numpy().reshape(-1) for one in sums])
        for sent in encode_together(encodings, step, count):
            update = decode([*sent.sections().values()], "test")
            assert isinstance(update, DenseUpdate | Elements)
            update.add_to(destination)
        yield [one / ranks for one in sums]


def traffic(rank: int) -> dict[str, float]:
    """Bytes that a trainer sends in a step, of a matrix of 40,000 elements."""
    found = {}
    for name, method in TRAFFIC.items():
        parameter = nn.Parameter(torch.zeros(200, 200))
        compressor = method.for_parameters([("weight", parameter)])
        draws = torch.Generator().manual_seed(rank)
        often = torch.linspace(0, 3, 200).exp()
        for _ in range(30):
            parameter.grad = torch.randn(200, 200, generator=draws) * often
            compressor.reduce_gradients()
        found[name] = compressor.traffic.sent / 30
    return found


TASKS = (means, traffic)
