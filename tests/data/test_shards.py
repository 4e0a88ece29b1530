import json
from dataclasses import replace

import numpy as np
import pytest
from shard_folder import SEMANTICS, write_folder

from dlrm_hybrid.data.manifest import MANIFEST_FILE
from dlrm_hybrid.data.shards import open_shards
from dlrm_hybrid.types import DataError


def test_rows_of_every_run_equal_what_was_written(tmp_path):
    records = write_folder(tmp_path, [5, 0, 4, 3])
    shards = open_shards(tmp_path, None, verify=True)
    for start in range(13):
        for stop in range(start, 13):
            pieces = list(shards.pieces(range(start, stop)))
            read = np.concatenate([records[:0], *pieces])
            assert np.array_equal(read, records[start:stop])
            out = np.zeros_like(records)
            shards.copy_into(range(start, stop), out)
            assert np.array_equal(out[: stop - start], records[start:stop])
            assert not out[stop - start :].any()
    assert len(list(shards.pieces(range(3, 11)))) == 3
    for wrong in (range(-1, 2), range(0, 13), range(0, 4, 2)):
        with pytest.raises(IndexError, match="12 rows"):
            list(shards.pieces(wrong))


def test_maps_are_read_only(tmp_path):
    write_folder(tmp_path, [2, 2, 2])
    piece = next(open_shards(tmp_path, None).pieces(range(1)))
    with pytest.raises(ValueError, match="read-only"):
        piece[0, 0] = 1


@pytest.mark.parametrize("last", [0, 1, 6, 7])
def test_the_last_day_is_for_testing(tmp_path, last):
    write_folder(tmp_path, [5, 4, last])
    shards = open_shards(tmp_path, None)
    first_half, second_half = np.array_split(np.arange(9, 9 + last), 2)
    assert shards.train_rows == range(9)
    assert list(shards.test_rows("day")) == [*first_half, *second_half]
    assert list(shards.test_rows("first_half")) == list(first_half)
    assert shards.table_rows == shards.manifest.table_rows
    with pytest.raises(ValueError, match="data.test_part.*'week'"):
        shards.test_rows("week")


def test_other_options_are_refused_and_all_named(tmp_path):
    write_folder(tmp_path, [2, 2, 2])
    open_shards(tmp_path, SEMANTICS)
    expected = replace(SEMANTICS, days=7, vocabulary="train_days", min_count=4)
    with pytest.raises(DataError) as caught:
        open_shards(tmp_path, expected)
    message = str(caught.value)
    assert str(tmp_path) in message
    assert "data.days: prepared with 3, the configuration says 7" in message
    assert (
        "data.vocabulary: prepared with 'all_days', the configuration says 'train_days'" in message
    )
    assert "data.min_count: prepared with 0, the configuration says 4" in message
    assert "data.on_bad_row" not in message
    assert "prepare" in message
    assert "data.prepared" in message


def test_a_cut_or_missing_file_is_refused(tmp_path):
    write_folder(tmp_path, [2, 3, 2])
    path = tmp_path / "day_1.bin"
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(DataError, match="day_1.bin: has 479 bytes, expected 480 for 3 rows"):
        open_shards(tmp_path, None)
    path.unlink()
    with pytest.raises(DataError, match="day_1.bin: cannot be read: No such file"):
        open_shards(tmp_path, None)


def test_an_altered_byte_is_found_when_verifying(tmp_path):
    write_folder(tmp_path, [2, 3, 2])
    path = tmp_path / "day_2.bin"
    altered = bytearray(path.read_bytes())
    altered[100] ^= 1
    path.write_bytes(altered)
    open_shards(tmp_path, None)
    with pytest.raises(DataError, match=r"day_2.bin: checksum xxh3-128 is \w{32}, expected \w{32}"):
        open_shards(tmp_path, None, verify=True)


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("days", [], "lists 0 shards, its option days is 3"),
        ("table_rows", [1, 2], "has 2 table sizes, expected 26"),
    ],
)
def test_a_manifest_that_contradicts_itself_is_refused(tmp_path, key, value, message):
    write_folder(tmp_path, [2, 2, 2])
    path = tmp_path / MANIFEST_FILE
    path.write_text(json.dumps({**json.loads(path.read_text()), key: value}))
    with pytest.raises(DataError, match=f"{MANIFEST_FILE}: {message}"):
        open_shards(tmp_path, None)
