"""Delimited text (CSV, TSV) to rows: where each ends, how many values it has, which are no rows.

A value that begins with the quote ends at the next one; two of them stand for one, and delimiters
and line ends between them are text. A quote that is not the first byte of a value is text. Line
ends are `\\n`, `\\r` and `\\r\\n`; empty lines are no rows.

Shapes: N bytes of text, H of the header, K rows that are set aside with 4 numbers each.
"""

from __future__ import annotations

import numpy as np

from dlrm_hybrid.arrays import Int64s
from dlrm_hybrid.kernels.jit import ReadOnlyBytes, kernel

_NEWLINE, _RETURN = 10, 13
NO_QUOTE = -1
HEADER_AGAIN = -1
OPEN, TORN = 1, 2


@kernel
def _line_end(text_N: ReadOnlyBytes, at: int, is_end: bool) -> int:
    """The offset behind the line end at `at`; `at` itself if what follows decides."""
    if text_N[at] == _RETURN:
        if at + 1 == text_N.size:
            return at + is_end
        return at + 1 + (text_N[at + 1] == _NEWLINE)
    return at + 1


@kernel
def _quoted(
    text_N: ReadOnlyBytes, at: int, delimiter: int, quote: int, columns: int, is_end: bool
) -> tuple[int, int, int]:
    """Read a value from behind its first quote on.

    Returns:
        the offset behind its last quote, -1 where it has none; line ends in it; lines between
        them with as many delimiters as a row has.
    """
    lines = alike = delimiters = 0
    while at < text_N.size:
        byte = text_N[at]
        at += 1
        if byte == quote:
            if at == text_N.size:
                return (at if is_end else -1), lines, alike
            if text_N[at] != quote:
                return at, lines, alike
            at += 1
        elif byte == delimiter:
            delimiters += 1
        elif byte == _NEWLINE or (byte == _RETURN and at < text_N.size and text_N[at] != _NEWLINE):
            alike += lines > 0 and delimiters == columns - 1
            lines += 1
            delimiters = 0
    return -1, lines, alike


@kernel
def _plain(text_N: ReadOnlyBytes, at: int, delimiter: int, quote: int) -> tuple[int, int]:
    """The offset of the next line end or quote, or of the end, and delimiters before it."""
    # One branch a byte that is seldom taken, and no sign of an index to look at: most bytes of a
    # text end here.
    place, size, one = np.uint64(at), np.uint64(text_N.size), np.uint64(1)
    newline, back = np.uint8(_NEWLINE), np.uint8(_RETURN)
    dividing, quoting = np.uint8(delimiter), np.uint8(_NEWLINE if quote == NO_QUOTE else quote)
    delimiters = 0
    while place < size:
        byte = text_N[place]
        if (byte == newline) | (byte == back) | (byte == quoting):
            break
        delimiters += byte == dividing
        place += one
    return np.int64(place), delimiters


@kernel
def _unquoted(text_N: ReadOnlyBytes, at: int, delimiter: int) -> int:
    """The offset behind what follows a last quote, where quotes are text."""
    while at < text_N.size and text_N[at] not in (delimiter, _NEWLINE, _RETURN):
        at += 1
    return at


@kernel
def _is_header(text_N: ReadOnlyBytes, start: int, end: int, header_H: ReadOnlyBytes) -> bool:
    while end > start and text_N[end - 1] in (_NEWLINE, _RETURN):
        end -= 1
    if header_H.size == 0 or end - start != header_H.size:
        return False
    same = 0
    while same < header_H.size and text_N[start + same] == header_H[same]:
        same += 1
    return same == header_H.size


@kernel
def _row(
    text_N: ReadOnlyBytes, at: int, delimiter: int, quote: int, columns: int, is_end: bool
) -> tuple[int, int, int, int]:
    """Read a row of delimited text into its cells.

    Returns:
        the offset behind its line end, -1 where it is not whole; its values so far; what is wrong
        with the last of them (`OPEN`, `TORN` or 0); lines in its values that look like rows.
    """
    values, alike, start = 1, 0, at
    while at < text_N.size:
        at, count = _plain(text_N, at, delimiter, quote)
        values += count
        if at == text_N.size:
            break
        if text_N[at] != quote:
            end = _line_end(text_N, at, is_end)
            return (end if end > at else -1), values, 0, alike
        if at > start and text_N[at - 1] != delimiter:
            at += 1
        else:
            at, lines, similar = _quoted(text_N, at + 1, delimiter, quote, columns, is_end)
            alike += similar
            if at < 0:
                return -1, values, OPEN, alike
            if lines > 0 and at < text_N.size:
                after = text_N[at]
                if after not in (delimiter, _NEWLINE, _RETURN):
                    return -1, values, TORN, alike
            at = _unquoted(text_N, at, delimiter)
    return (at if is_end else -1), values, 0, alike


@kernel
def split_rows(
    text_N: ReadOnlyBytes,
    header_H: ReadOnlyBytes,
    delimiter: int,
    quote: int,
    columns: int,
    most_rows: int,
    is_end: bool,
    odd_K4: Int64s,
) -> tuple[int, int, int, int, int, int, int]:
    """Find the whole rows of a text that begins with one.

    Args:
        text_N: the text.
        header_H: the header without its line end: a row of the same bytes is set aside.
        delimiter: between values, a byte.
        quote: around values, a byte, or `NO_QUOTE`.
        columns: values that a row has.
        most_rows: after which to stop.
        is_end: whether nothing follows this text.
        odd_K4: gets of each row set aside where it begins and ends, its number of values
            (`HEADER_AGAIN` for the header), and how many rows come before it. Reading stops when
            it is full.

    Returns:
        rows, those set aside among them; the offset behind them; how many were set aside; what is
        wrong with the next row (`OPEN`, `TORN` or 0), and with which of its values, from 0; most
        lines in the values of one row that look like rows themselves, and how many rows come
        before that one.
    """
    at = rows = odd = alike = alike_row = 0
    fault = value = 0
    while at < text_N.size and rows < most_rows and odd < odd_K4.shape[0]:
        if text_N[at] in (_NEWLINE, _RETURN):
            end = _line_end(text_N, at, is_end)
            if end == at:
                break
            at = end
            continue
        end, values, fault, similar = _row(text_N, at, delimiter, quote, columns, is_end)
        if end < 0:
            value = values - 1
            break
        if similar > alike:
            alike, alike_row = similar, rows
        again = values == columns and _is_header(text_N, at, end, header_H)
        if again or values != columns:
            odd_K4[odd, 0] = at
            odd_K4[odd, 1] = end
            odd_K4[odd, 2] = HEADER_AGAIN if again else values
            odd_K4[odd, 3] = rows
            odd += 1
        rows += 1
        at = end
    return rows, at, odd, fault, value, alike, alike_row
