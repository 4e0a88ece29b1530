import sys

import numpy as np
import pytest
from shard_folder import write_folder

from dlrm_hybrid.data import shards as shards_module
from dlrm_hybrid.data.shards import export_parquet, open_shards
from dlrm_hybrid.types import ResourceError

pq = pytest.importorskip("pyarrow.parquet", reason="the extra dlrm-hybrid[parquet] is missing")


def test_files_hold_every_row_under_names_that_say_what_is_stored(tmp_path, monkeypatch):
    monkeypatch.setattr(shards_module, "ROW_GROUP_ROWS", 4)
    records = write_folder(tmp_path / "shards", [9, 0, 5])
    shards = open_shards(tmp_path / "shards", None)
    written = []
    paths = export_parquet(shards, tmp_path / "out" / "parquet", written.append)
    assert [path.name for path in paths] == ["day_0.parquet", "day_1.parquet", "day_2.parquet"]
    assert sorted((tmp_path / "out" / "parquet").iterdir()) == list(paths)
    assert written == [4, 8, 9, 13, 14]
    start = 0
    for path, rows in zip(paths, (9, 0, 5), strict=True):
        table = pq.read_table(path)
        part = records[start : start + rows]
        assert table.num_rows == rows
        assert table.column_names[:2] == ["label", "I1_log1p"]
        assert table.column_names[13:15] == ["I13_log1p", "C1"]
        assert table.column_names[-1] == "C26"
        types = [str(field.type) for field in table.schema]
        assert types == ["int8"] + ["float"] * 13 + ["int32"] * 26
        for word, name in enumerate(table.column_names):
            column = table[name].to_numpy()
            stored = part[:, word].view(np.int32 if word >= 14 else np.float32)
            assert np.array_equal(column, stored)
        start += rows


def test_without_pyarrow_the_extra_is_named(tmp_path, monkeypatch):
    write_folder(tmp_path, [1, 1, 1])
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(ResourceError, match=r"pip install 'dlrm-hybrid\[parquet\]'"):
        export_parquet(open_shards(tmp_path, None), tmp_path / "out", lambda rows: None)
    assert not (tmp_path / "out").exists()


def test_a_broken_write_leaves_the_old_file(tmp_path):
    write_folder(tmp_path / "shards", [3, 1, 1])
    shards = open_shards(tmp_path / "shards", None)
    first, *_ = export_parquet(shards, tmp_path, lambda rows: None)
    before = first.read_bytes()

    def fail(rows):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        export_parquet(shards, tmp_path, fail)
    assert first.read_bytes() == before
    assert not list(tmp_path.glob("*.partial"))


def test_a_folder_that_cannot_be_made_is_named(tmp_path):
    write_folder(tmp_path / "shards", [1, 1, 1])
    (tmp_path / "file").write_text("")
    shards = open_shards(tmp_path / "shards", None)
    with pytest.raises(ResourceError, match="file"):
        export_parquet(shards, tmp_path / "file", lambda rows: None)
