"""Synthetic rows by counter-based hashing: integers only, so every machine writes the same bytes.

A row is a pure function of (key, row number). Draw i of a row is `mix64(row_key + i * GAMMA)`, the
finaliser of SplitMix64 (Steele, Lea, Flood, OOPSLA 2014). The upper half of a draw picks the step
of the column's staircase, the lower half the value inside the step.

numba turns uint64 with int64 into float64: every operand of a hash is cast to uint64.

Shapes: C = 39 columns (integers first), F = 26 categoricals, S steps, G = 1024 guide entries,
P pairs, L logits.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from dlrm_hybrid.arrays import Bytes, Int32s, Int64s, UInt64s
from dlrm_hybrid.kernels.bits import GAMMA, mix64
from dlrm_hybrid.kernels.jit import kernel

MAX_ROW_BYTES = 2 + 13 * 12 + 26 * 9
GUIDE_ENTRIES = 1024
MISSING = -(1 << 40)

NUM_DENSE = 13
NUM_COLUMNS = 39
GAMMA_TEACHER = np.uint64(0xD1342543DE82EF95)
LOW_HALF = np.uint64(0xFFFFFFFF)
LOGIT_SHIFT = 14  # from 2**-20 to 1/64
MAX_LOG2 = 32


class Tables(NamedTuple):
    """The profile as the kernels read it.

    Attributes:
        start_CS: first value of each step, one more entry for the stop, then padding.
        below_CS: weight below each step, one more entry of 2**32, then padding.
        guide_CG: the step that holds the guide entry's first draw.
        missing_C: weight of an empty field.
        missing_with_C: column whose draw decides about the empty field.
        odd_F: odd multipliers that keep the categories of two columns apart.
        pair_P2: categorical columns that interact.
        gains: bias, dense gain, categorical gain, interaction gain, head ranks.
        salt: key of the teacher's effects, one entry.
        logistic_L: weight of a click per logit.
    """

    start_CS: Int64s
    below_CS: UInt64s
    guide_CG: Int32s
    missing_C: UInt64s
    missing_with_C: Int64s
    odd_F: UInt64s
    pair_P2: Int64s
    gains: Int64s
    salt: UInt64s
    logistic_L: UInt64s


@kernel
def category(rank: int, odd: np.uint64) -> np.uint64:
    """The 32-bit value of a rank: bijective (odd multiplier, murmur3 finaliser), never 0."""
    x = (np.uint64(rank + 1) * odd) & LOW_HALF
    x = ((x ^ (x >> np.uint64(16))) * np.uint64(0x85EBCA6B)) & LOW_HALF
    x = ((x ^ (x >> np.uint64(13))) * np.uint64(0xC2B2AE35)) & LOW_HALF
    return x ^ (x >> np.uint64(16))


@kernel
def draw_row(row: int, key: np.uint64, tables: Tables, value_C: Int64s) -> np.uint64:
    """Fill `value_C` with values, ranks and MISSING; returns the key of the row."""
    row_key = mix64(key + np.uint64(row) * GAMMA)
    for column in range(NUM_COLUMNS):
        group = tables.missing_with_C[column]
        missing_draw = mix64(row_key + np.uint64(1 + NUM_COLUMNS + group) * GAMMA) >> np.uint64(32)
        if missing_draw < tables.missing_C[column]:
            value_C[column] = MISSING
            continue
        draw = mix64(row_key + np.uint64(1 + column) * GAMMA)
        position = draw >> np.uint64(32)
        step = np.int64(tables.guide_CG[column, np.int64(position >> np.uint64(22))])
        while tables.below_CS[column, step + 1] <= position:
            step += 1
        start = tables.start_CS[column, step]
        width = np.uint64(tables.start_CS[column, step + 1] - start)
        value_C[column] = start + np.int64(((draw & LOW_HALF) * width) >> np.uint64(32))
    return row_key


@kernel
def spread(bits: np.uint64) -> int:
    """Sum of four bytes, centred: about normal, standard deviation 148."""
    total = np.int64(0)
    for _ in range(4):
        total += np.int64(bits & np.uint64(255))
        bits >>= np.uint64(8)
    return total - 510


@kernel
def dense_effect(column: int, value: int, salt: np.uint64) -> int:
    """Effect of an integer: a bent line over log2(x + 1); missing and negative count as 0.

    They count as 0 because the prepared data cannot tell them apart.
    """
    x = max(value, 0) + 1
    level = 0
    while (x >> (level + 1)) != 0:
        level += 1
    fraction = ((x << 8) >> level) - 256  # position between two powers of two, of 256
    base = salt + np.uint64(column * (MAX_LOG2 + 2)) * GAMMA_TEACHER
    slope = spread(mix64(base))
    low = spread(mix64(base + np.uint64(1 + level) * GAMMA_TEACHER))
    high = spread(mix64(base + np.uint64(2 + level) * GAMMA_TEACHER))
    line = slope * (level * 256 + fraction) // 768
    return line + (low * (256 - fraction) + high * fraction) // 768


@kernel
def logit(value_C: Int64s, hash_F: UInt64s, tables: Tables) -> int:
    """The teacher's logit of a row in 2**-20, from the drawn values; `hash_F` is scratch.

    A categorical's hash gives its effect (lower half) and its latent vector (four bytes of the
    upper half). Ranks beyond the head have no latent vector.
    """
    salt = tables.salt[0]
    dense = np.int64(0)
    for column in range(NUM_DENSE):
        dense += dense_effect(column, value_C[column], salt)
    single = np.int64(0)
    head_ranks = tables.gains[4]
    for column in range(NUM_COLUMNS - NUM_DENSE):
        rank = value_C[NUM_DENSE + column]
        level = 0 if rank == MISSING else min(rank, head_ranks) + 1
        bits = mix64(salt ^ (np.uint64((column + 1) << 32) + np.uint64(level)) * GAMMA_TEACHER)
        single += spread(bits)
        hash_F[column] = bits if level <= head_ranks else np.uint64(0x8080808000000000)
    product = np.int64(0)
    for pair in range(tables.pair_P2.shape[0]):
        a = hash_F[tables.pair_P2[pair, 0]]
        b = hash_F[tables.pair_P2[pair, 1]]
        for byte in range(32, 64, 8):
            left = np.int64((a >> np.uint64(byte)) & np.uint64(255)) - 128
            right = np.int64((b >> np.uint64(byte)) & np.uint64(255)) - 128
            product += left * right
    gains = tables.gains
    return gains[0] + gains[1] * dense + gains[2] * single + gains[3] * product


@kernel
def logistic_index(fixed_logit: int, entries: int) -> int:
    """Row of the logistic table for a logit in 2**-20, clipped at its ends."""
    index = ((fixed_logit + (1 << (LOGIT_SHIFT - 1))) >> LOGIT_SHIFT) + entries // 2
    return min(max(index, 0), entries - 1)


@kernel
def write_integer(value: int, out: Bytes, at: int) -> int:
    """Write `value` in decimal at `at`; returns the position behind it."""
    if value < 0:
        out[at] = 45
        at += 1
        value = -value
    digits = 1
    bound = 10
    while value >= bound:
        digits += 1
        bound *= 10
    for place in range(at + digits - 1, at - 1, -1):
        out[place] = 48 + value % 10
        value //= 10
    return at + digits


@kernel
def write_hex(value: np.uint64, out: Bytes, at: int) -> int:
    """Write eight lower-case hexadecimal digits at `at`; returns the position behind them."""
    for place in range(8):
        digit = np.int64((value >> np.uint64(28 - 4 * place)) & np.uint64(15))
        out[at + place] = 48 + digit + (39 if digit > 9 else 0)
    return at + 8


@kernel
def encode_rows(first: int, rows: int, key: np.uint64, tables: Tables, out: Bytes) -> int:
    """Write rows `first` … `first + rows` as text; `out` holds rows * MAX_ROW_BYTES.

    Returns the bytes written.
    """
    value_C = np.empty(NUM_COLUMNS, np.int64)
    hash_F = np.empty(NUM_COLUMNS - NUM_DENSE, np.uint64)
    entries = tables.logistic_L.shape[0]
    at = 0
    for row in range(first, first + rows):
        row_key = draw_row(row, key, tables, value_C)
        index = logistic_index(logit(value_C, hash_F, tables), entries)
        click = (mix64(row_key) >> np.uint64(32)) < tables.logistic_L[index]
        out[at] = 49 if click else 48
        at += 1
        for column in range(NUM_COLUMNS):
            out[at] = 9
            at += 1
            value = value_C[column]
            if value == MISSING:
                continue
            if column < NUM_DENSE:
                at = write_integer(value, out, at)
            else:
                at = write_hex(category(value, tables.odd_F[column - NUM_DENSE]), out, at)
        out[at] = 10
        at += 1
    return at


@kernel
def score_rows(first: int, key: np.uint64, tables: Tables, logit_R: Int64s, click_R: Bytes) -> None:
    """The teacher's logit in 2**-20 and the label of row `first` and those that follow."""
    value_C = np.empty(NUM_COLUMNS, np.int64)
    hash_F = np.empty(NUM_COLUMNS - NUM_DENSE, np.uint64)
    entries = tables.logistic_L.shape[0]
    for row in range(logit_R.shape[0]):
        row_key = draw_row(first + row, key, tables, value_C)
        logit_R[row] = logit(value_C, hash_F, tables)
        index = logistic_index(logit_R[row], entries)
        click_R[row] = (mix64(row_key) >> np.uint64(32)) < tables.logistic_L[index]
