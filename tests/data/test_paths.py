"""Folders, patterns and lists of raw files: which files they mean, and what folders say of rows."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from table_rows import run_prepare

from dlrm_hybrid.data.schemas import reading as schemas
from dlrm_hybrid.data.shards import open_shards
from dlrm_hybrid.data.sources.arrow import pa, parquet
from dlrm_hybrid.data.sources.paths import below, find, folder_values
from dlrm_hybrid.predict.sources import read_blocks
from dlrm_hybrid.types import ConfigError, DataError

SCHEMA = "label: y\ndense: []\ncategorical: [{name: c}]\nsplit: "
DAYS = ("2024-05-01", "2024-05-02", "2024-05-03")


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    """Three days as Spark writes them, of two, three and four rows."""
    for number, day in enumerate(DAYS):
        folder = tmp_path / "rows" / f"dt={day}"
        folder.mkdir(parents=True)
        count = number + 2
        table = pa.table({"y": [0, 1, 0, 1][:count], "c": ["a", "b", "c", "d"][:count]})
        parquet.write_table(table, folder / "part-0.parquet")
        (folder / ".part-0.parquet.crc").write_bytes(b"crc")
    (tmp_path / "rows" / "_SUCCESS").write_bytes(b"")
    (tmp_path / "rows" / "_temporary").mkdir()
    (tmp_path / "rows" / "_temporary" / "part-1.parquet").write_bytes(b"half")
    return tmp_path / "rows"


@pytest.mark.parametrize("named", ["", "/*", "/*/*", "/**", "/*/*.parquet"])
def test_a_folder_stands_for_its_files(rows: Path, named: str) -> None:
    wanted = tuple(rows / f"dt={day}" / "part-0.parquet" for day in DAYS)
    assert find(f"{rows}{named}", "data.raw") == wanted
    assert find([str(one) for one in reversed(wanted)], "data.raw") == wanted[::-1]
    assert below(wanted) == tuple(f"dt={day}/part-0.parquet" for day in DAYS)
    assert below(wanted[:1]) == (f"dt={DAYS[0]}/part-0.parquet",)
    assert below((Path("a/x.csv"), Path("b/x.csv"))) == ("a/x.csv", "b/x.csv")
    assert find(None, "data.raw") == ()


def test_a_file_is_read_once(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("y\n")
    (tmp_path / "b.csv").symlink_to(tmp_path / "a.csv")
    os.link(tmp_path / "a.csv", tmp_path / "c.txt")
    (tmp_path / "sub").symlink_to(tmp_path)
    one = str(tmp_path / "a.csv")
    for named, told in (
        ([one, one], "a.csv is named twice: each of its rows would count twice"),
        ([one, f"{tmp_path}/a*"], "a.csv is named twice"),
        (f"{tmp_path}/*.csv", "b.csv is the same file as .*a.csv"),
        ([one, f"{tmp_path}/c.txt"], "c.txt is the same file as .*a.csv"),
        (str(tmp_path), "sub: the same folder as another one in it"),
        (f"{tmp_path}/*.parquet", r"\*.parquet: no file fits this pattern"),
    ):
        with pytest.raises(ConfigError, match=f"predict.rows.*{told}"):
            find(named, "predict.rows")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match="empty: no file in this folder"):
        find(f"{tmp_path}/empty", "data.raw")


@pytest.mark.parametrize(
    "split",
    [
        '{by: file, validation: ["dt=2024-05-02/*"], test: ["*dt=2024-05-03*"]}',
        '{by: time, column: dt, validation_from: "2024-05-02", test_from: "2024-05-03"}',
    ],
)
def test_folders_say_what_rows_are_for(rows: Path, tmp_path: Path, split: str) -> None:
    schema = schemas.loads(SCHEMA + split, "s.yaml")
    made = run_prepare(list(find(str(rows), "data.raw")), tmp_path / "out", schema)
    assert [part.rows for part in made.parts] == [2, 3, 4]


def test_folders_are_columns_if_the_schema_names_them(rows: Path, tmp_path: Path) -> None:
    assert folder_values(Path("x/a=1/b%20c=d%2Fe/k=__HIVE_DEFAULT_PARTITION__/=/z=.csv")) == {
        **{"a": "1", "b c": "d/e", "k": None}
    }
    text = SCHEMA.replace("{name: c}", "{name: c}, {name: dt}") + "{by: fraction, test: 0.5}"
    schema = schemas.loads(text.replace("label", "vocabulary: all\nlabel"), "s.yaml")
    paths = find(str(rows), "data.raw")
    made = run_prepare(list(paths), tmp_path / "out", schema)
    assert made.table_rows == (4, 3)
    assert open_shards(tmp_path / "out", None).manifest.rows == 9
    blocks = list(read_blocks(paths, schema, ("dt",), 1 << 16, lambda done: None))
    assert [block.kept["dt"][0].as_py() for block in blocks] == list(DAYS)
    lost = tmp_path / "part-0.parquet"
    paths[0].rename(lost)
    with pytest.raises(DataError, match="part-0.parquet: no column 'dt'"):
        run_prepare([lost], tmp_path / "no", schema)
