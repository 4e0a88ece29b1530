"""Random elements, one of each block."""

import numpy as np
import pytest

from dlrm_hybrid.compress.gradient.methods.dgc import sample


def drawn(count: int, size: int, seed: int) -> np.ndarray:
    return sample(np.arange(count, dtype=np.float32), seed, size).astype(int)


@pytest.mark.parametrize(("count", "size"), [(1, 1), (10, 10), (1000, 7), (1003, 100)])
def test_every_block_gives_one_element(count: int, size: int) -> None:
    bounds = np.arange(size + 1) * count // size
    for seed in range(20):
        places_S = drawn(count, size, seed)
        assert (bounds[:-1] <= places_S).all() and (places_S < bounds[1:]).all()
        assert places_S.tolist() == drawn(count, size, seed).tolist()


def test_places_in_a_block_are_equally_likely() -> None:
    within = np.concatenate([drawn(8000, 1000, seed) % 8 for seed in range(20)])
    counts = np.bincount(within, minlength=8)
    deviation = np.sqrt(20_000 * (1 / 8) * (7 / 8))
    assert (np.abs(counts - 2500) < 4 * deviation).all()
    apart = [np.mean(drawn(8000, 1000, 0) == drawn(8000, 1000, seed)) for seed in range(1, 9)]
    assert 0.05 < np.mean(apart) < 0.2
