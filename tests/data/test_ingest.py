from __future__ import annotations

import gzip
from pathlib import Path

import numpy as np
import pytest
from criteo_rows import (
    day_lengths,
    everything,
    make_lines,
    read_plainly,
    run_prepare,
    semantics,
    stored,
)

from dlrm_hybrid.types import DataError

BAD_LINES = {
    50: b"0\t1\t2\n",
    51: b"2" + b"\t" * 39 + b"\n",
    333: b"1\tx\t" + b"\t" * 37 + b"\n",
    699: b"\xff\0\n",
}


@pytest.fixture(scope="module")
def lines() -> list[bytes]:
    return make_lines(700)


@pytest.fixture(scope="module")
def raw(lines: list[bytes], tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("raw") / "train.txt"
    path.write_bytes(b"".join(lines))
    return path


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
