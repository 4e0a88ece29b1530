import pytest
import torch
from activation_journey import KEY, travel
from hypothesis import given
from hypothesis import strategies as st

from dlrm_hybrid.compress.activation.codec import DenseCodec
from dlrm_hybrid.types import DlrmError
from dlrm_hybrid.wire.section import Dtype, Encoding, Section


@given(
    rows=st.integers(1, 9),
    width=st.integers(1, 9),
    offset=st.sampled_from([0, 4, 8, 20]),
    special=st.sampled_from([0.0, -0.0, float("inf"), 1e-45]),
)
def test_both_ways_give_the_same_bits_in_memory_of_torch(
    rows: int, width: int, offset: int, special: float
):
    codec = DenseCodec()
    x_BN = torch.randn(rows, width)
    x_BN[0, 0] = special
    sections, at_sender = codec.encode(x_BN, KEY)
    got_BN, at_receiver = codec.decode(travel(sections, offset), x_BN.shape, KEY)
    assert torch.equal(got_BN.view(torch.int32), x_BN.view(torch.int32))
    assert got_BN.data_ptr() % 64 == 0
    g_BN = torch.randn(rows, width)
    sections = codec.encode_gradient(g_BN, at_receiver, KEY)
    back_BN = codec.decode_gradient(travel(sections, offset), g_BN.shape, at_sender, KEY)
    assert torch.equal(back_BN, g_BN)
    assert back_BN.shape == x_BN.shape
    back_BN.add_(1)  # its own memory, writable
    assert 4 * g_BN.numel() == sum(len(section.payload) for section in sections)


def test_a_tensor_is_sent_from_its_own_memory():
    x_BN = torch.zeros(3, 4)
    ((section,), _) = DenseCodec().encode(x_BN, KEY)
    x_BN.fill_(1)
    assert bytes(section.payload) == b"\x00\x00\x80\x3f" * 12


@pytest.mark.parametrize(
    "sections",
    [
        (),
        (Section(0, Encoding.DENSE, Dtype.FLOAT32, 5, bytes(20)),),
        (Section(0, Encoding.DENSE, Dtype.INT32, 6, bytes(24)),),
        (Section(0, Encoding.INDEX32, Dtype.FLOAT32, 6, bytes(24)),),
        (Section(0, Encoding.DENSE, Dtype.FLOAT32, 6, bytes(24)),) * 2,
    ],
)
def test_what_does_not_make_the_expected_tensor_is_refused(sections: tuple[Section, ...]):
    codec = DenseCodec()
    shape = torch.Size((2, 3))
    assert codec.decode((Section(0, Encoding.DENSE, Dtype.FLOAT32, 6, bytes(24)),), shape, KEY)
    named = r"batch 7, boundary 1, micro-batch 2: .*expected DENSE FLOAT32 of 2 x 3 elements"
    with pytest.raises(DlrmError, match=named):
        codec.decode(sections, shape, KEY)
    with pytest.raises(DlrmError, match=named):
        codec.decode_gradient(sections, shape, None, KEY)
