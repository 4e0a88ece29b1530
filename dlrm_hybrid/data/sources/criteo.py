"""First stage of preparing Criteo's text: raw files to arrays and spilled keys.

Each byte is read and parsed once. A row has 40 fields between tabs, no header: label, 13 integers
I1–I13, 26 categoricals C1–C26 of eight hexadecimal digits; an empty field is a missing value. The
calling thread reads, decompresses and writes; others parse. A kernel decides whether a row is good;
`fault`, a slow and obvious parser of one line, explains what the kernel refused, and it is a bug if
the two disagree.

Shapes: R rows, L lines, I = 13 integers, F = 26 categorical features.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import xxhash

from dlrm_hybrid.arrays import Bytes, Float32s, Words
from dlrm_hybrid.data.arrays import ArrayWriter
from dlrm_hybrid.data.sources import text as reader
from dlrm_hybrid.data.sources.cells import shown
from dlrm_hybrid.data.sources.raw import PrepareJob
from dlrm_hybrid.kernels.criteo import (
    NUM_CATEGORICAL,
    NUM_DENSE,
    count_lines,
    fill_log_table,
    parse_rows,
)
from dlrm_hybrid.threads import Report
from dlrm_hybrid.types import DlrmError

NUM_COLUMNS = 1 + NUM_DENSE + NUM_CATEGORICAL
_WINDOW_PER_THREAD = 3
_LOG_TABLE_SIZE = 1 << 14
_INTEGER = re.compile(rb"-?[0-9]+")
_MAX_DIGITS = 10
_KEY = re.compile(rb"[0-9a-fA-F]{8}")


@dataclass(frozen=True, slots=True)
class BadLine:
    """A line of raw text that `prepare` refuses.

    Attributes:
        line: number within its block, from 0.
        column: number of the field at fault, from 1.
        reason: what is wrong, with the value escaped and shortened, in one printable line.
        raw: the line without its newline.
    """

    line: int
    column: int
    reason: str
    raw: bytes


@dataclass(frozen=True, slots=True)
class ParsedRows:
    """The good rows of a block, and its bad lines.

    Attributes:
        label_R: float32, 0 or 1.
        dense_RI: float32, log(x + 1) of the integers.
        keys_FR: uint32, each column contiguous.
        bad: the first bad lines in order, as many as were asked for.
        zero_keys: number of fields that hold 00000000.
    """

    label_R: Float32s
    dense_RI: Float32s
    keys_FR: Words
    bad: tuple[BadLine, ...]
    zero_keys: int


def column_name(column: int) -> str:
    """`label`, `I1` … `I13`, `C1` … `C26` for columns 1 … 40; empty after them."""
    if column == 1:
        return "label"
    if column <= 1 + NUM_DENSE:
        return f"I{column - 1}"
    return f"C{column - 1 - NUM_DENSE}" if column <= NUM_COLUMNS else ""


def fault(line: bytes) -> tuple[int, str] | None:
    r"""The first fault of a line with its `\n` or `\r\n`: the field, from 1, and what is wrong."""
    if not line.endswith(b"\n"):
        return line.count(b"\t") + 1, f"the file ends inside this line: {shown(line)}"
    line = line[:-1].removesuffix(b"\r")
    fields = line.split(b"\t")
    for column, field in enumerate(fields, 1):
        if b"\0" in field:
            return column, f"NUL byte in {shown(field)}"
        try:
            field.decode()
        except UnicodeDecodeError:
            return column, f"not UTF-8: {shown(field)}"
    if len(fields) != NUM_COLUMNS:
        reason = f"{len(fields)} columns instead of {NUM_COLUMNS} in {shown(line)}"
        if len(fields) == NUM_COLUMNS - 1:
            reason += " (rows of Criteo's test.txt have no label and cannot be used; use train.txt)"
        return min(len(fields), NUM_COLUMNS + 1), reason
    if fields[0] not in (b"0", b"1"):
        return 1, f"label {shown(fields[0])} is neither 0 nor 1"
    for column, field in enumerate(fields[1:], 2):
        reason = _integer_fault(field) if column <= 1 + NUM_DENSE else _key_fault(field)
        if field and reason:
            return column, f"{shown(field)} {reason}"
    return None


def _integer_fault(field: bytes) -> str | None:
    if not _INTEGER.fullmatch(field):
        return "is not an integer"
    is_long = len(field.lstrip(b"-")) > _MAX_DIGITS or not -(2**31) <= int(field) < 2**31
    return "is outside 32 bits" if is_long else None


def _key_fault(field: bytes) -> str | None:
    return None if _KEY.fullmatch(field) else "is not eight hexadecimal digits"


def _explain(line: bytes, number: int) -> BadLine:
    if (first := fault(line)) is None:
        raise DlrmError(f"internal error: the parser refused a good row: {shown(line)}")
    return BadLine(number, *first, line.removesuffix(b"\n"))


@functools.cache
def _log_table() -> Float32s:
    table = np.empty(_LOG_TABLE_SIZE, np.float32)
    fill_log_table(table)
    return table


def parse(text: Bytes, max_bad_rows: int) -> ParsedRows:
    """Parse a block of lines; a last line without newline is a bad row.

    Args:
        text: uint8, contiguous and writable, so that one compiled kernel serves all callers.
        max_bad_rows: number of bad rows to explain; more are only left out.
    """
    lines, end = count_lines(text)
    label_L = np.empty(lines, np.float32)
    dense_LI = np.empty((lines, NUM_DENSE), np.float32)
    keys_FL = np.empty((NUM_CATEGORICAL, lines), np.uint32)
    bad_L3 = np.empty((lines, 3), np.int64)
    rows, num_bad, zero_keys = parse_rows(
        text[:end], _log_table(), label_L, dense_LI, keys_FL, bad_L3
    )
    bad = [
        _explain(text[start:end].tobytes(), line)
        for start, end, line in bad_L3[: min(num_bad, max_bad_rows)].tolist()
    ]
    if end < text.size:
        bad.append(_explain(text[end:].tobytes(), lines))
    faults = tuple(bad[:max_bad_rows])
    return ParsedRows(label_L[:rows], dense_LI[:rows], keys_FL[:, :rows], faults, zero_keys)


def ingest(
    job: PrepareJob, label: ArrayWriter, dense: ArrayWriter, spilled: Sequence[Path]
) -> tuple[list[str], int]:
    """Read and parse all raw files.

    Args:
        spilled: file of each categorical column, which gets its keys.

    Returns:
        xxh3 of each file, and the number of fields with the key 0.

    Raises:
        DataError: a file is damaged or a bad row is not allowed; always the first in file order.
    """
    policy = job.counts.policy
    most_bad_rows = 1 if policy.stop else policy.max_rows + 1
    digests = [xxhash.xxh3_128() for _ in job.raw]

    def parse_block(block: reader.Lines, _: Report) -> tuple[reader.Lines, ParsedRows]:
        return replace(block, text=block.text[:0].copy()), parse(block.text, most_bad_rows)

    zero_keys = 0
    blocks = reader.blocks(job.raw, job.options.block_bytes, digests)
    window = _WINDOW_PER_THREAD * job.threads.count
    job.progress("parse", 0, job.num_bytes)
    with ExitStack() as stack:
        key_files = [stack.enter_context(path.open("wb")) for path in spilled]
        for block, columns in job.threads.run(parse_block, blocks, _ignore, window=window):
            for bad in columns.bad:
                where = _where(job.raw[block.file], block.first_line + bad.line, bad)
                job.counts.set_aside(block.file, where, bad.raw)
            label.append(columns.label_R)
            dense.append(columns.dense_RI)
            for file, keys_R in zip(key_files, columns.keys_FR, strict=True):
                file.write(keys_R.data)
            job.counts.keep(block.file, len(columns.label_R))
            zero_keys += columns.zero_keys
            job.progress("parse", block.raw_bytes, job.num_bytes)
    job.progress("parse", job.num_bytes, job.num_bytes)
    job.check_unchanged()
    return [digest.hexdigest() for digest in digests], zero_keys


def _where(path: Path, line: int, bad: BadLine) -> str:
    """Position and fault, `:<line>:<column>: <name>: <reason>`, for a message after the path."""
    if len(bad.raw) > reader.MAX_LINE_BYTES:
        raise reader.long_line(path, line)
    name = column_name(bad.column)
    return f":{line}:{bad.column}: {name}{': ' if name else ''}{bad.reason}"


def _ignore(rows: int) -> None:
    """Ignore reports: `ingest` reports the progress of whole blocks."""
