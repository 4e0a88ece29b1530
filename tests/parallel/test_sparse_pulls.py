"""Servers that publish the largest differences alone: what they leave out comes later."""

from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from server_world import (
    EVERY_OPTIMIZER,
    SHAPES,
    World,
    assert_same,
    drawn,
    gappy_gradients_of,
    gradients_of,
)

from dlrm_hybrid.compress.gradient.layout import Layout, Spec
from dlrm_hybrid.compress.gradient.rule import target_k
from dlrm_hybrid.compress.update import decode
from dlrm_hybrid.model.optimizer import Optimizer
from dlrm_hybrid.parallel.dense.published import (
    SUFFIX,
    LargestChanges,
    Stamps,
    adds,
)
from dlrm_hybrid.parallel.policies import Lockstep
from dlrm_hybrid.types import DivergedError, DlrmError
from dlrm_hybrid.wire.section import Dtype
from dlrm_hybrid.wire.sparse import Destination

Array = NDArray[np.float32]

DTYPES = (Dtype.FLOAT32, Dtype.BFLOAT16, Dtype.FLOAT16, None)  # None: levels
LAYOUT = Layout([Spec(number, name, shape) for number, (name, shape) in enumerate(SHAPES.items())])
SMALLEST_FLOAT16 = 2.0**-24


class Followed:
    """A mirror, and a replica that gets nothing but its sections."""

    def __init__(self, weight_N: Array, dtype: Dtype | None, sparsity: float) -> None:
        self.weight_N = weight_N
        self.mirror = LargestChanges(
            LAYOUT, weight_N, dtype or Dtype.BFLOAT16, sparsity, levels=dtype is None
        )
        self.replica_N = weight_N.copy()
        self._destination = Destination(LAYOUT.parts(self.replica_N))
        self._number = 0

    def publish(self) -> int:
        """How many elements came, after the replica was compared."""
        sent, elements = self.mirror.publish(None, self._number)
        sections = [*sent.sections().values()]
        self._number += 1
        update = decode(sections, "version")
        if adds(sections):
            update.add_to(self._destination)
        else:
            update.copy_to(self._destination)
        assert self.replica_N.tobytes() == self.mirror.value_N.tobytes()
        return elements


def moves_of(rng: np.random.Generator, size: int) -> Array:
    """A few large, many small, many none."""
    return (rng.standard_t(2, size) * (rng.random(size) < rng.random())).astype(np.float32)


@given(
    seed=st.integers(0, 10_000),
    dtype=st.sampled_from(DTYPES),
    sparsity=st.sampled_from([0.0, 0.5, 0.9, 0.99]),
)
def test_a_replica_is_the_mirror_and_what_it_lacks_is_the_difference(
    seed: int, dtype: Dtype | None, sparsity: float
) -> None:
    rng = np.random.default_rng(seed)
    first_N = rng.normal(size=LAYOUT.size).astype(np.float32)
    one = Followed(first_N.copy(), dtype, sparsity)
    for _ in range(12):
        one.weight_N += moves_of(rng, LAYOUT.size)
        before_N = one.mirror.value_N.copy()
        elements = one.publish()
        moved_N = one.mirror.value_N != before_N
        assert moved_N.sum() <= elements
        lacked_N, left_N = np.abs(one.weight_N - before_N), one.weight_N - one.mirror.value_N
        for lacked_n, moved_n in zip(LAYOUT.parts(lacked_N), LAYOUT.parts(moved_N), strict=True):
            # What stays behind differs less than anything that was published.
            if moved_n.any() and not moved_n.all():
                assert lacked_n[~moved_n].max() <= lacked_n[moved_n].min()
        if dtype is Dtype.FLOAT32:
            assert not left_N[moved_N].any()
        assert np.array_equal(left_N[~moved_N], (one.weight_N - before_N)[~moved_N])
    assert not np.array_equal(one.mirror.value_N, first_N)


@given(seed=st.integers(0, 10_000), dtype=st.sampled_from(DTYPES))
def test_when_learning_stops_everything_is_published(seed: int, dtype: Dtype | None) -> None:
    rng = np.random.default_rng(seed)
    one = Followed(rng.normal(size=LAYOUT.size).astype(np.float32), dtype, 0.9)
    for _ in range(5):
        one.weight_N += moves_of(rng, LAYOUT.size)
        one.publish()
    assert not np.array_equal(one.mirror.value_N, one.weight_N)
    # A threshold that has become too high is renewed at every second version; a half is rounded
    # off to nothing in four.
    for _ in range(200):
        one.publish()
    left_N = np.abs(one.weight_N - one.mirror.value_N)
    if dtype is Dtype.FLOAT16:  # nothing smaller can be sent
        assert left_N.max() <= SMALLEST_FLOAT16 / 2
    elif dtype is None:  # half a quantum stays, of which the next is a half or a quarter
        assert left_N.max() <= 1e-3
    else:
        assert np.array_equal(one.mirror.value_N, one.weight_N)
        assert one.publish() == 0


def test_as_many_are_published_as_were_asked_for() -> None:
    rng = np.random.default_rng(0)
    layout_k = sum(target_k(count, 0.9) for count in LAYOUT.counts)
    one = Followed(rng.normal(size=LAYOUT.size).astype(np.float32), Dtype.FLOAT32, 0.9)
    published: list[int] = []
    for _ in range(300):
        one.weight_N += rng.normal(scale=1e-3, size=LAYOUT.size).astype(np.float32)
        published.append(one.publish())
    assert np.mean(published) == pytest.approx(layout_k, rel=0.25)


def test_weights_that_overflow_are_named() -> None:
    weight_N = np.ones(LAYOUT.size, np.float32)
    one = Followed(weight_N, Dtype.FLOAT32, 0.9)
    weight_N[-1] = np.inf
    with pytest.raises(DivergedError, match=r"step 1: .*top\.1\.weight is not finite"):
        one.publish()


@EVERY_OPTIMIZER
@pytest.mark.parametrize("gradients", [gradients_of, gappy_gradients_of], ids=["dense", "gaps"])
def test_a_sparsity_near_0_publishes_every_difference(
    optimizer: Optimizer, gradients: Callable[[int, int], dict[str, torch.Tensor]]
) -> None:
    plain, sparse = (
        World(2, Lockstep(), optimizer=optimizer, pull_sparsity=sparsity, gradients=gradients)
        for sparsity in (None, 1e-9)
    )
    before = drawn(0)
    for step in range(50):
        assert_same(sparse.run(step, step + 1)[0], plain.run(step, step + 1)[0])
    held = sparse.held()
    assert_same({name: held[name] for name in plain.held()}, plain.held())
    assert_same({name: held[f"{name}{SUFFIX}"] for name in SHAPES}, {n: held[n] for n in SHAPES})
    assert all(not torch.equal(held[name], before[name]) for name in SHAPES)


@EVERY_OPTIMIZER
def test_dense_pushes_are_pulled_in_parts(optimizer: Optimizer) -> None:
    world = World(2, Lockstep(), optimizer=optimizer, pull_sparsity=0.9)
    world.run(0, 50)
    (server,) = world.servers.values()
    versions = server.versions()
    assert versions.told / versions.elements == pytest.approx(0.1, rel=0.5)
    held = world.held()
    assert any(not torch.equal(held[name], held[f"{name}{SUFFIX}"]) for name in SHAPES)


@given(seed=st.integers(0, 10_000), size=st.sampled_from([1, 63, 64, 65, 300]))
def test_stamps_list_what_has_moved_since_an_update(seed: int, size: int) -> None:
    rng = np.random.default_rng(seed)
    weight_N = rng.normal(size=size).astype(np.float32)
    stamps = Stamps(weight_N)
    began = stamps.updates
    moved: list[set[int]] = []
    for _ in range(12):
        chosen_K = np.flatnonzero(rng.random(size) < rng.choice([0.0, 0.1, 1.0]))
        moved.append(set(chosen_K.tolist()))
        stamps.moved(chosen_K.astype(np.int32))
        weight_N += 1
    for update in range(13):
        change = stamps.since(began + update)
        assert change is not None
        expected = sorted(set[int]().union(*moved[update:]))
        assert change.indices_K.tolist() == expected
        assert change.weight_K.tolist() == weight_N[expected].tolist()
    stamps.moved(None)
    assert stamps.since(stamps.updates - 1) is None
    assert stamps.since(stamps.updates) is not None


def test_stamps_end_with_the_numbers_of_float32() -> None:
    stamps = Stamps(np.zeros(100, np.float32))
    stamps.updates = 0x7F7FFFFD
    for element in (3, 70):
        stamps.moved(np.array([element], np.int32))
    for back, expected in [(2, [3, 70]), (1, [70]), (0, [])]:
        change = stamps.since(stamps.updates - back)
        assert change is not None
        assert change.indices_K.tolist() == expected
    with pytest.raises(DlrmError, match="more than 2130706431 updates of a bucket"):
        stamps.moved(None)
