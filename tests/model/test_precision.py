import torch

from dlrm_hybrid.model.precision import bfloat16_speed


def test_measuring_both_precisions_changes_nothing_that_is_drawn_later() -> None:
    torch.manual_seed(0)
    expected = torch.rand(4)
    torch.manual_seed(0)
    assert 0 < bfloat16_speed([(13, 64), (64, 16)], batch=8) < 100
    assert torch.equal(torch.rand(4), expected)
