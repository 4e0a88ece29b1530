from __future__ import annotations

import gzip
import itertools
from pathlib import Path

import numpy as np
import pytest
import xxhash
from criteo_rows import (
    day_lengths,
    everything,
    make_lines,
    read_plainly,
    run_prepare,
    semantics,
    stored,
)

from dlrm_hybrid.data import manifest
from dlrm_hybrid.data.sources import criteo_ids
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
        {"max_ind_range": 2**32, "min_count": 2},
        {"min_count": 10**6},
    ],
    ids=str,
)
@pytest.mark.parametrize("column_rows", [7, 1 << 18])
def test_records_equal_a_plain_reading(
    tmp_path: Path,
    raw: Path,
    lines: list[bytes],
    changes: dict[str, object],
    column_rows: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(criteo_ids, "_BLOCK_ROWS", column_rows)
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


def test_progress_reaches_every_total(tmp_path: Path, raw: Path, lines: list[bytes]) -> None:
    calls: list[tuple[str, int, int | None]] = []
    options = {"processes": 2, "block_bytes": 10_000}
    result = run_prepare(
        raw, tmp_path / "out", progress=lambda *call: calls.append(call), **options
    )
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
    assert run_prepare(raw, tmp_path / "out").up_to_date


BAD_LINES = {
    50: b"0\t1\t2\n",
    51: b"2" + b"\t" * 39 + b"\n",
    333: b"1\tx\t" + b"\t" * 37 + b"\n",
    699: b"\xff\0\n",
}


@pytest.fixture(scope="module")
def dirty(lines: list[bytes], tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("dirty") / "train.txt"
    mixed = list(lines)
    for at, line in BAD_LINES.items():
        mixed.insert(at, line)
    path.write_bytes(b"".join(mixed) + lines[0][:70])
    return path


@pytest.mark.parametrize(
    ("processes", "block_bytes"), [(1, 1), (1, 3000), (1, 50_000), (2, 3000), (3, 1 << 22)]
)
def test_bytes_do_not_depend_on_blocks_and_processes(
    tmp_path: Path, dirty: Path, lines: list[bytes], processes: int, block_bytes: int
) -> None:
    options: dict[str, object] = {"on_bad_row": "quarantine", "vocabulary": "train_days"}
    expected = everything_made(dirty, tmp_path / "expected", **options)
    found = everything_made(
        dirty, tmp_path / "out", processes=processes, block_bytes=block_bytes, **options
    )
    assert found == expected
    words, _ = read_plainly(lines, semantics(**options), day_lengths(len(lines), 7))
    np.testing.assert_array_equal(stored(tmp_path / "out"), words)
    reports = found["bad_rows.txt"].splitlines()
    assert [report.split(b": ")[0] for report in reports] == [
        b"train.txt:51:3",
        b"train.txt:52:1",
        b"train.txt:334:2",
        b"train.txt:700:1",
        b"train.txt:705:%d" % (lines[0][:70].count(b"\t") + 1),
    ]
    raws = [report.split(b"\t", 1)[1] for report in reports]
    assert raws == [line.rstrip(b"\n") for line in BAD_LINES.values()] + [lines[0][:70]]


def everything_made(raw: Path, output: Path, **options: object) -> dict[str, bytes]:
    assert run_prepare(raw, output, max_bad_rows=5, **options).manifest.bad_rows == 5  # type: ignore[arg-type]
    assert not output.with_name(output.name + ".partial").exists()
    return everything(output)


@pytest.mark.parametrize(("processes", "block_bytes"), [(1, 1), (1, 1 << 22), (3, 4000)])
def test_the_first_bad_row_is_named(
    tmp_path: Path, dirty: Path, processes: int, block_bytes: int
) -> None:
    with pytest.raises(DataError, match=r"/train.txt:51:3: I2: 3 columns instead of 40"):
        run_prepare(dirty, tmp_path / "out", processes=processes, block_bytes=block_bytes)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("block_bytes", [1, 4000])
def test_more_bad_rows_than_allowed_are_an_error(
    tmp_path: Path, dirty: Path, block_bytes: int
) -> None:
    message = r"more than 2 bad rows \(data.max_bad_rows\); .*/train.txt:334:2: I1: 'x' is not an"
    with pytest.raises(DataError, match=message):
        run_prepare(
            dirty, tmp_path / "out", on_bad_row="skip", max_bad_rows=2, block_bytes=block_bytes
        )
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("block_bytes", [1000, 1 << 23])
def test_a_giant_line_is_never_skipped(
    tmp_path: Path, lines: list[bytes], block_bytes: int
) -> None:
    raw = tmp_path / "train.txt"
    raw.write_bytes(b"".join([*lines[:9], bytes((1 << 20) + 1) + b"\n", *lines]))
    with pytest.raises(DataError, match="train.txt:10: line longer than 1048576 bytes"):
        run_prepare(
            raw, tmp_path / "out", on_bad_row="skip", max_bad_rows=9, block_bytes=block_bytes
        )


@pytest.mark.parametrize("processes", [1, 2])
def test_a_bad_row_before_the_cut_of_the_stream_comes_first(
    tmp_path: Path, dirty: Path, raw: Path, processes: int
) -> None:
    for source, message in (
        (dirty, "train.gz:51:3"),
        (raw, "train.gz: the compressed file is truncated"),
    ):
        path = tmp_path / "train.gz"
        path.write_bytes(gzip.compress(source.read_bytes())[:-20])
        with pytest.raises(DataError, match=message):
            run_prepare(path, tmp_path / "out", processes=processes, block_bytes=9000)
