"""Estimated bytes of activations as levels, against an epoch that was counted."""

import pytest

from dlrm_hybrid.plan.sizes import activation_bytes, activation_gradient_bytes


def test_levels_are_about_as_long_as_was_measured() -> None:
    # Of a row of 256 units, 0.90 dropped, in an epoch of `make train` with activation.bits=4.
    assert activation_bytes(256, 26, 4) == pytest.approx(14.5, rel=0.05)
    assert activation_gradient_bytes(26, 4) == pytest.approx(6.1, rel=0.05)
