import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dlrm_hybrid.parallel.dense.published import Stamps
from dlrm_hybrid.types import DlrmError


@given(seed=st.integers(0, 10_000), size=st.sampled_from([1, 63, 64, 65, 300]))
def test_stamps_list_what_has_moved_since_an_update(seed: int, size: int) -> None:
    rng = np.random.default_rng(seed)
    weight_N = rng.normal(size=size).astype(np.float32)
    stamps = Stamps(weight_N)
    began = stamps.updates
    moved: list[set[int]] = []
    for _ in range(12):
        chosen_K = np.flatnonzero(rng.random(size) < rng.choice([0.0, 0.1, 1.0]))
        moved.append(set(chosen_K.tolist()))
        stamps.moved(chosen_K.astype(np.int32))
        weight_N += 1
    for update in range(13):
        change = stamps.since(began + update)
        assert change is not None
        expected = sorted(set[int]().union(*moved[update:]))
        assert change.indices_K.tolist() == expected
        assert change.weight_K.tolist() == weight_N[expected].tolist()
    stamps.moved(None)
    assert stamps.since(stamps.updates - 1) is None
    assert stamps.since(stamps.updates) is not None


def test_stamps_end_with_the_numbers_of_float32() -> None:
    stamps = Stamps(np.zeros(100, np.float32))
    stamps.updates = 0x7F7FFFFD
    for element in (3, 70):
        stamps.moved(np.array([element], np.int32))
    for back, expected in [(2, [3, 70]), (1, [70]), (0, [])]:
        change = stamps.since(stamps.updates - back)
        assert change is not None
        assert change.indices_K.tolist() == expected
    with pytest.raises(DlrmError, match="more than 2130706431 updates of a bucket"):
        stamps.moved(None)
