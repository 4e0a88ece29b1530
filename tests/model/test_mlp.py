import pytest
import torch
from torch import Tensor

from dlrm_hybrid.model.layers.mlp import Mlp
from dlrm_hybrid.model.layers.products import Precision

WIDTHS = (5, 8, 6, 3)


def _mlp(relu_last: bool, precision: Precision = Precision.FLOAT32) -> Mlp:
    torch.manual_seed(3)
    mlp = Mlp(WIDTHS, relu_last=relu_last, precision=precision)
    for parameter in mlp.parameters():
        torch.nn.init.normal_(parameter)
    return mlp


def _plain(mlp: Mlp, x_BN: Tensor, relu_last: bool) -> Tensor:
    named = dict(mlp.named_parameters())
    for layer in range(1, len(WIDTHS)):
        x_BN = torch.nn.functional.linear(x_BN, named[f"{layer}.weight"], named[f"{layer}.bias"])
        if relu_last or layer < len(WIDTHS) - 1:
            x_BN = torch.relu(x_BN)
    return x_BN


def _gradients(mlp: Mlp, x_BN: Tensor, y_BM: Tensor) -> list[Tensor]:
    weight_BM = torch.linspace(-1, 1, y_BM.numel()).view_as(y_BM)
    return list(torch.autograd.grad((y_BM * weight_BM).sum(), [x_BN, *mlp.parameters()]))


@pytest.mark.parametrize("relu_last", [False, True])
def test_equals_torch_layers_in_output_and_all_gradients(relu_last: bool):
    mlp = _mlp(relu_last)
    x_BN = torch.randn(17, WIDTHS[0], requires_grad=True)
    ours, plain = mlp(x_BN), _plain(mlp, x_BN, relu_last)
    torch.testing.assert_close(ours, plain, rtol=0, atol=1e-6)
    for mine, theirs in zip(_gradients(mlp, x_BN, ours), _gradients(mlp, x_BN, plain), strict=True):
        assert theirs.abs().max() > 1e-2
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-5)


def test_a_plain_input_gets_no_gradient_and_parameters_still_do():
    mlp = _mlp(relu_last=False)
    mlp(torch.randn(4, WIDTHS[0])).sum().backward()
    assert all(
        parameter.grad is not None and parameter.grad.shape == parameter.shape
        for parameter in mlp.parameters()
    )


def test_bfloat16_rounds_the_hidden_layers_but_not_the_last():
    exact, rounded = _mlp(relu_last=False), _mlp(relu_last=False, precision=Precision.BFLOAT16)
    x_BN = torch.randn(64, WIDTHS[0], requires_grad=True)
    y_BM, z_BM = exact(x_BN), rounded(x_BN)
    assert z_BM.dtype == torch.float32
    assert not torch.equal(y_BM, z_BM)
    torch.testing.assert_close(y_BM, z_BM, rtol=0.05, atol=0.1)
    assert not torch.equal(z_BM, z_BM.bfloat16().float())
    for mine, theirs in zip(
        _gradients(exact, x_BN, y_BM), _gradients(rounded, x_BN, z_BM), strict=True
    ):
        assert theirs.dtype == torch.float32
        cosine = torch.cosine_similarity(mine.flatten(), theirs.flatten(), dim=0)
        assert cosine > 0.99


def test_layers_are_named_from_one():
    names = [name for name, _ in _mlp(relu_last=False).named_parameters()]
    assert names == ["1.weight", "1.bias", "2.weight", "2.bias", "3.weight", "3.bias"]
