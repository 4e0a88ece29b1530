"""What torch makes by default, float64 or tensors elsewhere, changes nothing."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor, nn

from dlrm_hybrid.compress import (
    Dct,
    Dgc,
    NoCompression,
    RandomK,
    Sidco,
    SparseBoundary,
    TernGrad,
    TopK,
    decode,
)

METHODS = [
    NoCompression(),
    Dct(density=0.1, precision="levels"),
    TopK(density=0.1, residual="update"),
    Dgc(density=0.1, nesterov=True, clip_norm=0.1, warmup_steps=0),
    Sidco(density=0.1, distribution="gamma", adaptation=2),
    RandomK(density=0.1, feedback=False),
    TernGrad(sharing=False, smallest=8),
]


@contextmanager
def other_defaults() -> Iterator[None]:
    """On a device without memory whatever is computed there by mistake fails."""
    torch.set_default_dtype(torch.float64)
    torch.set_default_device("meta")
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)
        torch.set_default_device(None)


def three_steps(method) -> tuple[list[bytes], dict[str, Tensor], list[Tensor]]:
    """Packets; what is remembered; and what they hold in all, as float64."""
    shapes = [("a", (20, 16)), ("b", (16,))]
    named = [(name, nn.Parameter(torch.empty(shape, device="cpu"))) for name, shape in shapes]
    compressor = method.for_parameters(named, lr=lambda step: 0.5)
    sums = [torch.zeros(shape, dtype=torch.float64, device="cpu") for _, shape in shapes]
    packets = []
    for step in range(3):
        draws = torch.Generator(device="cpu").manual_seed(step)
        options = {"generator": draws, "dtype": torch.float32, "device": "cpu"}
        gradients = [torch.randn(shape, **options) for _, shape in shapes]
        packets.append(compressor.encode(gradients, step))
        decode(packets[-1]).add_to(sums)
    return packets, compressor.state_dict()["tensors"], sums


@pytest.mark.parametrize("method", METHODS, ids=repr)
def test_packets_are_the_same(method) -> None:
    packets, held, sums = three_steps(method)
    with other_defaults():
        others, others_held, others_sums = three_steps(method)
    assert packets == others
    assert held.keys() == others_held.keys()
    pairs = [
        *((one, others_held[name]) for name, one in held.items()),
        *zip(sums, others_sums, strict=True),
    ]
    assert all(torch.equal(one, other) for one, other in pairs)


def test_a_boundary_selects_the_same() -> None:
    x = torch.randn(6, 40, generator=torch.Generator().manual_seed(1))
    boundary = SparseBoundary(0.1)
    y, report = boundary(x), boundary.report()
    with other_defaults():
        assert boundary.report().elements == 0
        assert torch.equal(boundary(x), y)
        assert boundary.report() == report
