"""A graph's mask is that of the codec which evaluations use, bit for bit."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dlrm_hybrid.compress.activation.codec import Key
from dlrm_hybrid.compress.activation.dct import ThresholdCodec
from dlrm_hybrid.compress.activation.levels import LevelCodec
from dlrm_hybrid.compress.gradient.rule import target_k
from dlrm_hybrid.model.layers.keep_largest import KeepLargest
from dlrm_hybrid.wire.section import Dtype

KEY = Key(0, 0, 0)
TYPES = {Dtype.FLOAT32: None, Dtype.BFLOAT16: torch.bfloat16, Dtype.FLOAT16: torch.float16}


@pytest.mark.parametrize("dtype", TYPES, ids=lambda one: one.name)
@given(
    rows=st.integers(1, 5),
    width=st.integers(1, 70),
    sparsity=st.sampled_from([0.0, 0.5, 0.9]),
    levels=st.sampled_from([3, 1000]),  # few levels tie, and many are 0
    seed=st.integers(0, 2**31),
)
def test_what_is_kept_is_what_the_codec_sends(
    dtype: Dtype, rows: int, width: int, sparsity: float, levels: int, seed: int
) -> None:
    draw = np.random.default_rng(seed)
    x_BN = torch.from_numpy((draw.integers(0, levels, (rows, width)) / 7).astype(np.float32))
    codec = ThresholdCodec(sparsity=sparsity, dtype=dtype, allow_rice=False)
    sections, _ = codec.encode(x_BN, KEY)
    received, _ = codec.decode(sections, x_BN.shape, KEY)
    kept = KeepLargest(target_k(width, sparsity), TYPES[dtype])(x_BN)
    assert torch.equal(kept, received)
    assert (kept != 0).sum() <= (x_BN != 0).sum()


@pytest.mark.parametrize("bits", range(3, 9))
@given(
    rows=st.integers(1, 5),
    width=st.integers(1, 70),
    sparsity=st.sampled_from([0.0, 0.5, 0.9]),
    exponent=st.integers(-149, 127),
    signed=st.booleans(),
    seed=st.integers(0, 2**31),
)
def test_levels_are_those_that_the_codec_sends(
    bits: int, rows: int, width: int, sparsity: float, exponent: int, signed: bool, seed: int
) -> None:
    draw = np.random.default_rng(seed)
    x_BN = torch.from_numpy(np.ldexp(draw.normal(size=(rows, width)) / 9, exponent).astype("f4"))
    x_BN = x_BN if signed else x_BN.relu()
    codec = LevelCodec(sparsity=sparsity, bits=bits)
    sections, _ = codec.encode(x_BN, KEY)
    received, mask = codec.decode(sections, x_BN.shape, KEY)
    kept = KeepLargest(target_k(width, sparsity), bits=bits)(x_BN)
    assert torch.equal(kept, received)
    assert mask is not None and mask.tolist() == received.view(-1).nonzero().view(-1).tolist()
    if exponent in range(-90, 90):  # a step off at most, where what is kept keeps a level
        error_BN = (kept - x_BN).where(kept != 0, 0).abs().amax(1)
        assert (error_BN <= 9 / 8 / (7 * 2 ** (bits - 3)) * x_BN.abs().amax(1)).all()
