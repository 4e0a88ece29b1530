import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dlrm_hybrid.compress.update import DenseUpdate, Float32s, decode
from dlrm_hybrid.types import DlrmError
from dlrm_hybrid.wire.dense import dense, narrow
from dlrm_hybrid.wire.section import Dtype, Encoding, Section
from dlrm_hybrid.wire.sparse import Destination, Elements, sparse

DTYPES = (Dtype.FLOAT32, Dtype.BFLOAT16, Dtype.FLOAT16)
Said = tuple[int, set[int]]


@given(
    st.lists(
        st.integers(1, 300).flatmap(
            lambda count: st.tuples(st.just(count), st.sets(st.integers(0, count - 1)))
        ),
        max_size=4,
    ),
    st.sampled_from(DTYPES),
    st.booleans(),
)
def test_destinations_follow_updates(said: list[Said], dtype: Dtype, adds: bool):
    rng = np.random.default_rng(len(said))
    copies: list[Float32s] = []
    expected: list[Float32s] = []
    sections: list[Section] = []
    values: list[Float32s] = []
    for place, (count, indices) in enumerate(said):
        indices_K = np.array(sorted(indices), np.int32)
        values.append(narrow(rng.normal(size=len(indices)).astype(np.float32), dtype))
        copies.append(rng.normal(size=count).astype(np.float32))
        expected.append(copies[-1].copy())
        old_K = expected[-1][indices_K] if adds else np.float32(0)
        expected[-1][indices_K] = old_K + values[-1]
        sections.append(sparse(place, count, indices_K, values[-1], dtype))
    update = decode(sections, "a push")
    assert isinstance(update, DenseUpdate) == all(len(indices) == count for count, indices in said)
    apply = update.add_to if adds else update.copy_to
    apply(Destination(copies))
    for place, (copy_N, expected_N) in enumerate(zip(copies, expected, strict=True)):
        assert copy_N.tobytes() == expected_N.tobytes()
        assert update.values_of(place).tobytes() == values[place].tobytes()


def test_dense_sections_are_not_copied():
    values_N = np.arange(4, dtype=np.float32)
    update = decode([dense(0, values_N), dense(1, values_N[:2])], "a push")
    assert isinstance(update, DenseUpdate)
    assert np.shares_memory(update.values_of(0), values_N)


def test_a_whole_tensor_among_parts_names_all_its_elements():
    whole_N, one = np.arange(3, dtype=np.float32), np.ones(1, np.float32)
    sections = [dense(0, whole_N), sparse(1, 9, np.array([4], np.int32), one, Dtype.FLOAT32)]
    update = decode(sections, "a push")
    assert isinstance(update, Elements)
    assert (update.offsets_E.tolist(), update.indices_K.tolist()) == ([0, 3, 4], [0, 1, 2, 4])


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
        decode([section], "push of somebody")
