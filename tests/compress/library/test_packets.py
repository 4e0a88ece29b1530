"""Packets hold what their compressor sent; any other bytes are refused."""

import struct
import zlib

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from mutated_bytes import changed
from torch import nn

from dlrm_hybrid.compress import CltK, Dct, NoCompression, RandomK, TernGrad, TopK, decode
from dlrm_hybrid.types import DivergedError, DlrmError

ALONE = [
    NoCompression(),
    TopK(density=0.1),
    TopK(density=0.1, precision="bfloat16"),
    Dct(density=0.1, precision="levels"),
    RandomK(density=0.1),
    TernGrad(sharing=False, smallest=8),
]


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(20, 16), nn.ReLU(), nn.Linear(16, 1))


def gradients_of(net: nn.Module, step: int) -> dict[str, torch.Tensor]:
    draws = torch.Generator().manual_seed(step)
    return {name: torch.randn(one.shape, generator=draws) for name, one in net.named_parameters()}


@pytest.mark.parametrize("method", ALONE, ids=repr)
def test_what_is_decoded_and_the_residual_are_the_gradient(method) -> None:
    net = model()
    compressor = method.for_parameters(net.named_parameters())
    sums = {name: torch.zeros(one.shape) for name, one in net.named_parameters()}
    total = {name: torch.zeros(one.shape) for name, one in net.named_parameters()}
    for step in range(5):
        gradients = gradients_of(net, step)
        packet = compressor.encode(gradients, step)
        found = decode(packet)
        assert found.num_bytes == len(packet)
        found.add_to(sums)
        for name, one in gradients.items():
            total[name] += one
        sparse = method.is_sparse
        assert (found.density < 0.5) is sparse
    held = compressor.state_dict()["tensors"]
    if not isinstance(method, TernGrad):  # right on average only
        for name, one in total.items():
            kept = held.get(f"{name}.residual", torch.zeros(one.shape))
            torch.testing.assert_close(sums[name] + kept, one)


def test_gradients_of_any_type_in_a_list_or_by_name() -> None:
    net = model()
    packet = NoCompression().for_parameters(net.named_parameters()).encode(gradients_of(net, 0), 0)
    by_name = {name: torch.zeros(one.shape) for name, one in net.named_parameters()}
    half = [torch.zeros(one.shape, dtype=torch.bfloat16) for one in net.parameters()]
    decode(packet).add_to(by_name)
    decode(packet).add_to(half)
    for one, other in zip(by_name.values(), half, strict=True):
        assert torch.equal(one.bfloat16(), other)


def test_tensors_of_another_model_are_refused() -> None:
    net = model()
    found = decode(TopK().for_parameters(net.named_parameters()).encode(gradients_of(net, 0), 0))
    renamed = {f"x.{name}": torch.zeros(one.shape) for name, one in net.named_parameters()}
    with pytest.raises(ValueError, match="of other names"):
        found.add_to(renamed)
    with pytest.raises(ValueError, match="3 gradients, and 4 in the packet"):
        found.add_to([torch.zeros(1)] * 3)
    with pytest.raises(ValueError, match="gradient 0 has 1 elements, 320 in the packet"):
        found.add_to([torch.zeros(1)] * 4)


def test_what_a_compressor_refuses() -> None:
    net = model()
    named = [*net.named_parameters()]
    with pytest.raises(ValueError, match="different names; 0.weight is there twice"):
        TopK().for_parameters([named[0], named[0]])
    with pytest.raises(ValueError, match="needs lr="):
        TopK(residual="update").for_parameters(named)
    with pytest.raises(ValueError, match=r"CltK.*trainers agree in every step"):
        CltK().for_parameters(named).encode(gradients_of(net, 0), 0)
    with pytest.raises(ValueError, match="no gradient of 2.bias"):
        TopK().for_parameters(named).encode({name: one for name, one in named[:-1]}, 0)
    gradients = gradients_of(net, 0)
    gradients["2.bias"][0] = torch.nan
    with pytest.raises(DivergedError, match="the gradient of 2.bias is not finite"):
        TopK().for_parameters(named).encode(gradients, 0)
    named[0][1].requires_grad_(False)
    for none in ([], named[:1]):
        with pytest.raises(ValueError, match="there is none that needs a gradient"):
            TopK().for_parameters(none)
    named[0][1].requires_grad_(True)
    for wrong, kind in ((net.parameters(), "Parameter"), (dict(named), "str"), ([3], "int")):
        with pytest.raises(ValueError, match=f"must be pairs of a name .*, not of {kind}$"):
            TopK().for_parameters(wrong)
    for gradient, fault in (
        (None, "NoneType: must be a tensor"),
        (np.ones(1), "ndarray: must be a tensor"),
        (torch.ones(2), "of 2 elements: must be of 1, as its parameter is"),
    ):
        with pytest.raises(ValueError, match=f"the gradient of 2.bias is {fault}"):
            TopK().for_parameters(named).encode({**gradients_of(net, 0), "2.bias": gradient}, 0)
    other = nn.Linear(3, 3)
    state = TopK().for_parameters(named)
    state.encode(gradients_of(net, 0), 0)
    with pytest.raises(ValueError, match="the state is of TopK"):
        Dct().for_parameters(named).load_state_dict(state.state_dict())
    foreign = TopK().for_parameters(other.named_parameters())
    foreign.encode(gradients_of(other, 0), 0)
    with pytest.raises(ValueError, match="of other parameters: 0.bias"):
        foreign.load_state_dict(state.state_dict())


def test_updates_scale_with_the_learning_rate() -> None:
    net = model()
    record = TopK(density=1.0, residual="update")
    compressor = record.for_parameters(net.named_parameters(), lr=lambda step: 0.5)
    given = gradients_of(net, 0)
    out = {name: torch.zeros(one.shape) for name, one in given.items()}
    decode(compressor.encode(given, 0)).add_to(out)
    assert all(torch.equal(out[name], 0.5 * one) for name, one in given.items())


@pytest.mark.parametrize("place", range(4))
@pytest.mark.parametrize("method", [*ALONE[1:], TopK(density=0.1, scope="stage")], ids=repr)
def test_a_gradient_that_is_not_finite_changes_nothing(method, place: int) -> None:
    net = model()
    first, second = (method.for_parameters(net.named_parameters()) for _ in range(2))
    for one in (first, second):
        one.encode(gradients_of(net, 0), 0)
    wrong = gradients_of(net, 1)
    [*wrong.values()][place].view(-1)[0] = -torch.inf
    with pytest.raises(DivergedError, match="step 2: the gradient of .* is not finite"):
        first.encode(wrong, 1)
    assert first.encode(gradients_of(net, 2), 2) == second.encode(gradients_of(net, 2), 2)


def test_finite_gradients_whose_sum_is_not_are_compressed() -> None:
    large = torch.full((4,), 3e38)
    packet = TopK(density=0.5).for_parameters([("x", nn.Parameter(large))]).encode([large], 0)
    out = torch.zeros(4)
    decode(packet).add_to([out])
    assert out.count_nonzero() == 2


def test_a_sparse_gradient_is_refused_by_its_name() -> None:
    table = nn.Embedding(5, 2, sparse=True)
    table(torch.tensor([1])).sum().backward()
    compressor = TopK().for_parameters(table.named_parameters())
    with pytest.raises(ValueError, match="the gradient of weight is torch.sparse_coo"):
        compressor.encode([table.weight.grad], 0)


def test_a_state_that_is_refused_changes_nothing() -> None:
    net = model()
    method = TopK(density=0.1)
    first, second = (method.for_parameters(net.named_parameters()) for _ in range(2))
    for one in (first, second):
        one.encode(gradients_of(net, 0), 0)
    state = first.state_dict()
    foreign = {**state, "step": 9, "tensors": {**state["tensors"], "2.bias.owed": torch.ones(1)}}
    del foreign["tensors"]["0.bias.residual"]
    with pytest.raises(ValueError, match="of other parameters: 0.bias"):
        first.load_state_dict(foreign)
    assert first.state_dict().keys() == second.state_dict().keys()
    assert first.state_dict()["step"] == second.state_dict()["step"]
    assert first.state_dict()["tensors"].keys() == second.state_dict()["tensors"].keys()
    assert first.encode(gradients_of(net, 1), 1) == second.encode(gradients_of(net, 1), 1)
    new = method.for_parameters(net.named_parameters())
    new.load_state_dict(foreign)
    for _ in range(2):  # what it should go on from is not forgotten for the step after
        with pytest.raises(ValueError, match="of other parameters: 0.bias"):
            new.encode(gradients_of(net, 1), 1)


@pytest.mark.parametrize("method", ALONE, ids=repr)
def test_a_state_goes_on_where_another_was(method) -> None:
    net = model()
    first, second = (method.for_parameters(net.named_parameters()) for _ in range(2))
    for step in range(3):
        first.encode(gradients_of(net, step), step)
    second.load_state_dict(first.state_dict())
    assert first.encode(gradients_of(net, 3), 3) == second.encode(gradients_of(net, 3), 3)


PACKET = (
    TopK(density=0.1).for_parameters(model().named_parameters()).encode(gradients_of(model(), 0), 0)
)


@given(st.binary(max_size=200) | changed(PACKET))
@settings(deadline=None)
def test_any_other_bytes_are_refused(noise: bytes) -> None:
    if noise != PACKET:
        with pytest.raises(DlrmError, match="not a packet"):
            decode(noise)


PACKETS = [
    method.for_parameters(model().named_parameters()).encode(gradients_of(model(), 0), 0)
    for method in ALONE
]
HEADS = 16 + 4 * 16  # bytes of the header, and of the heads of four sections


@given(st.data())
@settings(deadline=None, max_examples=500)
def test_any_bytes_behind_a_right_checksum_decode_or_are_refused(data: st.DataObject) -> None:
    """Whoever makes a checksum may still not crash the reader: heads and payloads."""
    body = bytearray(data.draw(st.sampled_from(PACKETS))[:-4])
    for _ in range(data.draw(st.integers(1, 3))):
        last = data.draw(st.sampled_from([HEADS, len(body)])) - 1
        body[data.draw(st.integers(0, last))] = data.draw(st.integers(0, 255))
    try:
        found = decode(bytes(body) + struct.pack("<I", zlib.crc32(body)))
    except DlrmError as error:
        assert "packet" in str(error) or " section: " in str(error)
        return
    out = [torch.zeros(one.shape) for one in model().parameters()]
    with np.errstate(all="ignore"):
        if found.counts == [one.numel() for one in out]:
            found.add_to(out)
        else:
            with pytest.raises(ValueError, match="in the packet"):
                found.add_to(out)
