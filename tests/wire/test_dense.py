"""Arrays come back from a frame as they went in."""

import numpy as np
import pytest

from dlrm_hybrid.wire.dense import array_of, dense
from dlrm_hybrid.wire.section import Dtype, Encoding, Section


@pytest.mark.parametrize("dtype", [np.float32, np.float16, np.int32, np.int64, np.uint8])
@pytest.mark.parametrize("shape", [(), (0,), (5,), (3, 4), (0, 7)])
def test_arrays_return(dtype: type, shape: tuple[int, ...]) -> None:
    array = np.arange(int(np.prod(shape)), dtype=dtype).reshape(shape)
    section = dense(5, array)
    assert (section.tensor, section.encoding, section.count) == (5, Encoding.DENSE, array.size)
    back = array_of(section)
    assert back.dtype == dtype
    assert np.array_equal(back, array.reshape(-1))


def test_bits_are_kept() -> None:
    bits = np.array([0x7FC00001, 0x80000000, 0xFF800000, 1], np.uint32)
    back = array_of(dense(0, bits.view(np.float32)))
    assert back.view(np.uint32).tolist() == bits.tolist()


def test_a_contiguous_array_is_viewed_and_another_is_copied() -> None:
    array = np.arange(6, dtype=np.float32).reshape(2, 3)
    assert np.shares_memory(array_of(dense(0, array)), array)
    assert array_of(dense(0, array.T)).tolist() == [0, 3, 1, 4, 2, 5]


def test_types_without_a_name_on_the_wire_are_refused() -> None:
    with pytest.raises(ValueError, match="tensor 7: no section holds elements of int16"):
        dense(7, np.zeros(2, np.int16))
    with pytest.raises(ValueError, match="tensor 7: numpy has no type for BFLOAT16"):
        array_of(Section(7, Encoding.DENSE, Dtype.BFLOAT16, 1, b"ab"))
    with pytest.raises(ValueError, match="tensor 7: BITMAP is not dense"):
        array_of(Section(7, Encoding.BITMAP, Dtype.FLOAT32, 1, b"abcd"))
