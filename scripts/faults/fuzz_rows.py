"""Mutated raw rows: the parser takes the rows that a plain reading of the format takes, as it does.

Shapes: R rows, D = 14 words (label, 13 integers), F = 26 categorical features.
"""

from __future__ import annotations

import math
import re
import tracemalloc
from dataclasses import dataclass

import numpy as np
from fuzz_told import Told

from dlrm_hybrid.data.ingest import parse
from dlrm_hybrid.data.synthetic import encode, row_key, tables_of
from dlrm_hybrid.run.assembly import build

BLOCK_ROWS = 2_000
LIMIT_BYTES = 16 << 20  # of memory for a block, whose text is about half a megabyte
MOST_REASON_CHARACTERS = 250
PIECES = (
    *(
        b"\t",
        b"-",
        b"0",
        b"1",
        b"9",
        b"g",
        b"F",
        b"\0",
        b"\xff",
        b"\r",
        b" ",
        b"\n",
        b"\t\t",
        b"--",
    ),
    *(b"2147483647", b"2147483648", b"-2147483648", b"-2147483649", b"9" * 30, b"0000abcd"),
    *("é".encode(), b"\xe2\x80\xae", b"\xf0\x28", b"+1", b"1.5", b"0x1f", b"nan", b"\x1a", b"--"),
)
_ROW = re.compile(rb"([01])((?:\t(?:-?[0-9]{1,10})?){13})((?:\t(?:[0-9a-fA-F]{8})?){26})\r?")


@dataclass(frozen=True, slots=True)
class Read:
    """What a line means: label and log(x + 1) of 13 integers, 26 keys."""

    words: tuple[float, ...]
    keys: tuple[int, ...]


def reference(line: bytes) -> Read | None:
    """A line without its newline, read by one expression and Python's own numbers."""
    found = _ROW.fullmatch(line)
    if found is None:
        return None
    integers = [int(text or b"0") for text in found[2].split(b"\t")[1:]]
    if any(not -(2**31) <= value < 2**31 for value in integers):
        return None
    logs = [float(np.float32(math.log(max(value, 0) + 1.0))) for value in integers]
    keys = [int(text or b"0", 16) for text in found[3].split(b"\t")[1:]]
    return Read((float(found[1]), *logs), tuple(keys))


def fuzz(times: int, seed: int) -> Told:
    """Parse at least so many mutated rows, in blocks, of which some end inside a row.

    Args:
        times: how many rows.
        seed: of the rows and of what is done to them.
    """
    draw, told = np.random.default_rng(seed), Told()
    key, tables = row_key(seed), tables_of(build.profile())
    most_bytes = 0
    parse(np.frombuffer(bytearray(b"\n"), np.uint8), 1)  # loading a kernel takes memory of its own
    for first in range(0, times, BLOCK_ROWS):
        rows = bytes(encode(first, BLOCK_ROWS, key, tables)).splitlines(keepends=True)
        text = b"".join(_mutated(draw, row) for row in rows)
        if draw.random() < 0.5:
            text = text[: -int(draw.integers(1, 200))]
        most_bytes = max(most_bytes, _check(text, told))
    if most_bytes > LIMIT_BYTES:
        told.faults.append(f"a block took {most_bytes:,} bytes of memory")
    told.remark = f"{most_bytes / 1e6:.1f} MB for {BLOCK_ROWS:,} rows"
    return told


def _mutated(draw: np.random.Generator, row: bytes) -> bytes:
    """The row with a few bytes replaced, removed or put in, or two rows of it; it may stay good."""
    line = bytearray(row)
    for _ in range(int(draw.integers(0, 4))):
        at = int(draw.integers(0, len(line))) if line else 0
        match int(draw.integers(0, 6)):
            case 0:
                line[at : at + 1] = draw.bytes(1)
            case 1:
                del line[at : at + int(draw.integers(1, 12))]
            case 2:
                line[at:at] = PIECES[int(draw.integers(0, len(PIECES)))]
            case 3:
                line[at : at + 1] = PIECES[int(draw.integers(0, len(PIECES)))]
            case 4:
                line[at:at] = line[: int(draw.integers(0, 40))]
            case _:
                _replace_field(draw, line)
    return bytes(line)


def _replace_field(draw: np.random.Generator, line: bytearray) -> None:
    """Put something else between two tabs."""
    fields = bytes(line).split(b"\t")
    fields[int(draw.integers(0, len(fields)))] = PIECES[int(draw.integers(0, len(PIECES)))]
    line[:] = b"\t".join(fields)


def _check(text: bytes, told: Told) -> int:
    """Hold the parser against the plain reading; the bytes that it took at most."""
    *lines, cut = text.split(b"\n")
    expected = [reference(line) for line in lines]
    if cut:
        expected.append(None)
    tracemalloc.start()
    try:
        columns = parse(np.frombuffer(bytearray(text), np.uint8), len(expected))
        _, most_bytes = tracemalloc.get_traced_memory()
    except Exception as error:
        told.faults.append(f"{type(error).__name__}: {error}: {text[:500]!r}")
        return 0
    finally:
        tracemalloc.stop()
    told.tried += len(expected)
    told.accepted += len(columns.words_RD)
    good = [read for read in expected if read is not None]
    if [row.line for row in columns.bad] != [i for i, read in enumerate(expected) if read is None]:
        told.faults.append(f"other rows are refused: {text[:500]!r}")
    elif columns.words_RD.tolist() != [list(read.words) for read in good]:
        told.faults.append(f"other integers: {text[:500]!r}")
    elif columns.keys_FR.T.tolist() != [list(read.keys) for read in good]:
        told.faults.append(f"other keys: {text[:500]!r}")
    told.faults += [
        f"a reason that cannot be printed: {row.reason!r}"
        for row in columns.bad
        if not row.reason.isprintable() or len(row.reason) > MOST_REASON_CHARACTERS
    ]
    return most_bytes
