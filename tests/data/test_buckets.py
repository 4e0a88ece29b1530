"""Numbers as categories: buckets of FuxiCTR, and what an empty value is."""

from pathlib import Path
from typing import Literal

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from table_rows import run_prepare

from dlrm_hybrid.data.preprocessing import Vocabulary
from dlrm_hybrid.data.schema import CategoricalColumn
from dlrm_hybrid.data.schemas import reading
from dlrm_hybrid.data.shards import open_shards
from dlrm_hybrid.data.sources.cells import MISSING_INTEGER, Key, log_squared
from dlrm_hybrid.data.sources.columns import Coded
from dlrm_hybrid.data.sources.tables import Numbering

SCHEMA = """
label: y
dense: []
categorical:
  - {name: counted, kind: integer, bucket: log_squared, missing: 0, min_count: 2}
  - {name: own, kind: integer, bucket: log_squared}
  - {name: word, missing: shared}
split: {by: file, test: [test.csv]}
vocabulary: VOCABULARY
"""
TRAIN = "y,counted,own,word\n1,0,5,a\n0,,,\n1,100,5,b\n0,101,-3,a\n1,2,,\n"
TEST = "y,counted,own,word\n1,102,7,a\n0,2,,\n"


@pytest.mark.parametrize(
    ("x", "bucket"),
    # FuxiCTR's formula, int(numpy.floor(numpy.log(x) ** 2)), computed once with numpy.
    [(-3, -3), (0, 0), (1, 1), (2, 2), (3, 1), (4, 1), (5, 2), (100, 21), (101, 21), (2**62, 1846)],
)
def test_buckets_are_squares_of_natural_logarithms(x: int, bucket: int) -> None:
    assert log_squared(x) == bucket


@given(st.integers(3, 2**62), st.integers(3, 2**62))
def test_larger_numbers_are_in_no_smaller_bucket(x: int, y: int) -> None:
    assert x > y or log_squared(x) <= log_squared(y)
    assert abs(log_squared(x) - np.floor(np.log(float(x)) ** 2)) <= 1  # two libraries' logarithms


@pytest.mark.parametrize("vocabulary", ["train", "all"])
def test_missing_values_are_a_number_or_share_an_id(vocabulary: str, tmp_path: Path) -> None:
    (tmp_path / "train.csv").write_text(TRAIN)
    (tmp_path / "test.csv").write_text(TEST)
    files = [tmp_path / "train.csv", tmp_path / "test.csv"]
    folder = tmp_path / "rows"
    run_prepare(files, folder, reading.loads(SCHEMA.replace("VOCABULARY", vocabulary), "s.yaml"))
    shards = open_shards(folder, None)
    known = {one.column.name: list(one.keys) for one in shards.preprocessing.vocabularies()}
    ids_RF = shards.read(range(7)).ids_RF
    # 0 and empty are one category; 100, 101 and 102 are in one bucket; 2 is twice only in `all`.
    assert known["counted"] == ([0, 21] if vocabulary == "train" else [0, 21, 2])
    assert ids_RF[:4, 0].tolist() == [1, 1, 2, 2]
    assert ids_RF[5, 0] == 2
    # Of its own: 5, missing, -3; in the test part 7, whose bucket is 3.
    shared = vocabulary == "train"
    assert known["own"] == [2, MISSING_INTEGER, -3] + ([] if shared else [3])
    assert ids_RF[:, 1].tolist() == [i + shared for i in (0, 1, 0, 2, 1)] + [
        0 if shared else 3,
        1 + shared,
    ]
    # Shared: index 0, however often.
    assert known["word"] == ["a", "b"]
    assert ids_RF[:, 2].tolist() == [1, 0, 2, 1, 0, 1, 0]


@given(
    size=st.integers(1, 40),
    seen=st.lists(st.tuples(st.integers(0, 40), st.booleans()), min_size=1),
    shared=st.booleans(),
    missing=st.sampled_from(["own", "shared"]),
)
def test_a_hashed_column_has_a_row_for_every_bucket(
    size: int, seen: list[tuple[int, bool]], shared: bool, missing: Literal["own", "shared"]
) -> None:
    column = CategoricalColumn(name="item", kind="integer", hash_size=size, missing=missing)
    shared = shared or missing == "shared"
    keys = [key % size if key < size else MISSING_INTEGER for key, _ in seen]
    numbers = Numbering()
    distinct: list[Key] = sorted(set(keys))
    index_M = np.array([distinct.index(key) for key in keys], np.int32)
    coded = Coded(index_M, distinct)
    number_M = numbers.add(coded, np.array([is_known for _, is_known in seen]))
    found, id_V, _, _ = numbers.vocabulary(column, shared)
    own = [*range(size), MISSING_INTEGER] if missing == "own" else [*range(size)]
    assert sorted(found) == sorted(own)
    for key, id in zip(keys, id_V[number_M].tolist(), strict=True):
        is_shared = key == MISSING_INTEGER and missing == "shared"
        assert id == 0 if is_shared else found[id - shared] == key
    # Those of known rows come first, by appearance, as without hashing.
    known = [key for key, (_, is_known) in zip(keys, seen, strict=True) if is_known]
    first = [key for key in dict.fromkeys(keys) if key in known and key in own]
    assert list(found[: len(first)]) == first
    # On some of them as a base the others come behind.
    base = Vocabulary(column, np.array(found[::2], np.int64), int(shared))
    grown, grown_V, growth, _ = numbers.vocabulary(column, shared, base)
    assert list(grown[: len(base.keys)]) == list(base.keys)
    assert sorted(grown) == sorted(own) and growth.unknown == 0
    for key, id in zip(keys, grown_V[number_M].tolist(), strict=True):
        assert id == 0 if key not in own else grown[id - shared] == key
