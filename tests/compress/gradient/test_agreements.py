"""Methods whose trainers agree on what they send, without a network, against plain numpy.

Shapes: N elements of all tensors, K that are sent, L fragments.
"""

from collections.abc import Callable, Sequence

import numpy as np
import pytest
import torch
from agreeing import Group, elements, encoded, ended, first_round
from gradient_rows import SPECS, Options, decoded, gradients_of, options_of, sparsifier
from numpy.typing import NDArray

from dlrm_hybrid.compress.gradient.collective import Op, reduce
from dlrm_hybrid.compress.gradient.compressor import Compressor
from dlrm_hybrid.compress.gradient.error_feedback import ErrorFeedback, FeedbackOptions
from dlrm_hybrid.compress.gradient.fragments import (
    FragmentSelector,
    allocate,
    costs,
    exact_budget,
    partition,
    sizes_of,
)
from dlrm_hybrid.compress.gradient.layout import Layout
from dlrm_hybrid.compress.gradient.selector import FromLeader, LargestOfAll, Selector, Union
from dlrm_hybrid.compress.gradient.transforms import Momentum
from dlrm_hybrid.types import DivergedError
from dlrm_hybrid.wire.dense import array_of, dense, narrow
from dlrm_hybrid.wire.section import Dtype, Section, SectionError
from dlrm_hybrid.wire.sparse import index_set, index_set_of

Float32s = NDArray[np.float32]
LAYOUT = Layout(SPECS)
COUNT = elements(SPECS)
KEEP = 34  # of 337 elements at sparsity 0.9


def flat(tensors: dict[str, torch.Tensor], suffix: str = "") -> Float32s:
    views = (tensors.get(f"{spec.name}{suffix}", torch.zeros(spec.shape)) for spec in SPECS)
    return np.concatenate([view.numpy().reshape(-1) for view in views])


def flat_sent(sections: dict[str, Section]) -> Float32s:
    return np.concatenate([decoded(sections[spec.name]) for spec in SPECS])


def group(selectors: Sequence[Selector], options: FeedbackOptions) -> Group:
    return Group([ErrorFeedback(LAYOUT, selector, options) for selector in selectors])


def cltk(trainers: int, options: Options) -> Group:
    inner = LargestOfAll(KEEP)
    selectors = [
        FromLeader(inner=inner, trainer=trainer, trainers=trainers) for trainer in range(trainers)
    ]
    return group(selectors, options.feedback)


def leader(trainers: int, options: Options) -> Group:
    selectors = [
        FromLeader(inner=options.selector, trainer=trainer, trainers=trainers)
        for trainer in range(trainers)
    ]
    return group(selectors, options.feedback)


def union(trainers: int, options: Options) -> Group:
    return group([Union(options.selector, options.feedback.dtype)] * trainers, options.feedback)


def deft(trainers: int, options: Options, *, is_exact: bool = True) -> Group:
    fragments = partition(LAYOUT.counts, trainers)
    selectors = [
        FragmentSelector(
            fragments=fragments, k=KEEP, is_exact=is_exact, trainer=trainer, trainers=trainers
        )
        for trainer in range(trainers)
    ]
    return group(selectors, options.feedback)


def largest(values_N: Float32s, keep: int) -> NDArray[np.int64]:
    return np.argsort(-np.abs(values_N), kind="stable")[:keep]


def chosen_alone(one: Compressor, options: Options, own: dict, step: int) -> NDArray[np.int64]:
    """What its compressor would send if nobody else were there."""
    alone = sparsifier(SPECS, options)
    for name, view in one.tensors().items():
        alone.tensors()[name].copy_(view)
    return np.flatnonzero(flat_sent(encoded(alone, own, step)))


Oracle = Callable[[Group, Options, list[dict], list[Float32s], int], NDArray[np.int64]]


def of_cltk(
    world: Group, options: Options, gradients_T: list[dict], sums: list[Float32s], step: int
) -> NDArray[np.int64]:
    return largest(sums[step % len(sums)], KEEP)


def of_leader(
    world: Group, options: Options, gradients_T: list[dict], sums: list[Float32s], step: int
) -> NDArray[np.int64]:
    first = step % len(sums)
    return chosen_alone(world.compressors[first], options, gradients_T[first], step)


def of_union(
    world: Group, options: Options, gradients_T: list[dict], sums: list[Float32s], step: int
) -> NDArray[np.int64]:
    pairs = zip(world.compressors, gradients_T, strict=True)
    return np.unique(np.concatenate([chosen_alone(one, options, own, step) for one, own in pairs]))


def of_deft(
    world: Group, options: Options, gradients_T: list[dict], sums: list[Float32s], step: int
) -> NDArray[np.int64]:
    """By the leader's norms; of each fragment the largest of who owns it."""
    trainers, fragments = len(sums), partition(LAYOUT.counts, len(sums))
    first, sizes_L = step % trainers, sizes_of(fragments)
    norms_L = np.array([np.linalg.norm(sums[first][one].astype(np.float64)) for one in fragments])
    keeps_L = exact_budget(norms_L, sizes_L, KEEP)
    owners_L = (allocate(costs(sizes_L, keeps_L), trainers) - first) % trainers
    chosen = [
        part.start + at
        for part, owner, keep in zip(fragments, owners_L.tolist(), keeps_L.tolist(), strict=True)
        for at in largest(sums[owner][part], keep).tolist()
        if sums[owner][part][at]
    ]
    return np.array(chosen)


HALF_MOMENTUM = Momentum(momentum=0.5, nesterov=False, masking=True)
WAYS = {
    "cltk": (cltk, of_cltk, {}),
    "leader": (leader, of_leader, {}),
    "leader with momentum": (leader, of_leader, {"transforms": (HALF_MOMENTUM,)}),
    "union": (union, of_union, {"steps": 1}),
    "deft": (deft, of_deft, {}),
}


@pytest.mark.parametrize("dtype", [Dtype.FLOAT32, Dtype.BFLOAT16])
@pytest.mark.parametrize("trainers", [1, 2, 3, 5])
@pytest.mark.parametrize(("make", "oracle", "more"), WAYS.values(), ids=WAYS.keys())
def test_all_send_what_was_chosen_and_keep_the_rest(
    make: Callable[..., Group], oracle: Oracle, more: dict, trainers: int, dtype: Dtype
) -> None:
    options = options_of(dtype=dtype, **more)
    world, renewals = make(trainers, options), 0
    for step in range(12):
        gradients_T = [gradients_of(100 * trainer + step) for trainer in range(trainers)]
        joining = [
            np.float32(0.5) * flat(one.tensors(), ".momentum") + flat(own)
            for one, own in zip(world.compressors, gradients_T, strict=True)
        ]
        befores = [flat(one.tensors(), ".residual") for one in world.compressors]
        sums = [before_N + own_N for before_N, own_N in zip(befores, joining, strict=True)]
        chosen_K = oracle(world, options, gradients_T, sums, step)
        pushed = world.encode(gradients_T, step)
        for trainer, one in enumerate(world.compressors):
            sent_N, expected_N = flat_sent(pushed[trainer]), np.zeros(COUNT, np.float32)
            expected_N[chosen_K] = narrow(sums[trainer][chosen_K], dtype)
            np.testing.assert_array_equal(sent_N, expected_N)
            left_N = flat(one.tensors(), ".residual")
            np.testing.assert_array_equal(sent_N + left_N, sums[trainer])
            if more.get("transforms"):
                joining[trainer][chosen_K] = 0
                np.testing.assert_array_equal(flat(one.tensors(), ".momentum"), joining[trainer])
            reports = one.report().values()
            renewals += sum(report.renewals for report in reports)
            assert sum(report.sent for report in reports) == len(chosen_K)
    assert make is not leader or renewals > 2, "thresholds were never renewed"


@pytest.mark.parametrize("trainers", [1, 3])
def test_a_filter_lets_a_part_of_what_is_left_stay(trainers: int) -> None:
    inner, options = LargestOfAll(KEEP), FeedbackOptions(dtype=Dtype.FLOAT32, low_pass=0.25)
    selectors = [
        FromLeader(inner=inner, trainer=trainer, trainers=trainers) for trainer in range(trainers)
    ]
    world = group(selectors, options)
    for step in range(12):
        gradients_T = [gradients_of(100 * trainer + step) for trainer in range(trainers)]
        befores = [flat(one.tensors(), ".residual") for one in world.compressors]
        for trainer, sections in enumerate(world.encode(gradients_T, step)):
            rest_N = befores[trainer] + flat(gradients_T[trainer]) - flat_sent(sections)
            after_N = 0.75 * befores[trainer] + 0.25 * rest_N
            left_N = flat(world.compressors[trainer].tensors(), ".residual")
            np.testing.assert_allclose(left_N, after_N, rtol=0, atol=1e-5)


@pytest.mark.parametrize(("make", "count"), [(cltk, 1), (deft, 2)])
def test_the_leader_alone_speaks_first(make: Callable[..., Group], count: int) -> None:
    world = make(3, options_of())
    for step in range(6):
        encodings = [
            one.encode(gradients_of(step + 10 * trainer), step)
            for trainer, one in enumerate(world.compressors)
        ]
        contributions = [first_round(encoding) for encoding in encodings]
        spoken = [len(sections) for sections in contributions]
        assert spoken == [count * (trainer == step % 3) for trainer in range(3)]
        agreed = reduce(Op.LEADER, contributions, step, COUNT)
        assert agreed == contributions[step % 3]
        if make is cltk:
            for encoding in encodings:
                ended(encoding, agreed)


@pytest.mark.parametrize("is_exact", [True, False])
def test_every_fragment_is_selected_by_everyone_in_turn(is_exact: bool) -> None:
    """Trainer i takes the bin (leader + i) mod trainers: from equal sums one step of each."""
    owners_SL = []
    for step in range(4):
        world = deft(4, options_of(), is_exact=is_exact)
        proposals = [first_round(one.encode(gradients_of(0), step)) for one in world.compressors]
        owners_SL.append(array_of(proposals[step % 4][0]))
    for owners_S in np.array(owners_SL).T.tolist():
        assert sorted(owners_S) == [0, 1, 2, 3]


def test_by_the_papers_budget_every_owner_counts_for_itself() -> None:
    world, fragments = deft(4, options_of(), is_exact=False), len(partition(LAYOUT.counts, 4))
    sizes: list[int] = []
    for step in range(8):
        pushed = world.encode([gradients_of(100 * trainer + step) for trainer in range(4)], step)
        is_sent_TN = np.array([flat_sent(sections) != 0 for sections in pushed])
        sizes.append(int(is_sent_TN.any(axis=0).sum()))
    assert all(abs(size - KEEP) <= 0.2 * KEEP + fragments for size in sizes)
    assert set(sizes) != {KEEP}


@pytest.mark.parametrize("is_exact", [True, False])
def test_zeros_leave_nothing_to_choose(is_exact: bool) -> None:
    zeros = {spec.name: torch.zeros(spec.shape) for spec in SPECS}
    for sections in deft(3, options_of(), is_exact=is_exact).encode([zeros] * 3, 0):
        assert not any(len(section.payload) for section in sections.values())


@pytest.mark.parametrize("dtype", [Dtype.FLOAT32, Dtype.FLOAT16])
def test_what_rounds_to_zero_is_not_chosen(dtype: Dtype) -> None:
    gradients = {spec.name: torch.full(spec.shape, 1e-9) for spec in SPECS}
    encoding = union(1, options_of(steps=1, dtype=dtype)).compressors[0].encode(gradients, 0)
    chosen_K = index_set_of(next(encoding).value, COUNT)
    assert (chosen_K.size == 0) is (dtype is Dtype.FLOAT16)


def numbers(*values: int) -> Section:
    return dense(0, np.array(values, np.int32))


NO_CHOICES = [
    (),
    (index_set(np.array([COUNT], np.int32), COUNT + 1),),
    (index_set(np.array([1], np.int32), 9),) * 2,
]
OWNERS, KEEPS = numbers(0, 0, 0, 0), numbers(1, 1, 1, 1)  # of two trainers' four fragments
NO_PLANS = [
    (),
    (OWNERS,),
    (OWNERS, numbers(1)),
    (numbers(2, 0, 0, 0), KEEPS),
    (OWNERS, numbers(1, 1, 1, 2)),
    (OWNERS, numbers(-1, 1, 1, 1)),
    (dense(0, np.zeros(4)), KEEPS),
]


@pytest.mark.parametrize(
    ("make", "broken"),
    [*((make, one) for make in (cltk, union) for one in NO_CHOICES)]
    + [(deft, one) for one in NO_PLANS],
)
def test_what_is_no_choice_is_refused(
    make: Callable[..., Group], broken: tuple[Section, ...]
) -> None:
    encoding = make(2, options_of()).compressors[0].encode(gradients_of(0), 0)
    next(encoding)
    with pytest.raises(SectionError):
        encoding.send(broken)


def test_a_choice_from_anothers_fragments_is_refused() -> None:
    """By the trainer that owns them: a server knows of no fragments."""
    for others in (0, 1):
        encoding = deft(2, options_of()).compressors[0].encode(gradients_of(0), 0)
        next(encoding)
        round_ = encoding.send((OWNERS, KEEPS))
        assert round_.op is Op.UNION
        own_K = index_set_of(round_.value, COUNT)
        others_K = np.setdiff1d(np.arange(COUNT, dtype=np.int32), own_K)[:others]
        agreed = (index_set(np.union1d(own_K, others_K), COUNT),)
        if not others:
            ended(encoding, agreed)
            continue
        with pytest.raises(SectionError, match="others chose from the fragments of trainer 0"):
            encoding.send(agreed)


def test_what_is_no_contribution_is_refused() -> None:
    one = (index_set(np.array([4, 7], np.int32), COUNT),)
    for op, contributions, step, told in (
        (Op.UNION, [one, ()], 0, "0 sections, expected one set"),
        (Op.UNION, [one, NO_CHOICES[1]], 0, "hold no set of 337"),
        (Op.LEADER, [one, ()], 1, "0 sections, expected lists"),
        (Op.LEADER, [(), NO_CHOICES[1]], 1, "hold no set of 337"),
        (Op.LEADER, [(), NO_CHOICES[2]], 1, "are no numbers"),
        (Op.LEADER, [(dense(0, np.zeros(5)),), one], 0, "are no numbers"),
    ):
        with pytest.raises(SectionError, match=told):
            reduce(op, contributions, step, COUNT)


def test_a_listener_that_diverges_says_so_before_it_waits() -> None:
    gradients = gradients_of(0)
    gradients["layer.bias"][3] = np.nan
    with pytest.raises(DivergedError, match=r"^step 1: the gradient of layer\.bias is not finite"):
        next(cltk(2, options_of()).compressors[1].encode(gradients, 0))
