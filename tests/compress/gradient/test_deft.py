"""DEFT among some trainers, without a network.

Shapes: N elements of all tensors.
"""

import numpy as np
import pytest
import torch
from agreeing import Group, elements, ended, first_round
from gradient_rows import decoded, gradients_of
from numpy.typing import NDArray

from dlrm_hybrid.compress.gradient.collective import Op, reduce
from dlrm_hybrid.compress.gradient.error_feedback import ErrorFeedback, FeedbackOptions
from dlrm_hybrid.compress.gradient.fragments import (
    FragmentSelector,
    exact_budget,
    partition,
    sizes_of,
)
from dlrm_hybrid.compress.gradient.layout import Layout, Spec
from dlrm_hybrid.wire.dense import array_of, dense
from dlrm_hybrid.wire.section import Dtype, Section, SectionError
from dlrm_hybrid.wire.sparse import index_set, index_set_of

SPECS = (
    Spec(3, "a.weight", (60, 20)),
    Spec(5, "a.bias", (60,)),
    Spec(6, "b.weight", (10, 20)),
    Spec(9, "none.weight", (0, 3)),
    Spec(8, "b.bias", (1,)),
)
COUNT = elements(SPECS)
KEEP = 147  # of 1461 elements at sparsity 0.9


def group(trainers: int, *, is_exact: bool = True, dtype: Dtype = Dtype.FLOAT32) -> Group:
    layout = Layout(SPECS)
    fragments = partition(layout.counts, trainers)
    selectors = [
        FragmentSelector(
            fragments=fragments, k=KEEP, is_exact=is_exact, trainer=trainer, trainers=trainers
        )
        for trainer in range(trainers)
    ]
    return Group([ErrorFeedback(layout, one, FeedbackOptions(dtype=dtype)) for one in selectors])


def drawn(trainer: int, step: int) -> dict[str, torch.Tensor]:
    scales = {"a.weight": 1.0, "a.bias": 5.0, "b.weight": 0.3, "none.weight": 1.0, "b.bias": 2.0}
    gradients = gradients_of(100 * trainer + step, SPECS)
    return {name: scales[name] * gradient for name, gradient in gradients.items()}


def flat(tensors: dict[str, torch.Tensor], suffix: str = "") -> NDArray[np.float32]:
    return np.concatenate([tensors[f"{spec.name}{suffix}"].numpy().reshape(-1) for spec in SPECS])


def flat_sent(sections: dict[str, Section]) -> NDArray[np.float32]:
    return np.concatenate([decoded(sections[spec.name]) for spec in SPECS])


@pytest.mark.parametrize("dtype", [Dtype.FLOAT32, Dtype.BFLOAT16])
@pytest.mark.parametrize("trainers", [1, 2, 5])
def test_all_send_what_owners_chose_by_the_leaders_budget(trainers: int, dtype: Dtype) -> None:
    world = group(trainers, dtype=dtype)
    residuals = [np.zeros(COUNT, np.float32) for _ in range(trainers)]
    fragments = partition([spec.count for spec in SPECS], trainers)
    owners_seen: set[tuple[int, ...]] = set()
    for step in range(10):
        gradients_T = [drawn(trainer, step) for trainer in range(trainers)]
        sums = [
            residual_N + flat(gradients)
            for residual_N, gradients in zip(residuals, gradients_T, strict=True)
        ]
        encodings = [
            one.encode(gradients, step)
            for one, gradients in zip(world.compressors, gradients_T, strict=True)
        ]
        proposals = [first_round(encoding) for encoding in encodings]
        leader = step % trainers
        assert [len(one) for one in proposals] == [
            2 * (trainer == leader) for trainer in range(trainers)
        ]
        owners_L, keeps_L = (array_of(section) for section in proposals[leader])
        owners_seen.add(tuple(owners_L.tolist()))
        norms_L = np.array(
            [np.linalg.norm(sums[leader][one].astype(np.float64)) for one in fragments]
        )
        expected_L = exact_budget(norms_L, sizes_of(fragments), KEEP)
        np.testing.assert_array_equal(keeps_L, expected_L)
        chosen = [
            part.start + np.argsort(-np.abs(sums[owner][part]), kind="stable")[:keep]
            for part, owner, keep in zip(
                fragments, owners_L.tolist(), keeps_L.tolist(), strict=True
            )
        ]
        owner_N = np.zeros(COUNT)
        for part, owner in zip(fragments, owners_L.tolist(), strict=True):
            owner_N[part] = sums[owner][part]
        chosen_K = np.sort(np.concatenate(chosen))
        chosen_K = chosen_K[owner_N[chosen_K] != 0]
        choices = [encoding.send(proposals[leader]).value for encoding in encodings]
        agreed = reduce(Op.UNION, choices, step, COUNT)
        np.testing.assert_array_equal(index_set_of(agreed, COUNT), chosen_K)
        for trainer, one in enumerate(world.compressors):
            sent_N = flat_sent(ended(encodings[trainer], agreed))
            residuals[trainer] = flat(one.tensors(), ".residual").copy()
            np.testing.assert_array_equal(sent_N + residuals[trainer], sums[trainer])
            untouched_N = np.ones(COUNT, bool)
            untouched_N[chosen_K] = False
            assert not sent_N[untouched_N].any()
            assert dtype is Dtype.BFLOAT16 or not residuals[trainer][chosen_K].any()
    assert trainers == 1 or len(owners_seen) > 1, "nobody else ever owned anything"


@pytest.mark.parametrize("is_exact", [True, False])
def test_every_fragment_is_selected_by_everyone_in_turn(is_exact: bool) -> None:
    """Trainer i takes the bin (leader + i) mod trainers: from equal sums one step of each."""
    owners_SL = []
    for step in range(4):
        fresh = group(4, is_exact=is_exact)
        proposals = [first_round(one.encode(drawn(0, 0), step)) for one in fresh.compressors]
        owners_SL.append(array_of(proposals[step % 4][0]))
    for owners_S in np.array(owners_SL).T.tolist():
        assert sorted(owners_S) == [0, 1, 2, 3]


def test_by_the_papers_budget_every_owner_counts_for_itself() -> None:
    world, fragments = group(4, is_exact=False), len(partition([60 * 20, 60, 200, 1], 4))
    sizes: list[int] = []
    for step in range(8):
        gradients_T = [drawn(trainer, step) for trainer in range(4)]
        sizes.append(
            np.count_nonzero(
                np.any(
                    [flat_sent(sections) != 0 for sections in world.encode(gradients_T, step)],
                    axis=0,
                )
            )
        )
    assert all(abs(size - KEEP) <= 0.2 * KEEP + fragments for size in sizes)
    assert set(sizes) != {KEEP}


def test_zeros_leave_nothing_to_choose() -> None:
    zeros = {spec.name: torch.zeros(spec.shape) for spec in SPECS}
    for is_exact in (True, False):
        for sections in group(3, is_exact=is_exact).encode([zeros] * 3, 0):
            assert not any(
                decoded(section).size and len(section.payload) for section in sections.values()
            )


def numbers(*values: int) -> Section:
    return dense(0, np.array(values, np.int32))


WHOLE = numbers(*[0] * 5)  # fragments of two trainers: two of a.weight, and the others


@pytest.mark.parametrize(
    "agreed",
    [
        (),
        (WHOLE,),
        (WHOLE, numbers(1)),
        (numbers(2, 0, 0, 0, 0), numbers(1, 1, 1, 1, 1)),
        (numbers(0, 0, 0, 0, 0), numbers(1, 1, 1, 1, 2)),
        (numbers(0, 0, 0, 0, 0), numbers(-1, 1, 1, 1, 1)),
        (dense(0, np.zeros(5)), numbers(1, 1, 1, 1, 1)),
    ],
)
def test_what_is_no_allocation_is_refused(agreed: tuple[Section, ...]) -> None:
    good = (numbers(0, 0, 0, 0, 0), numbers(1, 1, 1, 1, 1))
    for plan in (good, agreed):
        encoding = group(2).compressors[0].encode(drawn(0, 0), 0)
        next(encoding)
        if plan is good:
            assert encoding.send(plan).op is Op.UNION
            continue
        with pytest.raises(SectionError):
            encoding.send(plan)


def test_a_choice_from_anothers_fragments_is_refused() -> None:
    """By the trainer that owns them: a server knows of no fragments."""
    plan = (numbers(0, 0, 0, 0, 0), numbers(1, 1, 1, 1, 1))
    for others in (0, 1):
        encoding = group(2).compressors[0].encode(drawn(0, 0), 0)
        next(encoding)
        own_K = index_set_of(encoding.send(plan).value, COUNT)
        others_K = np.setdiff1d(np.arange(COUNT, dtype=np.int32), own_K)[:others]
        agreed = (index_set(np.union1d(own_K, others_K), COUNT),)
        if not others:
            ended(encoding, agreed)
            continue
        with pytest.raises(SectionError, match="others chose from the fragments of trainer 0"):
            encoding.send(agreed)


def test_what_is_no_contribution_is_refused() -> None:
    one = (index_set(np.array([4, 7], np.int32), COUNT),)
    with pytest.raises(SectionError, match="0 sections, expected one set"):
        reduce(Op.UNION, [one, ()], 0, COUNT)
    with pytest.raises(SectionError, match="0 sections, expected lists"):
        reduce(Op.LEADER, [one, ()], 1, COUNT)
    with pytest.raises(SectionError, match="are no numbers"):
        reduce(Op.LEADER, [(dense(0, np.zeros(5)),), one], 0, COUNT)
