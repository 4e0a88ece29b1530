"""Criteo text to numbers, one pass over the bytes.

The kernel only tells good rows from bad ones; `data.parser.read_row` says why a row is bad.

Shapes: N bytes, L lines, D = 14 words (label, 13 integers), F = 26 categorical features.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from dlrm_hybrid.kernels.jit import kernel

Bytes = npt.NDArray[np.uint8]
Float32s = npt.NDArray[np.float32]

_TAB, _NEWLINE, _RETURN, _MINUS, _ZERO, _ONE, _NINE = 9, 10, 13, 45, 48, 49, 57
_MAX_DIGITS = 10
_MAX_INT32 = 2**31 - 1
_HEX = np.array(
    [int(chr(byte), 16) if chr(byte) in "0123456789abcdefABCDEF" else 255 for byte in range(256)],
    np.uint8,
)


@kernel
def count_lines(text_N: Bytes) -> tuple[int, int]:
    """How many newlines `text_N` holds, and the offset behind the last one (0 without any)."""
    lines = 0
    for byte in text_N:
        lines += byte == _NEWLINE
    end = text_N.size
    while end > 0 and text_N[end - 1] != _NEWLINE:
        end -= 1
    return lines, end


@kernel
def fill_log_table(table: Float32s) -> None:
    """Set table[x] to log(x + 1), computed in float64, rounded to float32."""
    for x in range(table.size):
        table[x] = math.log(x + 1.0)


@kernel
def _integers(text_N: Bytes, at: int, log_table: Float32s, words_D: Float32s) -> int:
    """Read 13 integers and the tab after each; the offset behind them, or -1 for a bad row."""
    for column in range(1, 14):
        negative = text_N[at] == _MINUS
        if negative:
            at += 1
        first = at
        value = 0
        while at - first <= _MAX_DIGITS and _ZERO <= text_N[at] <= _NINE:
            value = value * 10 + (text_N[at] - _ZERO)
            at += 1
        digits = at - first
        if text_N[at] != _TAB or digits > _MAX_DIGITS or (negative and digits == 0):
            return -1
        if value > _MAX_INT32 + negative:
            return -1
        at += 1
        if negative:
            words_D[column] = 0.0
        elif value < log_table.size:
            words_D[column] = log_table[value]
        else:
            words_D[column] = math.log(value + 1.0)
    return at


@kernel
def _categories(
    text_N: Bytes, at: int, keys_FL: npt.NDArray[np.uint32], row: int
) -> tuple[int, int]:
    """Read 26 keys up to the end of the line: (offset behind it or -1, fields with key 0)."""
    zeros = 0
    for column in range(26):
        byte = text_N[at]
        if byte in (_TAB, _NEWLINE, _RETURN):
            keys_FL[column, row] = 0
        else:
            if at + 8 >= text_N.size:
                return -1, 0
            key = 0
            seen = 0
            for offset in range(8):
                digit = _HEX[text_N[at + offset]]
                seen |= digit
                key = key << 4 | digit
            if seen > 15:
                return -1, 0
            at += 8
            zeros += key == 0
            keys_FL[column, row] = key
        if column < 25:
            if text_N[at] != _TAB:
                return -1, 0
            at += 1
    if text_N[at] == _RETURN:
        at += 1
    if text_N[at] != _NEWLINE:
        return -1, 0
    return at + 1, zeros


@kernel
def parse_rows(
    text_N: Bytes,
    log_table: Float32s,
    words_LD: Float32s,
    keys_FL: npt.NDArray[np.uint32],
    bad_L3: npt.NDArray[np.int64],
) -> tuple[int, int, int]:
    """Parse whole lines; good rows are packed at the front of the outputs.

    The last byte must be a newline: no field swallows one, so no read passes the end. The outputs
    must have room for as many rows as there are newlines.

    Returns:
        good rows, bad rows (each described in bad_L3 as offset, end offset, line from 0), fields
        of good rows that hold the key 0 in digits.
    """
    at = 0
    rows = 0
    bad = 0
    zero_keys = 0
    while at < text_N.size:
        start = at
        zeros = 0
        at = -1
        label = text_N[start]
        # A row shorter than two bytes is a lone newline, so start + 1 is read only inside the text.
        if label in (_ZERO, _ONE) and text_N[start + 1] == _TAB:
            words_LD[rows, 0] = label - _ZERO
            at = _integers(text_N, start + 2, log_table, words_LD[rows])
        if at >= 0:
            at, zeros = _categories(text_N, at, keys_FL, rows)
        if at >= 0:
            rows += 1
            zero_keys += zeros
        else:
            at = start
            while text_N[at] != _NEWLINE:
                at += 1
            at += 1
            bad_L3[bad, 0] = start
            bad_L3[bad, 1] = at
            bad_L3[bad, 2] = rows + bad
            bad += 1
    return rows, bad, zero_keys
