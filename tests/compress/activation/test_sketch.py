"""The sketch is fair, noisy as the formula says, and the same at both ends."""

import pytest
import torch
from activation_journey import KEY, gaussian, round_trip

from dlrm_hybrid.compress.activation.codec import Key
from dlrm_hybrid.compress.activation.controls import SketchCodec


@pytest.mark.parametrize(("sparsity", "columns"), [(0.5, 16), (0.75, 8)])
def test_mean_and_noise_are_those_of_the_formula(sparsity: float, columns: int) -> None:
    rows, width, repeats = 4, 32, 800
    x_BN = gaussian(rows, width, 1)
    codec = SketchCodec(sparsity=sparsity, seed=5)
    total_BN = torch.zeros(rows, width)
    noise = 0.0
    for step in range(repeats):
        key = Key(step, 0, 0)
        received_BN = round_trip(codec, x_BN, x_BN, key).received_BN
        total_BN += received_BN
        noise += float((received_BN - x_BN).square().sum())
    energy = float(x_BN.square().sum())
    expected = (width + 1) / columns * energy
    assert noise / repeats == pytest.approx(expected, rel=0.05)
    error = float((total_BN / repeats - x_BN).square().sum())
    assert error == pytest.approx(expected / repeats, rel=0.5)


def test_every_key_and_seed_has_its_own_projection() -> None:
    x_BN = gaussian(3, 16, 2)
    keys = [KEY, Key(8, 1, 2), Key(7, 0, 2), Key(7, 1, 0)]
    seen = [
        round_trip(SketchCodec(sparsity=0.5, seed=seed), x_BN, x_BN, key).received_BN
        for seed, key in [(3, key) for key in keys] + [(4, KEY)]
    ]
    assert all(
        not torch.equal(one, other) for place, one in enumerate(seen) for other in seen[:place]
    )


def test_columns_are_rounded_and_bytes_counted() -> None:
    x_BN = gaussian(5, 256, 5)
    for sparsity, columns in [(0.0, 256), (0.5, 128), (0.9, 26), (0.98, 5), (0.999, 1)]:
        codec = SketchCodec(sparsity=sparsity, seed=1)
        trip = round_trip(codec, x_BN, x_BN)
        assert (trip.forward_bytes, trip.backward_bytes) == (4 * 5 * columns, 4 * 5 * 256)
        report = codec.report()
        assert report is not None
        assert (report.elements, report.sent, report.threshold) == (5 * 256, 5 * columns, None)
