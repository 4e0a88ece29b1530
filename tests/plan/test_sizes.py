"""Sizes that are calculated against frames that are made."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dlrm_hybrid.model.exchange.distinct import encoded_ids
from dlrm_hybrid.plan.sizes import (
    BUILD_UP,
    build_up,
    frame_bytes,
    id_set_bytes,
    rice_bits,
    sparse_bytes,
    union,
)
from dlrm_hybrid.wire.dense import dense
from dlrm_hybrid.wire.frame import Frame, Kind, encoded_bytes
from dlrm_hybrid.wire.section import Dtype
from dlrm_hybrid.wire.sparse import rows, sparse

PRECISIONS = {"float32": Dtype.FLOAT32, "bfloat16": Dtype.BFLOAT16}


def frame(*sections: object) -> Frame:
    return Frame(kind=Kind.PUSH, sender=0, attempt=0, number=0, sections=tuple(sections))


def some(count: int, kept: int, seed: int = 0) -> np.ndarray:
    rng = np.random.default_rng(seed)
    return np.sort(rng.choice(count, kept, replace=False)).astype(np.int32)


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize(
    ("count", "density"), [(131_072, 0.01), (131_072, 0.1), (90_000, 0.001), (9_000, 0.4), (64, 1)]
)
def test_a_sparse_frame_is_as_long_as_calculated(
    count: int, density: float, precision: str
) -> None:
    kept = round(count * density)
    section = sparse(0, count, some(count, kept), np.ones(kept, np.float32), PRECISIONS[precision])
    calculated = frame_bytes([sparse_bytes(count, kept, precision)])
    assert calculated == pytest.approx(encoded_bytes(frame(section)), rel=0.01)


def test_rows_of_a_matrix_are_as_long_as_calculated() -> None:
    indices = np.concatenate([some(256, 26, row) + 256 * row for row in range(128)])
    indices = indices.astype(np.int32)
    values = np.ones(indices.size, np.float32)
    section = rows(0, (128, 256), indices, values, Dtype.BFLOAT16, allow_rice=True)
    calculated = sparse_bytes(128 * 256, indices.size, "bfloat16", 256)
    assert calculated == pytest.approx(len(section.payload), rel=0.01)


@given(st.lists(st.integers(0, 999), max_size=9))
def test_frames_of_dense_sections_are_exact(counts: list[int]) -> None:
    sections = [dense(0, np.zeros(count, np.float32)) for count in counts]
    calculated = frame_bytes(4 * count for count in counts)
    assert calculated == encoded_bytes(frame(*sections))


def test_ids_are_as_long_as_calculated() -> None:
    tables, found = np.array([100_000, 500, 3]), [4_000, 120, 3]
    ids = np.concatenate([some(rows, kept) for rows, kept in zip(tables, found, strict=True)])
    sent = encoded_ids(ids.astype(np.int64), np.array(found), tables, 4_096)
    assert id_set_bytes(found, tables.tolist(), 4_096) == pytest.approx(len(sent), rel=0.01)


@pytest.mark.parametrize("most", [0, 1, 128, 128 * 100])
def test_counts_take_the_bits_of_the_ids_of_a_batch_not_of_its_rows(most: int) -> None:
    tables = np.full(300, 1 << 20)
    sent = encoded_ids(np.zeros(0, np.int64), np.zeros(300, np.int64), tables, most)
    assert id_set_bytes([0] * 300, tables.tolist(), most) == len(sent)


@given(st.floats(1e-6, 0.9))
def test_no_code_beats_the_entropy_of_gaps(density: float) -> None:
    entropy = -(density * np.log2(density) + (1 - density) * np.log2(1 - density)) / density
    assert entropy <= rice_bits(density) <= 1.05 * entropy + 1


@given(st.floats(1e-6, 1), st.integers(1, 100))
def test_a_union_is_between_one_part_and_the_sum_of_all(density: float, trainers: int) -> None:
    assert density * (1 - 1e-9) <= union(density, trainers) <= min(1, trainers * density) + 1e-9


def test_pulls_become_denser_as_was_measured() -> None:
    for trainers, times, pull in BUILD_UP:
        assert union(pull / times, build_up(trainers)) == pytest.approx(pull)
    assert build_up(1) == 1
    assert build_up(16) < build_up(17) < 17
