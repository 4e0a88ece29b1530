"""Numbers as categories: buckets of FuxiCTR, and what an empty value is."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from table_rows import run_prepare

from dlrm_hybrid.data.encode import read_vocabulary
from dlrm_hybrid.data.schemas import reading
from dlrm_hybrid.data.shards import open_shards
from dlrm_hybrid.data.sources.keys import MISSING_INTEGER, log_squared

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
    names = [one.name for one in shards.schema.categorical]
    known = {
        name: read_vocabulary(folder / "vocabulary", number, column)
        for number, (name, column) in enumerate(
            zip(names, shards.schema.categorical, strict=True), 1
        )
    }
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
