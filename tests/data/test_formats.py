"""Files of other kinds are named, with what to do, whatever reads them under any name."""

from __future__ import annotations

import bz2
import gzip
import io
import json
import lzma
import pickle
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from table_rows import make_rows, run_prepare, table, write_csv, write_parquet

from dlrm_hybrid.data.schema import Dialect, Schema
from dlrm_hybrid.data.schemas.reading import builtin
from dlrm_hybrid.data.sources.arrow import import_module, pa
from dlrm_hybrid.data.sources.files import open_source
from dlrm_hybrid.types import DataError

TEXT = b"bought,price\n1,0.5\n0,0.25\n"
TABLE = pa.table({"bought": [1, 0], "price": [0.5, 0.25]})


def zipped(*names: str) -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        for name in names:
            archive.writestr(name, TEXT)
    return file.getvalue()


def tarred() -> bytes:
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w") as archive:
        entry = tarfile.TarInfo("rows.csv")
        entry.size = len(TEXT)
        archive.addfile(entry, io.BytesIO(TEXT))
    return file.getvalue()


def written(write: Callable[[io.BytesIO], object]) -> bytes:
    file = io.BytesIO()
    write(file)
    return file.getvalue()


def arrow_file(file: io.BytesIO) -> None:
    import_module("pyarrow.feather").write_feather(TABLE, file)


def arrow_stream(file: io.BytesIO) -> None:
    with pa.ipc.new_stream(file, TABLE.schema) as stream:
        stream.write_table(TABLE)


def orc(file: io.BytesIO) -> None:
    import_module("pyarrow.orc").write_table(TABLE, file)


def parquet(file: io.BytesIO) -> None:
    import_module("pyarrow.parquet").write_table(TABLE, file)


OTHERS: dict[str, tuple[bytes, str]] = {
    "bzip2": (bz2.compress(TEXT), "is compressed by bzip2"),
    "empty bzip2": (bz2.compress(b""), "is compressed by bzip2"),
    "xz": (lzma.compress(TEXT), "is compressed by xz"),
    "lzma": (lzma.compress(TEXT, lzma.FORMAT_ALONE), "is compressed by lzma"),
    "gz twice": (gzip.compress(gzip.compress(TEXT)), "is compressed twice"),
    "zip": (zipped("rows.csv"), "is a zip archive"),
    "xlsx": (zipped("[Content_Types].xml", "xl/workbook.xml"), "is a workbook of Excel"),
    "npz": (written(lambda file: np.savez(file, a=np.zeros(3))), "is an archive of arrays"),
    "tar": (tarred(), "is a tar archive"),
    "tar.gz": (gzip.compress(tarred()), "is a tar archive"),
    "parquet.gz": (gzip.compress(written(parquet)), "is a Parquet file"),
    "avro": (b"Obj\x01\x04\x14avro.codec\x08null\x00", "is an Avro file"),
    "orc": (written(orc), "is an ORC file"),
    "feather": (written(arrow_file), "is an Arrow"),
    "stream": (written(arrow_stream), "is a stream of Arrow"),
    "pickle": (pickle.dumps([1, 2]), "is a pickle"),
    "json lines": (json.dumps({"bought": 1}).encode() + b"\n", "is JSON"),
    "json": (json.dumps([{"bought": 1}], indent=1).encode(), "is JSON"),
    "json of rows": (b"\xef\xbb\xbf[[1, 0.5], [0, 0.25]]", "is JSON"),
    "libsvm": (b"1 1:0.23 9:1\n0 1:0.35 8:1\n", "is no table with a header but LibSVM"),
    "libffm": (b"-1 0:1:0.23 1:9:1\n0 0:1:0.35\n", "is no table with a header but LibSVM"),
    "html": (b"\n<!DOCTYPE html><html>404</html>", "is a page of HTML"),
    "utf-16": (TEXT.decode().encode("utf-16"), "is text in UTF-16"),
    "utf-32": (TEXT.decode().encode("utf-32"), "is text in UTF-32"),
    "sqlite": (b"SQLite format 3\x00\x10\x00", "is an SQLite database"),
}


@pytest.mark.parametrize("name", list(OTHERS))
@pytest.mark.parametrize("schema", [table(), builtin("criteo_kaggle")])
def test_other_kinds_of_files_are_named(tmp_path: Path, name: str, schema: Schema) -> None:
    content, told = OTHERS[name]
    path = tmp_path / "rows.csv"
    path.write_bytes(content)
    with pytest.raises(DataError) as caught:
        run_prepare([path], tmp_path / "out", schema)
    message = str(caught.value)
    assert message.startswith(f"{path}: {told}") and message.endswith(" (data.raw)")
    assert ", which is not read here: " in message and "\n" not in message


@pytest.mark.parametrize("head", [b"ORC,y\n", b"PARE,y\n", b"{a},y\n", b"[1],y\n", b"1 2:3,y\n"])
def test_names_that_look_like_other_files_are_columns(tmp_path: Path, head: bytes) -> None:
    path = tmp_path / "rows.csv"
    path.write_bytes(head + b"a,1\n" * 100)
    source = open_source(path, Dialect(), 1 << 16, lambda piece: None)
    assert source.names == tuple(head.decode().strip().split(","))
    assert sum(block.columns.num_rows for block in source.blocks(["y"])) == 100


def test_a_wrong_ending_decides_nothing(tmp_path: Path) -> None:
    rows = make_rows(60)
    made = run_prepare([write_csv(tmp_path / "a.parquet", rows)], tmp_path / "out", table())
    again = run_prepare([write_parquet(tmp_path / "b.csv", rows)], tmp_path / "again", table())
    (tmp_path / "c.csv").write_bytes(gzip.compress((tmp_path / "a.parquet").read_bytes()))
    zipped = run_prepare([tmp_path / "c.csv"], tmp_path / "zipped", table())
    assert made.arrays == again.arrays == zipped.arrays


@pytest.mark.parametrize(
    ("kind", "wanted"),
    [
        (">i4", "int32"), (">f8", "double"), ("<f2", "halffloat"), ("?", "bool"),
        ("S3", "binary"), ("U3", "string"), (">U3", "string"), ("M8[M]", "timestamp[s]"),
        ("M8[h]", "timestamp[s]"), (">M8[us]", "timestamp[us]"), ("(2,)>i4", "fixed_size_list"),
        ("c16", None), ("V3", None), ("m8", None),
    ],
)  # fmt: skip
def test_fields_of_npy_files(tmp_path: Path, kind: str, wanted: str | None) -> None:
    rows = np.zeros(5, [("y", "i1"), ("x", kind)])
    rows["y"] = [0, 1, 0, 1, 0]
    np.save(tmp_path / "rows.npy", rows)
    source = open_source(tmp_path / "rows.npy", Dialect(), 1 << 16, lambda piece: None)
    (block,) = source.blocks(["y"])  # whatever the others are
    assert block.columns.num_rows == 5
    if wanted is None:
        with pytest.raises(DataError, match=r"rows.npy: field 'x': .* is not read: .*\(data.raw\)"):
            next(iter(source.blocks(["x"])))
        return
    (block,) = source.blocks(["x"])
    array = block.columns.column(0)
    assert str(array.type).startswith(wanted)
    text = "" if wanted == "string" else b"" if wanted == "binary" else None
    assert text is None or array.to_pylist() == [text] * 5
