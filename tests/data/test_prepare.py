from __future__ import annotations

import gzip
import itertools
from pathlib import Path

import numpy as np
import pytest
import xxhash
from criteo_rows import day_lengths, make_lines, read_plainly, run_prepare, semantics, stored

from dlrm_hybrid.data import manifest
from dlrm_hybrid.data.folder import PrepareOptions
from dlrm_hybrid.data.prepare import prepare
from dlrm_hybrid.types import DataError


@pytest.fixture(scope="module")
def lines() -> list[bytes]:
    return make_lines(700)


@pytest.fixture(scope="module")
def raw(lines: list[bytes], tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("raw") / "train.txt"
    path.write_bytes(b"".join(lines))
    return path


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"min_count": 3},
        {"vocabulary": "train_days"},
        {"vocabulary": "train_days", "min_count": 2, "max_ind_range": 50},
        {"max_ind_range": 1000, "days": 1},
        {"min_count": 10**6},
    ],
    ids=str,
)
def test_records_equal_a_plain_reading(
    tmp_path: Path, raw: Path, lines: list[bytes], changes: dict[str, object]
) -> None:
    made = run_prepare(raw, tmp_path / "out", block_bytes=5000, **changes).manifest
    wanted = semantics(**changes)
    lengths = day_lengths(len(lines), wanted.days)
    words, table_rows = read_plainly(lines, wanted, lengths)
    assert made == manifest.read(tmp_path / "out")
    assert [part.rows for part in made.parts] == [sum(lengths[:-1]), 0, lengths[-1]]
    assert made.table_rows == tuple(table_rows)
    np.testing.assert_array_equal(stored(tmp_path / "out"), words)
    clicks = np.split(words[:, 0] != 0, [sum(lengths[:-1])])
    assert [made.parts.train.clicks, made.parts.test.clicks] == [int(one.sum()) for one in clicks]
    fields = [field for line in lines for field in line.rstrip().split(b"\t")[14:]]
    assert made.zero_keys == fields.count(b"00000000") > 0


def test_real_rows_equal_a_plain_reading(tmp_path: Path, criteo_rows: Path) -> None:
    with gzip.open(criteo_rows) if criteo_rows.suffix == ".gz" else criteo_rows.open("rb") as file:
        rows = list(itertools.islice(file, 20_000))
    raw = tmp_path / "train.txt"
    raw.write_bytes(b"".join(rows))
    result = run_prepare(raw, tmp_path / "out")
    words, table_rows = read_plainly(rows, semantics(), day_lengths(len(rows), 7))
    assert result.manifest.table_rows == tuple(table_rows)
    np.testing.assert_array_equal(stored(tmp_path / "out"), words)


def test_checksums_are_those_of_the_files(tmp_path: Path, raw: Path) -> None:
    out = tmp_path / "out"
    made = run_prepare(raw, out, min_count=2).manifest
    for array in made.arrays:
        content = (out / array.file).read_bytes()
        assert array.blocks == (xxhash.xxh3_64_hexdigest(content[128:]),)
        loaded = np.load(out / array.file)
        assert (loaded.dtype.str, loaded.shape) == (array.dtype, array.shape)
    (source,) = made.sources
    assert source.xxh3 == xxhash.xxh3_128_hexdigest(raw.read_bytes())
    keys = [np.load(out / "vocabulary" / f"{column}.npy") for column in range(1, 27)]
    digests = [xxhash.xxh3_128_digest(one.tobytes()) for one in keys]
    assert made.vocabulary_xxh3 == xxhash.xxh3_128_hexdigest(b"".join(digests))
    assert all(made.out_of_vocabulary)
    sizes = [len(one) + 1 for one in keys]
    assert made.table_rows == tuple(sizes)


def test_days_by_files(tmp_path: Path, lines: list[bytes]) -> None:
    parts = [lines[:100], lines[100:150], lines[150:]]
    files = [tmp_path / f"day_{number}.gz" for number in range(3)]
    for path, part in zip(files, parts, strict=True):
        path.write_bytes(gzip.compress(b"".join(part)))
    options: dict[str, object] = {"days": 3, "day_split": "files", "vocabulary": "train_days"}
    made = run_prepare(files, tmp_path / "out", **options).manifest  # type: ignore[arg-type]
    assert [part.rows for part in made.parts] == [150, 0, 550]
    assert [source.stamp.name for source in made.sources] == ["day_0.gz", "day_1.gz", "day_2.gz"]
    words, _ = read_plainly(lines, semantics(**options), [100, 50, 550])
    np.testing.assert_array_equal(stored(tmp_path / "out"), words)


def test_rows_that_do_not_fill_the_days(tmp_path: Path, raw: Path, lines: list[bytes]) -> None:
    empty, few = tmp_path / "empty", tmp_path / "few"
    empty.write_bytes(b"")
    few.write_bytes(b"".join(lines[:6]))
    with pytest.raises(DataError, match="empty: no rows for its day"):
        run_prepare([raw, empty], tmp_path / "out", day_split="files", days=2)
    with pytest.raises(DataError, match=r"few: 6 rows cannot make 7 days \(data.days\)"):
        run_prepare(few, tmp_path / "out")
    with pytest.raises(DataError, match="empty: 0 rows"):
        run_prepare(empty, tmp_path / "out")
    assert {path.name for path in tmp_path.iterdir()} == {"empty", "few"}


def test_windows_line_ends_are_read_alike(tmp_path: Path, raw: Path, lines: list[bytes]) -> None:
    crlf = tmp_path / "train.txt"
    crlf.write_bytes(b"".join(lines).replace(b"\n", b"\r\n"))
    made = [run_prepare(path, tmp_path / path.parent.name).manifest for path in (raw, crlf)]
    assert made[0].arrays == made[1].arrays


def test_progress_reaches_every_total(tmp_path: Path, raw: Path, lines: list[bytes]) -> None:
    calls: list[tuple[str, int, int | None]] = []
    options = PrepareOptions(
        semantics=semantics(),
        max_bad_rows=0,
        processes=2,
        block_bytes=10_000,
        overwrite=False,
        advice="",
    )
    result = prepare([raw], tmp_path / "out", options, lambda *call: calls.append(call), print)
    for stage, total in {
        "parse": raw.stat().st_size,
        "vocabulary": 26 * len(lines),
        "assemble": len(lines),
    }.items():
        mine = [call for call in calls if call[0] == stage]
        assert {call[2] for call in mine} == {total}
        done = [call[1] for call in mine]
        assert done == sorted(done)
        assert done[0] == 0
        assert done[-1] == total
        assert len(done) >= 2 if stage == "assemble" else len(done) > 3
    assert result.rows_per_second == pytest.approx(len(lines) / result.seconds)
    again = prepare([raw], tmp_path / "out", options, lambda *_: None, print)
    assert again.up_to_date
