"""Aggregation over the union of selections, against plain numpy.

Shapes: N elements of all tensors.
"""

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from agreeing import Group, elements, encoded
from gradient_rows import SPECS, decoded, gradients_of, options_of, residual_of, sparsifier
from numpy.typing import NDArray

from dlrm_hybrid.compress.gradient.collective import Op, reduce
from dlrm_hybrid.compress.gradient.compressor import Compressor
from dlrm_hybrid.compress.gradient.error_feedback import ErrorFeedback
from dlrm_hybrid.compress.gradient.layout import Layout
from dlrm_hybrid.compress.gradient.selector import Union
from dlrm_hybrid.wire.dense import narrow
from dlrm_hybrid.wire.section import Dtype, Section, SectionError
from dlrm_hybrid.wire.sparse import index_set, index_set_of

COUNT = elements(SPECS)


def group(trainers: int, dtype: Dtype) -> Group:
    options = options_of(steps=1, dtype=dtype)
    selector = Union(options.selector, dtype)
    return Group(
        [ErrorFeedback(Layout(SPECS), selector, options.feedback) for _ in range(trainers)]
    )


def flat(values: Sequence[NDArray[np.float32]]) -> NDArray[np.float32]:
    return np.concatenate([one.reshape(-1) for one in values])


def waiting(compressor: Compressor) -> NDArray[np.float32]:
    return flat([residual_of(compressor, spec) for spec in SPECS])


@pytest.mark.parametrize("dtype", [Dtype.FLOAT32, Dtype.BFLOAT16])
@pytest.mark.parametrize("trainers", [1, 3])
def test_all_send_what_anybody_chose(trainers: int, dtype: Dtype) -> None:
    world = group(trainers, dtype)
    grown = 0
    for step in range(8):
        gradients_T = [gradients_of(100 * trainer + step) for trainer in range(trainers)]
        sums = [
            waiting(one) + flat([gradients[spec.name].numpy() for spec in SPECS])
            for one, gradients in zip(world.compressors, gradients_T, strict=True)
        ]
        alone = [sparsifier(SPECS, options_of(steps=1, dtype=dtype)) for _ in range(trainers)]
        chosen_N = np.zeros(COUNT, bool)
        for one, other in zip(alone, world.compressors, strict=True):
            for name, view in other.tensors().items():
                one.tensors()[name].copy_(view)
        for one, gradients in zip(alone, gradients_T, strict=True):
            own_N = flat([decoded(section) for section in encoded(one, gradients, step).values()])
            grown += np.count_nonzero((own_N != 0) & ~chosen_N)
            chosen_N |= own_N != 0
            grown -= np.count_nonzero(own_N != 0)
        for sum_N, one, sections in zip(
            sums, world.compressors, world.encode(gradients_T, step), strict=True
        ):
            sent_N = flat([decoded(section) for section in sections.values()])
            np.testing.assert_array_equal(sent_N, np.where(chosen_N, narrow(sum_N, dtype), 0))
            np.testing.assert_array_equal(waiting(one), sum_N - sent_N)
        reports = [one.report() for one in world.compressors]
        for report in reports:
            assert sum(one.sent for one in report.values()) == chosen_N.sum()
    assert trainers == 1 or grown < 0, "no element was chosen twice"


@pytest.mark.parametrize("broken", [(), (index_set(np.array([COUNT], np.int32), COUNT + 1),)])
def test_what_is_no_choice_is_refused(broken: tuple[Section, ...]) -> None:
    good = (index_set(np.array([3], np.int32), COUNT),)
    with pytest.raises(SectionError):
        reduce(Op.UNION, [good, broken], 0, COUNT)
    encoding = group(1, Dtype.FLOAT32).compressors[0].encode(gradients_of(0), 0)
    next(encoding)
    with pytest.raises(SectionError):
        encoding.send(broken)


@pytest.mark.parametrize("dtype", [Dtype.FLOAT32, Dtype.FLOAT16])
def test_what_rounds_to_zero_is_not_chosen(dtype: Dtype) -> None:
    gradients = {spec.name: torch.full(spec.shape, 1e-9) for spec in SPECS}
    encoding = group(1, dtype).compressors[0].encode(gradients, 0)
    chosen_K = index_set_of(next(encoding).value, COUNT)
    assert (chosen_K.size == 0) is (dtype is Dtype.FLOAT16)
