import pytest
import torch

from dlrm_hybrid.model.layers.products import affine, gradient_of_input, gradient_of_weight

SHAPES = [(3, 2), (64, 16), (13, 512), (367, 40), (128, 128)]  # N, M on both sides of every rule


@pytest.mark.parametrize("batch", [1, 7, 64])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_products_equal_exact_ones(batch: int, shape: tuple[int, int], dtype: torch.dtype):
    torch.manual_seed(batch)
    width, out = shape
    x_BN, g_BM = torch.randn(batch, width).to(dtype), torch.randn(batch, out).to(dtype)
    weight_MN, bias_M = torch.randn(out, width).to(dtype), torch.randn(out).to(dtype)
    x, g, weight, bias = (tensor.double() for tensor in (x_BN, g_BM, weight_MN, bias_M))
    pairs = [
        (affine(x_BN, weight_MN, bias_M, relu=False), x @ weight.t() + bias),
        (affine(x_BN, weight_MN, bias_M, relu=True), (x @ weight.t() + bias).relu()),
        (gradient_of_input(g_BM, weight_MN), g @ weight),
        (gradient_of_weight(g_BM, x_BN), g.t() @ x),
    ]
    relative, absolute = (2**-8, 0.1) if dtype == torch.bfloat16 else (1e-5, 2e-4)
    for mine, exact in pairs:
        assert mine.dtype == dtype
        assert mine.shape == exact.shape
        torch.testing.assert_close(mine.double(), exact, rtol=relative, atol=absolute)
