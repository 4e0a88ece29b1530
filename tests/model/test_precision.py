import pytest
import torch

from dlrm_hybrid.model.layers.products import measure_bfloat16
from dlrm_hybrid.model.placement import matrix_products


def test_measuring_both_precisions_changes_nothing_that_is_drawn_later() -> None:
    torch.manual_seed(0)
    expected = torch.rand(4)
    torch.manual_seed(0)
    found = measure_bfloat16([(13, 64), (64, 16)], batch=8)
    assert 0 < found.speed < 100
    assert found.repeats > 10
    assert torch.equal(torch.rand(4), expected)


def test_measuring_takes_no_longer_for_a_large_model() -> None:
    found = measure_bfloat16([(1024, 1024)] * 8, batch=16_384)  # one round: 0.8 TFLOP of each
    assert 1 <= found.repeats <= 10


@pytest.mark.parametrize(("tf32", "expected"), [(True, "tf32"), (False, "ieee")])
def test_a_gpu_multiplies_in_tf32_until_the_end_alone(tf32: bool, expected: str) -> None:
    matmul = torch.backends.cuda.matmul
    before = matmul.fp32_precision
    with matrix_products("cpu", tf32=False):
        assert matmul.fp32_precision == before
    with pytest.raises(ZeroDivisionError), matrix_products("cuda:1", tf32=tf32):
        assert matmul.fp32_precision == expected
        _ = 1 / 0
    assert matmul.fp32_precision == before
