"""Observing changes nothing, and sees what DCT-MP would use."""

import pytest
import torch
from activation_journey import KEY, gaussian, round_trip

from dlrm_hybrid.compress.activation.codec import DenseCodec
from dlrm_hybrid.compress.activation.dct import ThresholdCodec
from dlrm_hybrid.types import DivergedError
from dlrm_hybrid.wire.section import Dtype


@pytest.mark.parametrize("sparsity", [0.0, 0.75, 0.9])
def test_all_crosses_and_the_thresholds_are_those_of_the_threshold_codec(sparsity: float) -> None:
    x_BN, g_BN = gaussian(8, 70, 1).relu(), gaussian(8, 70, 2)
    observed = DenseCodec(observe=sparsity)
    threshold = ThresholdCodec(sparsity=sparsity, dtype=Dtype.FLOAT32, allow_rice=False)
    trip, dense = round_trip(observed, x_BN, g_BN), round_trip(DenseCodec(), x_BN, g_BN)
    assert torch.equal(trip.received_BN, dense.received_BN)
    assert torch.equal(trip.returned_BN, dense.returned_BN)
    assert trip[2:] == dense[2:]
    threshold.encode(x_BN, KEY)
    seen, used = observed.report(), threshold.report()
    assert seen is not None and used is not None
    assert seen.threshold == used.threshold
    assert (seen.sent, seen.elements) == (x_BN.numel(), used.elements)


def test_an_activation_that_is_not_finite_ends_the_run() -> None:
    x_BN = gaussian(3, 20, 3)
    x_BN[0, 0] = float("nan")
    with pytest.raises(DivergedError, match="batch 7, boundary 1, micro-batch 2: an activation"):
        DenseCodec(observe=0.9).encode(x_BN, KEY)
