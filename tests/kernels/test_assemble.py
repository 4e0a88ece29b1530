from __future__ import annotations

import numpy as np
import pytest

from dlrm_hybrid.kernels.assemble import interleave


@pytest.mark.parametrize("rows", [0, 1, 77])
def test_records_hold_words_then_ids(rows: int) -> None:
    rng = np.random.default_rng(rows)
    words = rng.integers(0, 1 << 32, (100, 14), np.uint32)
    words[:, 0] = rng.integers(0, 2, 100) * np.float32(1).view(np.uint32)
    ids = rng.integers(0, 1 << 31, (26, 100), np.uint32)
    records = np.zeros((rows, 40), np.uint32)
    clicks = interleave(words, ids, records)
    np.testing.assert_array_equal(records, np.hstack([words, ids.T])[:rows])
    assert clicks == np.count_nonzero(words[:rows, 0].view(np.float32))
