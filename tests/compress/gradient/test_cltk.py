"""CLT-k against its algorithm in plain numpy.

Shapes: N elements of all tensors, K that are sent.
"""

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from agreeing import Group, elements, ended, first_round
from gradient_rows import SPECS, decoded, gradients_of, options_of
from numpy.typing import NDArray

from dlrm_hybrid.compress.gradient.collective import Op, reduce
from dlrm_hybrid.compress.gradient.error_feedback import ErrorFeedback, FeedbackOptions
from dlrm_hybrid.compress.gradient.layout import Layout, Spec
from dlrm_hybrid.compress.gradient.selector import FromLeader, LargestOfAll
from dlrm_hybrid.compress.gradient.transforms import Momentum
from dlrm_hybrid.types import DivergedError
from dlrm_hybrid.wire.dense import narrow
from dlrm_hybrid.wire.section import Dtype, Section, SectionError
from dlrm_hybrid.wire.sparse import index_set

COUNT = elements(SPECS)
KEEP = 34  # of 337 elements at sparsity 0.9


def group(
    trainers: int,
    *,
    specs: Sequence[Spec] = SPECS,
    dtype: Dtype = Dtype.FLOAT32,
    low_pass: float = 1.0,
) -> Group:
    layout = Layout(specs)
    options = FeedbackOptions(dtype=dtype, low_pass=low_pass)
    return Group(
        [
            ErrorFeedback(
                layout,
                FromLeader(inner=LargestOfAll(KEEP), trainer=trainer, trainers=trainers),
                options,
            )
            for trainer in range(trainers)
        ]
    )


def flat(tensors: dict[str, torch.Tensor], suffix: str = "") -> NDArray[np.float32]:
    return np.concatenate([tensors[f"{spec.name}{suffix}"].numpy().reshape(-1) for spec in SPECS])


def flat_sent(sections: dict[str, Section]) -> NDArray[np.float32]:
    return np.concatenate([decoded(sections[spec.name]) for spec in SPECS])


@pytest.mark.parametrize("dtype", [Dtype.FLOAT32, Dtype.BFLOAT16])
@pytest.mark.parametrize("low_pass", [1.0, 0.25])
@pytest.mark.parametrize("trainers", [1, 3])
def test_all_send_what_the_leader_chooses(trainers: int, low_pass: float, dtype: Dtype) -> None:
    world = group(trainers, dtype=dtype, low_pass=low_pass)
    residuals = [np.zeros(COUNT, np.float32) for _ in range(trainers)]
    for step in range(12):
        gradients_T = [gradients_of(100 * trainer + step) for trainer in range(trainers)]
        sums = [
            residual_N + flat(gradients)
            for residual_N, gradients in zip(residuals, gradients_T, strict=True)
        ]
        leader_N = np.abs(sums[step % trainers])
        chosen_K = np.sort(np.argsort(-leader_N, kind="stable")[:KEEP])
        pushed = world.encode(gradients_T, step)
        for trainer, sections in enumerate(pushed):
            sent_N = flat_sent(sections)
            expected_N = np.zeros(COUNT, np.float32)
            expected_N[chosen_K] = narrow(sums[trainer][chosen_K], dtype)
            np.testing.assert_array_equal(sent_N, expected_N)
            before_N = residuals[trainer]
            after_N = (1 - low_pass) * before_N + low_pass * (sums[trainer] - sent_N)
            found_N = flat(world.compressors[trainer].tensors(), ".residual")
            np.testing.assert_allclose(found_N, after_N, rtol=0, atol=0 if low_pass == 1 else 1e-5)
            residuals[trainer] = found_N.copy()


@pytest.mark.parametrize("dtype", [Dtype.FLOAT32, Dtype.BFLOAT16])
@pytest.mark.parametrize("momentum", [None, Momentum(momentum=0.5, nesterov=False, masking=True)])
def test_a_leaders_thresholds_and_momenta_keep_the_law(
    momentum: Momentum | None, dtype: Dtype
) -> None:
    options = options_of(dtype=dtype, transforms=() if momentum is None else (momentum,))
    layout = Layout(SPECS)
    world = Group(
        [
            ErrorFeedback(
                layout,
                FromLeader(inner=options.selector, trainer=trainer, trainers=3),
                options.feedback,
            )
            for trainer in range(3)
        ]
    )
    momenta = np.zeros((3, COUNT), np.float32)
    renewals = 0
    for step in range(24):
        gradients_T = [gradients_of(100 * trainer + step) for trainer in range(3)]
        joining = [flat(gradients) for gradients in gradients_T]
        if momentum is not None:
            joining = [0.5 * own_N + one for own_N, one in zip(momenta, joining, strict=True)]
        before = [flat(one.tensors(), ".residual") for one in world.compressors]
        pushed = world.encode(gradients_T, step)
        leader_N = flat_sent(pushed[step % 3])
        for trainer, one in enumerate(world.compressors):
            sent_N, tensors = flat_sent(pushed[trainer]), one.tensors()
            sum_N = before[trainer] + joining[trainer]
            np.testing.assert_array_equal(sent_N + flat(tensors, ".residual"), sum_N)
            assert not sent_N[leader_N == 0].any()
            if momentum is not None:
                momenta[trainer] = np.where(leader_N != 0, 0, joining[trainer])
                np.testing.assert_array_equal(flat(tensors, ".momentum"), momenta[trainer])
    for one in world.compressors:
        renewals += sum(report.renewals for report in one.report().values())
    assert renewals > 6, "thresholds were never renewed"


def test_the_leader_alone_speaks() -> None:
    world = group(3)
    for step in range(6):
        encodings = [
            one.encode(gradients_of(step + 10 * trainer), step)
            for trainer, one in enumerate(world.compressors)
        ]
        contributions = [first_round(encoding) for encoding in encodings]
        assert [len(sections) for sections in contributions] == [
            int(trainer == step % 3) for trainer in range(3)
        ]
        agreed = reduce(Op.LEADER, contributions, step, COUNT)
        assert agreed == contributions[step % 3]
        for encoding in encodings:
            ended(encoding, agreed)


@pytest.mark.parametrize(
    "agreed",
    [
        (),
        (index_set(np.array([COUNT], np.int32), COUNT + 1),),
        (index_set(np.array([1], np.int32), 9),) * 2,
    ],
)
def test_what_is_no_choice_is_refused(agreed: tuple[Section, ...]) -> None:
    encoding = group(2).compressors[0].encode(gradients_of(0), 0)
    next(encoding)
    with pytest.raises(SectionError):
        encoding.send(agreed)
    with pytest.raises(SectionError):
        reduce(Op.LEADER, [(), agreed], 1, COUNT)


def test_a_listener_that_diverges_says_so_before_it_waits() -> None:
    gradients = gradients_of(0)
    gradients["layer.bias"][3] = np.nan
    with pytest.raises(DivergedError, match=r"^step 1: the gradient of layer\.bias is not finite"):
        next(group(2).compressors[1].encode(gradients, 0))
