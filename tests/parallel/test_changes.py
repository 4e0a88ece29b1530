import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dlrm_hybrid.parallel.changes import Changes, changes_of, follow, whole
from dlrm_hybrid.types import DlrmError
from dlrm_hybrid.wire.dense import dense
from dlrm_hybrid.wire.section import Dtype, Encoding, Section
from dlrm_hybrid.wire.sparse import sparse
from dlrm_hybrid.wire.values import narrow

DTYPES = (Dtype.FLOAT32, Dtype.BFLOAT16, Dtype.FLOAT16)


@given(
    st.integers(1, 300).flatmap(
        lambda count: st.tuples(st.just(count), st.sets(st.integers(0, count - 1)))
    ),
    st.sampled_from(DTYPES),
    st.booleans(),
)
def test_a_copy_follows_what_a_section_says(chosen: tuple[int, set[int]], dtype: Dtype, adds: bool):
    count, indices = chosen
    rng = np.random.default_rng(count)
    indices_K = np.array(sorted(indices), np.int32)
    values_K = narrow(rng.normal(size=len(indices)).astype(np.float32), dtype)
    copy_N = rng.normal(size=count).astype(np.float32)
    expected_N = copy_N.copy()
    expected_N[indices_K] = (expected_N[indices_K] if adds else np.float32(0)) + values_K
    changes = changes_of(sparse(3, count, indices_K, values_K, dtype), "a push")
    assert (changes.indices_K is None) == (len(indices) == count)
    follow(copy_N, changes, adds=adds)
    assert copy_N.tobytes() == expected_N.tobytes()
    spread_N = whole(changes, count).values_K
    assert np.flatnonzero(spread_N).tolist() == indices_K.tolist()
    assert spread_N[indices_K].tobytes() == values_K.tobytes()


def test_a_dense_section_is_not_copied():
    values_N = np.arange(4, dtype=np.float32)
    changes = changes_of(dense(0, values_N), "a push")
    assert changes.indices_K is None
    assert np.shares_memory(changes.values_K, values_N)


@pytest.mark.parametrize(
    "section",
    [
        Section(5, Encoding.INDEX32, Dtype.FLOAT32, 10, b"\x0b\0\0\0\0\0\0\0"),
        Section(5, Encoding.INDEX32, Dtype.FLOAT32, 10, b"\x01\0\0\0\0"),
        Section(5, Encoding.BITMAP, Dtype.BFLOAT16, 10, b"\xff"),
        Section(5, Encoding.RICE, Dtype.FLOAT16, 10, b"\xff\xff\xff"),
        Section(5, Encoding.ROWS, Dtype.FLOAT32, 10, b""),
        Section(5, Encoding.DENSE, Dtype.INT32, 2, bytes(8)),
    ],
    ids=lambda section: f"{section.encoding.name}-{section.dtype.name}",
)
def test_a_section_that_says_nothing_is_refused(section: Section):
    with pytest.raises(DlrmError, match="^push of somebody: tensor 5: "):
        changes_of(section, "push of somebody")


def test_whole_of_nothing_is_zeros():
    nothing = Changes(np.empty(0, np.int32), np.empty(0, np.float32))
    assert whole(nothing, 3).values_K.tolist() == [0.0, 0.0, 0.0]
