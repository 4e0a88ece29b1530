from __future__ import annotations

import gzip
import tracemalloc
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
import xxhash
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from dlrm_hybrid.data.manifest import stamp
from dlrm_hybrid.data.sources import text as reader
from dlrm_hybrid.types import DataError

TEXT = b"".join(b"line %d of some length\n" % number for number in range(5000))
END_MARK_BYTES = 8


def gz(text: bytes) -> bytes:
    return gzip.compress(text, 1)


def zst(text: bytes) -> bytes:
    return zstandard.ZstdCompressor(write_checksum=True).compress(text)


def plain(text: bytes) -> bytes:
    return text


CODECS = pytest.mark.parametrize(
    ("suffix", "pack"), [(".txt", plain), (".gz", gz), (".zst", zst)], ids=["plain", "gz", "zst"]
)
COMPRESSED = pytest.mark.parametrize(("suffix", "pack"), [(".gz", gz), (".zst", zst)])
Pack = Callable[[bytes], bytes]


def read_all(paths: list[Path], block_bytes: int) -> list[tuple[int, int, int, bytes, int]]:
    return [
        (block.file, block.first_line, block.lines, block.text.tobytes(), block.raw_bytes)
        for block in reader.blocks(paths, block_bytes, [xxhash.xxh3_128() for _ in paths])
    ]


@CODECS
@pytest.mark.parametrize("block_bytes", [1, 100, 4096, 1 << 22])
def test_blocks_are_whole_lines_in_order(
    tmp_path: Path, suffix: str, pack: Pack, block_bytes: int
) -> None:
    paths = [tmp_path / f"a{suffix}", tmp_path / f"b{suffix}"]
    texts = [TEXT[:4000] + b"cut", TEXT]
    for path, text in zip(paths, texts, strict=True):
        path.write_bytes(pack(text))
    found = read_all(paths, block_bytes)
    for file, text in enumerate(texts):
        mine = [block for block in found if block[0] == file]
        assert b"".join(block[3] for block in mine) == text
        line = 1
        for _, first_line, lines, block, _ in mine:
            assert first_line == line
            assert lines == block.count(b"\n") + (not block.endswith(b"\n"))
            line += lines
        assert all(block[3].endswith(b"\n") for block in mine[:-1])
    raw_bytes = [block[4] for block in found]
    assert raw_bytes == sorted(raw_bytes)
    # The end mark of a compressed file may still be unread when its last text is there.
    assert 0 <= sum(path.stat().st_size for path in paths) - raw_bytes[-1] <= 2 * END_MARK_BYTES


SKIPPABLE = b"\x50\x2a\x4d\x18" + (4).to_bytes(4, "little") + b"any!"


def gz_member(text: bytes, level: int) -> bytes:
    return gzip.compress(text, min(level, 9), mtime=0)


def zst_frame(text: bytes, level: int, flush_every: int) -> bytes:
    """One frame with or without its size, its blocks ended here and there, some of them empty."""
    if not flush_every:
        return zstandard.ZstdCompressor(level).compress(text)
    stream = zstandard.ZstdCompressor(level, write_checksum=True).compressobj()
    packed: list[bytes] = []
    for at in range(0, len(text), flush_every):
        packed += (
            stream.compress(text[at : at + flush_every]),
            *(stream.flush(zstandard.COMPRESSOBJ_FLUSH_BLOCK) for _ in range(2)),
        )
    return b"".join([*packed, stream.flush()])


def rows_of(num_bytes: int, filler: int, noise: int) -> bytes:
    """Rows of text, so much of each the same in all and so much of it in no other."""
    row_bytes = filler + noise + 2
    rows = np.random.default_rng(noise).integers(48, 58, (num_bytes // row_bytes + 1, row_bytes))
    rows[:, noise : noise + filler], rows[:, -1] = 120, 10
    return rows.astype(np.uint8).tobytes()[:num_bytes]


@settings(deadline=None)
@given(
    num_bytes=st.integers(0, 3 << 20) | st.integers(0, 3000),
    filler=st.integers(0, 300),
    noise=st.integers(0, 40),
    cuts=st.integers(1, 4),
    empty=st.booleans(),
    level=st.integers(1, 9),
    flush_every=st.sampled_from([0, 70_000, 1 << 20]),
    chunk_bytes=st.sampled_from([1000, 1 << 14, 1 << 17, 1 << 20]),
    suffix=st.sampled_from([".gz", ".zst"]),
)
def test_compressed_text_is_the_text(
    tmp_path_factory: pytest.TempPathFactory, num_bytes: int, filler: int, noise: int, cuts: int,
    empty: bool, level: int, flush_every: int, chunk_bytes: int, suffix: str,
) -> None:  # fmt: skip
    def pack(text: bytes) -> bytes:
        if suffix == ".gz":
            return gz_member(text, level)
        return zst_frame(text, level, flush_every) + (SKIPPABLE if empty else b"")

    path = tmp_path_factory.mktemp("packed") / f"rows{suffix}"
    text = rows_of(num_bytes, filler, noise)
    size = len(text) // cuts + 1
    texts = [text[at : at + size] for at in range(0, len(text) or 1, size)]
    members = [pack(one) for one in texts]
    padding = bytes(100 * empty) if suffix == ".gz" else b""
    path.write_bytes(b"".join([pack(b"")] * empty + [padding] + members) + padding)

    def read() -> list[bytes]:
        with path.open("rb") as file:
            return list(reader.read_text(file, path, chunk_bytes, len))

    pieces = read()
    assert all(pieces)
    assert b"".join(pieces) == text
    frame = members[-1].removesuffix(SKIPPABLE)
    # In the middle of the last frame that holds text; less would be whole without what is skipped.
    cut = 1 if frame == members[-1] else len(members[-1]) - len(frame) // 2
    path.write_bytes(path.read_bytes()[: -cut - len(padding)])
    with pytest.raises(DataError, match="truncated"):
        read()


@COMPRESSED
@pytest.mark.parametrize("bomb", [bytes, lambda size: TEXT * (size // len(TEXT))])
def test_memory_is_bounded_whatever_a_file_expands_to(
    tmp_path: Path, suffix: str, pack: Pack, bomb: Callable[[int], bytes]
) -> None:
    path = tmp_path / f"raw{suffix}"
    text = TEXT + bomb(1 << 26)
    path.write_bytes(pack(text))
    tracemalloc.start()
    lines = 0
    with suppress(DataError):  # zeros are one long line
        for block in reader.blocks([path], 1 << 20, [xxhash.xxh3_128()]):
            lines += block.lines
    assert tracemalloc.get_traced_memory()[1] < 48 << 20
    tracemalloc.stop()
    assert lines == text.count(b"\n")


def test_a_window_of_gigabytes_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "raw.zst"
    parameters = zstandard.ZstdCompressionParameters(window_log=28)
    compressor = zstandard.ZstdCompressor(compression_params=parameters)
    stream = compressor.compressobj()  # without a size in its header
    path.write_bytes(stream.compress(TEXT) + stream.flush())
    with pytest.raises(DataError, match=r"its window is larger than 134217728 bytes; compress it"):
        read_all([path], 1 << 20)


@COMPRESSED
def test_damage_is_an_error(tmp_path: Path, suffix: str, pack: Pack) -> None:
    path = tmp_path / f"raw{suffix}"
    packed = bytearray(pack(TEXT))
    for at in range(len(packed) // 2, len(packed) // 2 + 8):
        packed[at] ^= 0x5A
    path.write_bytes(packed)
    with pytest.raises(DataError, match=rf"raw{suffix}: damaged compressed data"):
        read_all([path], 1 << 20)


@pytest.mark.parametrize("suffix", [".gz", ".zst"])
def test_a_wrong_suffix_is_an_error(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"raw{suffix}"
    path.write_bytes(TEXT)
    with pytest.raises(DataError, match=f"not a {suffix} file, it begins with b'line'"):
        read_all([path], 1 << 20)


@COMPRESSED
def test_compression_is_seen_without_a_suffix(tmp_path: Path, suffix: str, pack: Pack) -> None:
    path = tmp_path / "train.txt"
    path.write_bytes(pack(TEXT))
    assert b"".join(block[3] for block in read_all([path], 1 << 20)) == TEXT


@pytest.mark.parametrize("block_bytes", [1000, 1 << 19])
def test_an_endless_line_stops_early(tmp_path: Path, block_bytes: int) -> None:
    path = tmp_path / "raw.txt"
    path.write_bytes(TEXT + bytes(1 << 25))
    tracemalloc.start()
    with pytest.raises(DataError, match="raw.txt:5001: line longer than 1048576 bytes"):
        read_all([path], block_bytes)
    assert tracemalloc.get_traced_memory()[1] < 8 << 20
    tracemalloc.stop()


def test_missing_files_and_folders_are_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"absent.txt: no such file \(data.raw\)"):
        stamp(tmp_path / "absent.txt")
    with pytest.raises(DataError, match="not a regular file"):
        stamp(tmp_path)


def test_a_description_sees_edges_pieces_and_the_size(tmp_path: Path) -> None:
    path = tmp_path / "raw.txt"
    path.write_bytes(bytes(3 << 20))
    first = stamp(path)
    assert (first.name, first.num_bytes) == ("raw.txt", 3 << 20)
    for at in (0, (3 << 20) * 10 // 17, (3 << 20) - 1):
        changed = bytearray(3 << 20)
        changed[at] = 1
        path.write_bytes(changed)
        assert stamp(path).sample_xxh3 != first.sample_xxh3


@CODECS
def test_a_sample_estimates_the_whole(tmp_path: Path, suffix: str, pack: Pack) -> None:
    path = tmp_path / f"raw{suffix}"
    path.write_bytes(
        pack(b"".join(b"line %d of some length\n" % number for number in range(200_000)))
    )
    assert reader.estimated_rows(path) == pytest.approx(200_000, rel=0.3)
