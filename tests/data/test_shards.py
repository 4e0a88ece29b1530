import json
import re
from dataclasses import replace

import numpy as np
import pytest
from shard_folder import SEMANTICS, write_folder, write_records

from dlrm_hybrid.data.format import BLOCK_ROWS, RECORD_WORDS
from dlrm_hybrid.data.loader import START, Loader, sequential_batches
from dlrm_hybrid.data.manifest import MANIFEST_FILE
from dlrm_hybrid.data.shards import open_shards, verify
from dlrm_hybrid.types import DataError


def test_rows_of_every_run_equal_what_was_written(tmp_path):
    records = write_folder(tmp_path, [5, 0, 4, 3])
    shards = open_shards(tmp_path, None)
    verify(shards, lambda rows: None)
    for start in range(13):
        for stop in range(start, 13):
            pieces = list(shards.pieces(range(start, stop)))
            read = np.concatenate([records[:0], *pieces])
            assert np.array_equal(read, records[start:stop])
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


def damage(folder, day, row, word, value):
    """Overwrite a word of a record, as a disk may; the sum of checksums stays as it was."""
    path = folder / f"day_{day}.bin"
    records = np.fromfile(path, np.uint32).reshape(-1, RECORD_WORDS)
    records[row, word] = value
    path.write_bytes(records.tobytes())


def test_an_altered_byte_is_found_at_once_or_later(tmp_path):
    write_folder(tmp_path, [2, 3, 40 * BLOCK_ROWS])
    damage(tmp_path, 2, 5 * BLOCK_ROWS + 1, 20, 1)
    found = r"day_2.bin: rows 40,960 to 49,151 \(counted from 0\): checksum differs"
    opened = []
    for _ in range(40):  # each looks at 32 of 42 blocks: all overlook it once in 10**25 times
        try:
            opened.append(open_shards(tmp_path, None))
        except DataError as error:
            assert re.search(found, str(error))
            break
    else:
        pytest.fail("the sample never held the block")
    if opened:
        with pytest.raises(DataError, match=found):
            verify(opened[0], lambda rows: None)


@pytest.mark.parametrize("what", ["vocabulary", "clicks"])
def test_all_that_a_manifest_tells_is_verified(tmp_path, what):
    write_folder(tmp_path, [2, 3, 2])
    if what == "vocabulary":
        (tmp_path / "vocabulary" / "C07.bin").write_bytes(b"1234")
    else:
        path = tmp_path / MANIFEST_FILE
        values = json.loads(path.read_text())
        values["days"][1]["clicks"] = 3 - values["days"][1]["clicks"]
        path.write_text(json.dumps(values))
    shards = open_shards(tmp_path, None)
    with pytest.raises(DataError, match="does not match manifest.json"):
        verify(shards, lambda rows: None)


FORGED = [
    (0, np.float32(0.5), "label 0.5 is neither 0 nor 1"),
    (0, np.float32(np.nan), "label nan is neither 0 nor 1"),
    (1, np.float32(np.inf), "I1 is inf"),
    (13, np.float32(np.nan), "I13 is nan"),
    (14, np.uint32(999), "C1 is 999, its table has 40 rows"),
    (39, np.uint32(2**31 + 5), "C26 is 2147483653, its table has 2147483648 rows"),
]


@pytest.mark.parametrize(("word", "value", "message"), FORGED)
def test_a_value_that_no_model_can_take_is_named_with_its_row(tmp_path, word, value, message):
    records = write_folder(tmp_path, [11, 17, 12])
    records[13, word] = value.view(np.uint32)
    write_records(tmp_path, records, [11, 17, 12])
    shards = open_shards(tmp_path, None)  # its checksums are right
    found = rf"day_1.bin: row 2 \(counted from 0\): {re.escape(message)}; the file was damaged"
    with pytest.raises(DataError, match=found):
        verify(shards, lambda rows: None)
    with pytest.raises(DataError, match=found):
        list(sequential_batches(shards, range(40), 5))
    loader = Loader(
        shards,
        batch_size=4,
        seed=3,
        shuffle=True,
        shuffle_block_rows=9,
        shuffle_read_rows=3,
    )
    state = START
    with pytest.raises(DataError, match=found):
        for _ in range(7):
            _, state = loader.read(state)
