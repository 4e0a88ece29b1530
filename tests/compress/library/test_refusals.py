"""What cannot be compressed, or would go wrong later, is refused by its name."""

import re
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import nn

from dlrm_hybrid.compress import Dct, NoCompression, TernGrad, TopK, ddp_hook


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 4), nn.ReLU(), nn.Linear(4, 1))


def ones(net: nn.Module) -> list[torch.Tensor]:
    return [torch.ones_like(one) for one in net.parameters()]


@pytest.mark.parametrize("method", [NoCompression(), TopK()], ids=["none", "topk"])
def test_complex_numbers_keep_their_imaginary_parts(method) -> None:
    wave = nn.Parameter(torch.ones(3, dtype=torch.complex64))
    with pytest.raises(ValueError, match="wave is torch.complex64: only real numbers"):
        method.for_parameters([("wave", wave)])
    compressor = method.for_parameters([("real", nn.Parameter(torch.ones(3)))])
    with pytest.raises(ValueError, match="gradient of real is torch.complex64: must be of real"):
        compressor.encode([wave.detach()], 0)


def test_a_method_is_no_state() -> None:
    with pytest.raises(TypeError, match=r"must be of ddp_state: ddp\.register_comm_hook\(method"):
        ddp_hook(TopK(), None)


def test_a_parameter_under_two_names_is_reduced_once() -> None:
    shared = nn.Parameter(torch.ones(3))
    with pytest.raises(ValueError, match="first and second are one parameter"):
        TopK().for_parameters([("first", shared), ("second", shared)])


def test_a_parameter_that_was_frozen_is_not_left_out() -> None:
    net = model()
    net[0].weight.requires_grad_(False)
    compressor = TopK().for_parameters(net.named_parameters())
    gradients = ones(net)[1:]
    compressor.encode(gradients, 0)
    net[0].weight.requires_grad_(True)
    with pytest.raises(ValueError, match=r"0\.weight needed no gradient when .* make a new one"):
        compressor.encode(gradients, 1)


def test_a_last_layer_that_is_none() -> None:
    named = [*model().named_parameters()]
    TernGrad().for_parameters(named, last_layer="2")
    with pytest.raises(ValueError, match="last_layer = 'head': none of the parameters"):
        TernGrad().for_parameters(named, last_layer="head")
    with pytest.raises(ValueError, match="TernGrad leaves the last layer in float32: give"):
        TernGrad().ddp_state()


def test_a_state_of_nothing_begins_anew() -> None:
    net, method = model(), TopK(density=0.1)
    first, second, used = (method.for_parameters(net.named_parameters()) for _ in range(3))
    second.load_state_dict(first.state_dict())
    used.encode(ones(net), 0)
    used.load_state_dict(first.state_dict())
    packet = first.encode(ones(net), 0)
    assert second.encode(ones(net), 0) == packet
    assert used.encode(ones(net), 0) == packet


def test_what_is_no_state() -> None:
    net = model()
    compressor, ddp_state = TopK().for_parameters(net.named_parameters()), TopK().ddp_state(net)
    other = Dct().for_parameters(net.named_parameters()).state_dict()
    for target in (compressor, ddp_state):
        with pytest.raises(ValueError, match="has no method, step, tensors: it is not of state_d"):
            target.load_state_dict(net.state_dict())
        with pytest.raises(ValueError, match=r"the state is of Dct.*, and this is TopK"):
            target.load_state_dict(other)


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("step", "x", "the state's step is 'x': must be a whole number"),
        ("step", -1, "step is -1"),
        ("step", 1.5, "step is 1.5"),
        ("step", True, "step is True"),
        ("step", None, "step is None"),
        ("step", torch.ones(2), "step is Tensor"),
        ("trainer", "0", "trainer is '0'"),
        ("tensors", [1], "the state's tensors are list: must be tensors by name"),
        ("tensors", None, "tensors are None"),
        ("method", torch.ones(2), "the state is of "),
    ],
)
def test_a_state_with_another_value(key: str, value: object, message: str) -> None:
    _refused(lambda state: state | {key: value}, message)


@pytest.mark.parametrize(
    ("tensor", "message"),
    [
        ("text", "the state's tensor 'bias.residual' is str: must be a tensor"),
        (None, "is NoneType: must be a tensor"),
        ([0.0], "is list: must be a tensor"),
        (np.zeros(4, np.float32), "is ndarray: must be a tensor"),
        (torch.zeros(4, device="meta"), "is on the device meta, without values"),
        (torch.zeros(4).to_sparse(), "is torch.sparse_coo: must be dense"),
        (torch.zeros(4, dtype=torch.complex64), "is torch.complex64: must be of real numbers"),
        (torch.full((4,), torch.nan), "is not finite"),
        (torch.full((4,), torch.inf), "is not finite"),
        (torch.zeros(5), "the state is of other parameters: bias.residual"),
    ],
)
def test_a_state_with_another_tensor(tensor: object, message: str) -> None:
    def changed(state: dict) -> dict:
        return state | {"tensors": state["tensors"] | {"bias.residual": tensor}}

    _refused(changed, message)


def _refused(changed: Callable[[dict], dict], message: str) -> None:
    """Neither a compressor nor a hook takes such a state, and goes on as if none had come."""
    net = nn.Linear(6, 4)
    compressor = TopK(density=0.1).for_parameters(net.named_parameters())
    gradients = [torch.ones_like(one) for one in net.parameters()]
    compressor.encode(gradients, 0)
    bad = changed(compressor.state_dict())
    with pytest.raises(ValueError, match=re.escape(message)):
        compressor.load_state_dict(bad)
    assert len(compressor.encode(gradients, 1)) > 0
    if "other parameters" not in message:  # which a hook learns in its first step
        with pytest.raises(ValueError, match=re.escape(message)):
            TopK(density=0.1).ddp_state(net).load_state_dict(bad)


@pytest.mark.parametrize("state", [None, 3, "text", [1], torch.ones(2)])
def test_a_state_that_is_no_mapping(state: object) -> None:
    with pytest.raises(ValueError, match=r"the state is .*: it is not of state_dict\(\)"):
        TopK().for_parameters(model().named_parameters()).load_state_dict(state)


@pytest.mark.parametrize(
    "given", [model(), nn.Linear(3, 2), None, model], ids=["model", "layer", "None", "function"]
)
def test_a_model_is_not_its_parameters(given: object) -> None:
    with pytest.raises(ValueError, match=r"pass its named_parameters\(\)"):
        TopK().for_parameters(given)


def test_parameters_are_no_model() -> None:
    with pytest.raises(ValueError, match=r"model: is a generator; pass the DDP module"):
        TopK().ddp_state(model().parameters())


def test_a_state_is_of_one_trainer() -> None:
    net, method = model(), TopK(density=0.1)
    first, second, used = (
        method.for_parameters(net.named_parameters(), trainer=trainer, trainers=2)
        for trainer in (0, 1, 1)
    )
    for one in (first, used):
        one.encode(ones(net), 0)
    with pytest.raises(ValueError, match="of trainer 0, and this is trainer 1"):
        used.load_state_dict(first.state_dict())
    second.load_state_dict(first.state_dict())
    assert second.state_dict()["trainer"] == 0, "until it is known who this is"
    with pytest.raises(ValueError, match="of trainer 0, and this is trainer 1"):
        second.encode(ones(net), 1)


def test_more_elements_than_have_a_position() -> None:
    half = [(str(at), nn.Parameter(torch.empty(2**30, device="meta"))) for at in range(2)]
    with pytest.raises(ValueError, match="2,147,483,648 elements, at most 2,147,483,647"):
        TopK().for_parameters(half)
