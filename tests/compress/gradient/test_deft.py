"""DEFT among some trainers, without a network.

Shapes: N elements of all tensors.
"""

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from agreeing import Group
from gradient_rows import decoded, gradients_of
from numpy.typing import NDArray

from dlrm_hybrid.compress.gradient.compressor import Spec
from dlrm_hybrid.compress.gradient.deft import Deft, DeftCoordination, DeftOptions
from dlrm_hybrid.compress.gradient.deft_plan import exact_budget, partition
from dlrm_hybrid.wire.dense import array_of, dense
from dlrm_hybrid.wire.index_set import index_set, index_set_of
from dlrm_hybrid.wire.section import Dtype, Section, SectionError

SPECS = (
    Spec(3, "a.weight", (60, 20)),
    Spec(5, "a.bias", (60,)),
    Spec(6, "b.weight", (10, 20)),
    Spec(9, "none.weight", (0, 3)),
    Spec(8, "b.bias", (1,)),
)
COUNT = sum(spec.count for spec in SPECS)
KEEP = 147  # of 1461 elements at sparsity 0.9


def group(trainers: int, *, is_exact: bool = True, dtype: Dtype = Dtype.FLOAT32) -> Group:
    compressors = [
        Deft(
            SPECS,
            DeftOptions(
                sparsity=0.9, dtype=dtype, is_exact=is_exact, trainer=trainer, trainers=trainers
            ),
        )
        for trainer in range(trainers)
    ]
    return Group(compressors, DeftCoordination())


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
def test_all_send_what_owners_chose_by_the_delegates_budget(trainers: int, dtype: Dtype) -> None:
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
        proposals = [
            one.propose(0, gradients, step)
            for one, gradients in zip(world.compressors, gradients_T, strict=True)
        ]
        delegate = step % trainers
        assert [len(one) for one in proposals] == [
            2 * (trainer == delegate) for trainer in range(trainers)
        ]
        owners_L, keeps_L = (array_of(section) for section in proposals[delegate])
        owners_seen.add(tuple(owners_L.tolist()))
        norms_L = np.array(
            [np.linalg.norm(sums[delegate][one].astype(np.float64)) for one in fragments.slices()]
        )
        expected_L = exact_budget(norms_L, fragments.sizes_L, KEEP)
        np.testing.assert_array_equal(keeps_L, expected_L)
        chosen = [
            part.start + np.argsort(-np.abs(sums[owner][part]), kind="stable")[:keep]
            for part, owner, keep in zip(
                fragments.slices(), owners_L.tolist(), keeps_L.tolist(), strict=True
            )
        ]
        owner_N = np.zeros(COUNT)
        for part, owner in zip(fragments.slices(), owners_L.tolist(), strict=True):
            owner_N[part] = sums[owner][part]
        chosen_K = np.sort(np.concatenate(chosen))
        chosen_K = chosen_K[owner_N[chosen_K] != 0]
        for one in world.compressors:
            one.agree(0, proposals[delegate])
        choices = [one.propose(1, {}, step) for one in world.compressors]
        agreed = world.coordination.combine(1, step, choices, COUNT)
        np.testing.assert_array_equal(index_set_of(agreed[0], COUNT), chosen_K)
        for trainer, one in enumerate(world.compressors):
            one.agree(1, agreed)
            sent_N = flat_sent(one.encode({}, step))
            residuals[trainer] = flat(one.tensors(), ".residual").copy()
            np.testing.assert_array_equal(sent_N + residuals[trainer], sums[trainer])
            untouched_N = np.ones(COUNT, bool)
            untouched_N[chosen_K] = False
            assert not sent_N[untouched_N].any()
            assert dtype is Dtype.BFLOAT16 or not residuals[trainer][chosen_K].any()
    assert trainers == 1 or len(owners_seen) > 1, "nobody else ever owned anything"


@pytest.mark.parametrize("is_exact", [True, False])
def test_every_fragment_is_selected_by_everyone_in_turn(is_exact: bool) -> None:
    """Trainer i takes the bin (delegate + i) mod trainers: from equal sums one step of each."""
    owners_SL = []
    for step in range(4):
        fresh = group(4, is_exact=is_exact)
        proposals = [one.propose(0, drawn(0, 0), step) for one in fresh.compressors]
        owners_SL.append(array_of(proposals[step % 4][0]))
    for owners_S in np.array(owners_SL).T.tolist():
        assert sorted(owners_S) == [0, 1, 2, 3]


def test_gradients_of_many_trainers_do_not_build_up() -> None:
    world = group(8)
    for step in range(6):
        pushed = world.encode([drawn(trainer, step) for trainer in range(8)], step)
        touched_N = np.any([flat_sent(sections) != 0 for sections in pushed], axis=0)
        # Owners may find zeros of their own where the delegate's norms promised more.
        assert 0.9 * KEEP < touched_N.sum() <= KEEP


def test_by_the_papers_budget_every_owner_counts_for_itself() -> None:
    world, fragments = group(4, is_exact=False), len(partition([60 * 20, 60, 200, 1], 4).sizes_L)
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
def test_what_is_no_allocation_is_refused(agreed: Sequence[Section]) -> None:
    one = group(2).compressors[0]
    good = (numbers(0, 0, 0, 0, 0), numbers(1, 1, 1, 1, 1))
    one.agree(0, good)
    with pytest.raises(SectionError):
        one.agree(0, agreed)


def test_choices_that_meet_are_refused() -> None:
    world, one = group(2), (index_set(np.array([4, 7], np.int32), COUNT),)
    with pytest.raises(SectionError, match="two trainers chose the same element"):
        world.coordination.combine(1, 0, [one, one], COUNT)
    with pytest.raises(SectionError, match="0 sections, expected one set"):
        world.coordination.combine(1, 0, [one, ()], COUNT)
    with pytest.raises(SectionError, match="are no numbers"):
        world.coordination.combine(0, 1, [(), one], COUNT)
