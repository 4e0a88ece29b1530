import json
import re
from dataclasses import replace

import numpy as np
import pytest
from shard_folder import SEMANTICS, write_folder

from dlrm_hybrid.data.arrays import BLOCK_ROWS, HEADER_BYTES
from dlrm_hybrid.data.manifest import MANIFEST_FILE
from dlrm_hybrid.data.shards import open_shards, verify
from dlrm_hybrid.types import DataError


def test_rows_of_every_run_equal_what_was_written(tmp_path):
    records = write_folder(tmp_path, [5, 0, 4, 3])
    shards = open_shards(tmp_path, None)
    verify(shards, lambda rows: None)
    for start in range(13):
        for stop in range(start, 13):
            label, dense, ids, *_ = shards.read(range(start, stop))
            wanted = records[start:stop]
            assert np.array_equal(label, wanted.view(np.float32)[:, 0])
            assert np.array_equal(dense, wanted.view(np.float32)[:, 1:14])
            assert np.array_equal(ids, wanted[:, 14:].view(np.int32))
    for wrong in (range(-1, 2), range(0, 13), range(0, 4, 2)):
        with pytest.raises(IndexError, match="12 rows"):
            shards.read(wrong)


def test_maps_are_read_only(tmp_path):
    write_folder(tmp_path, [2, 2, 2])
    for array in open_shards(tmp_path, None).read(range(1))[:3]:
        with pytest.raises(ValueError, match="read-only"):
            array[0] = 1


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
    assert str(caught.value) == (
        f"{tmp_path}: made with other options (data.days: prepared with 3, the configuration says 7"
        "; data.vocabulary: prepared with 'all_days', the configuration says 'train_days'"
        "; data.min_count: prepared with 0, the configuration says 4)"
        "; run `prepare` again or name another folder in data.prepared"
    )


def test_a_cut_or_missing_file_is_refused(tmp_path):
    write_folder(tmp_path, [2, 3, 2])
    path = tmp_path / "ids.npy"
    content = path.read_bytes()
    path.write_bytes(content[:-1])
    with pytest.raises(DataError, match="ids.npy: has 855 bytes, expected 856 for 7 rows"):
        open_shards(tmp_path, None)
    path.write_bytes(content.replace(b"(7, 26)", b"(26, 7)"))
    with pytest.raises(DataError, match=r"ids.npy: its header is not that of <i4 \[7, 26\]"):
        open_shards(tmp_path, None)
    path.unlink()
    with pytest.raises(DataError, match="ids.npy: cannot be read: No such file"):
        open_shards(tmp_path, None)


def damage(folder, row, column, value):
    """Overwrite an id, as a disk may."""
    path = folder / "ids.npy"
    content = bytearray(path.read_bytes())
    at = HEADER_BYTES + 4 * (26 * row + column)
    content[at : at + 4] = np.int32(value).tobytes()
    path.write_bytes(content)


def test_an_altered_byte_is_found_at_once_or_later(tmp_path):
    write_folder(tmp_path, [2, 3, 40 * BLOCK_ROWS])
    damage(tmp_path, 5 * BLOCK_ROWS + 1, 20, 1)
    found = r"ids.npy: rows 40,960 to 49,151 \(counted from 0\): checksum differs"
    opened = []
    for _ in range(150):  # each looks at 32 of 123 blocks: all overlook it once in 10**19 times
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
        (tmp_path / "vocabulary" / "7.npy").write_bytes(bytes(132))
    else:
        path = tmp_path / MANIFEST_FILE
        values = json.loads(path.read_text())
        values["parts"]["train"]["clicks"] = 5 - values["parts"]["train"]["clicks"]
        path.write_text(json.dumps(values))
    shards = open_shards(tmp_path, None)
    with pytest.raises(DataError, match="does not match manifest.json"):
        verify(shards, lambda rows: None)
