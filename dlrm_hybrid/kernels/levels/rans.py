"""Range asymmetric numeral systems: symbols of known chances, each in the bits that it is worth.

A format is a kernel that lists its symbols in the order of reading, as events, and a kernel that
asks for them in that order; what a symbol means may depend on all that was read before it. An event
is an interval of 4096: where it starts and how wide it is. Uniform bits are events too, and numbers
without a bound are uniform bits.

    events    flag 1 │ symbol 3 │ 5 bits │ …            listed forwards
    coded     from the last event to the first, in words of 16 bits
    payload   │ words, the last one is of the first events │ state, u32 │
    read      from the end backwards, which gives the events forwards

The state lies in [2**16, 2**32); a reader must end where the writer began, at 2**16 and the first
byte. Any bytes are safe to read: a reader that runs out of them goes on with zeros, and tells at
its end. (J. Duda, arXiv 1311.2540, 2013.)

All of it is inlined into the kernels of a format. Arrays are handed over as their addresses
(`kernels.bits.address_of`), `at` is a place in them. The chances of a context's symbols are a row
of uint16: where their intervals start, then 4096.
"""

from __future__ import annotations

import numpy as np
from numba.extending import register_jitable

from dlrm_hybrid.arrays import Bytes, Words
from dlrm_hybrid.kernels.bits import address_of, highest_bit, load16_at, store32_at

SCALE_BITS = 12
SCALE = 1 << SCALE_BITS  # of all chances
ESCAPE = 15  # the symbol of this magnitude and all above it
SYMBOLS = ESCAPE + 1  # of magnitudes
MAX_LEVEL = 2**31 - 1
EVENTS_OF_A_LEVEL = 6  # at most: symbol, length and three parts of a number, sign
EVENT_BYTES = 2  # that an event takes at most, on average
STATE_BYTES = 4
HINTS = 256  # of a context: the first symbol in each 16 of its 4096 places

_LOWEST = np.uint64(1 << 16)
_MASK = np.uint64(SCALE - 1)
_SCALE = np.uint64(SCALE)
_BITS = np.uint64(SCALE_BITS)
_WORD_BITS = np.uint64(16)
_WIDTH = np.uint64(0xFFFF)
_TWO = np.uint64(2)
_HINT_SHIFT = np.uint64(4)
_LENGTH_BITS = 5

# By width, more than 2**44 / width by at most 1. The upper bits of the product with a state below
# 2**20 * width are the quotient: the excess does not reach the next integer, nor the product 2**64.
_QUOTIENT_BITS = np.uint64(44)
RECIPROCALS = ((1 << 44) // np.arange(SCALE + 1).clip(1) + 1).astype(np.uint64)


@register_jitable
def row_of(starts: np.uint64, context: int, symbols: int) -> np.uint64:
    """Address of a context's chances in an array of those of all."""
    return starts + np.uint64(2 * (symbols + 1) * context)


@register_jitable
def list_flag(bit: bool, chance: int, events: np.uint64, at: int) -> int:
    """List a flag that is set in `chance` of 4096 cases, 1 to 4095; gives the place behind it."""
    event = chance if bit else chance << 16 | (SCALE - chance)
    store32_at(events + np.uint64(4 * at), np.uint64(event))
    return at + 1


@register_jitable
def list_symbol(symbol: int, row: np.uint64, events: np.uint64, at: int) -> int:
    """List a symbol; gives the place behind it."""
    place = row + np.uint64(2 * symbol)
    start = load16_at(place)
    width = load16_at(place + _TWO) - start
    store32_at(events + np.uint64(4 * at), start << _WORD_BITS | width)
    return at + 1


@register_jitable
def list_bits(value: int, bits: int, events: np.uint64, at: int) -> int:
    """List an integer of that many uniform bits, 12 at most; gives the place behind it."""
    width = SCALE >> bits
    store32_at(events + np.uint64(4 * at), np.uint64((value * width) << 16 | width))
    return at + 1


@register_jitable
def list_number(number: int, events: np.uint64, at: int) -> int:
    """List a number from 1 to 2**32 - 1; gives the place behind it."""
    length = highest_bit(np.uint64(number))
    at = list_bits(length, _LENGTH_BITS, events, at)
    while length > 0:
        bits = min(length, SCALE_BITS)
        length -= bits
        at = list_bits((number >> length) & ((1 << bits) - 1), bits, events, at)
    return at


@register_jitable
def list_magnitude(size: int, row: np.uint64, events: np.uint64, at: int) -> int:
    """List an integer from 0 to MAX_LEVEL; gives the place behind it."""
    at = list_symbol(min(size, ESCAPE), row, events, at)
    return at if size < ESCAPE else list_number(size - ESCAPE + 1, events, at)


@register_jitable
def list_level(level: int, row: np.uint64, events: np.uint64, at: int) -> int:
    """List an integer from -MAX_LEVEL to MAX_LEVEL; gives the place behind it."""
    at = list_magnitude(abs(level), row, events, at)
    return list_bits(np.int64(level < 0), 1, events, at) if level else at


@register_jitable
def write(events_S: Words, size: int, out: Bytes) -> int:
    """Code the first `size` events; gives the bytes written.

    Args:
        events_S: in the order of reading.
        size: how many there are.
        out: has room for EVENT_BYTES each, and STATE_BYTES.
    """
    state = _LOWEST
    at = 0
    for place in range(size - 1, -1, -1):
        event = np.uint64(events_S[place])
        start, width = event >> _WORD_BITS, event & _WIDTH
        if state >= width << np.uint64(20):
            out[at] = state & np.uint64(0xFF)
            out[at + 1] = (state >> np.uint64(8)) & np.uint64(0xFF)
            at += 2
            state >>= _WORD_BITS
        whole = state * RECIPROCALS[width] >> _QUOTIENT_BITS
        state += whole * (_SCALE - width) + start
    for byte in range(STATE_BYTES):
        out[at + byte] = (state >> np.uint64(8 * byte)) & np.uint64(0xFF)
    return at + STATE_BYTES


@register_jitable
def begin(data: Bytes) -> tuple[np.uint64, np.uint64, int]:
    """Address, state and place to read from; the place is negative where nothing can be read."""
    words, at = address_of(data), data.size - STATE_BYTES
    if at < 0:
        return words, _LOWEST, -1
    end = words + np.uint64(at)
    state = load16_at(end) | load16_at(end + _TWO) << _WORD_BITS
    return (words, state, at) if state >= _LOWEST else (words, _LOWEST, -1)


@register_jitable
def has_ended(state: np.uint64, at: int) -> bool:
    """Whether what was read is all that was written."""
    return state == _LOWEST and at == 0


@register_jitable
def _advanced(
    words: np.uint64, state: np.uint64, at: int, start: np.uint64, width: np.uint64
) -> tuple[np.uint64, int]:
    state = width * (state >> _BITS) + (state & _MASK) - start
    if state < _LOWEST:
        state <<= _WORD_BITS
        if at >= 2:
            at -= 2
            state |= load16_at(words + np.uint64(at))
        else:
            at = -1
    return state, at


@register_jitable
def read_flag(
    words: np.uint64, state: np.uint64, at: int, chance: int
) -> tuple[bool, np.uint64, int]:
    """A flag, and state and place behind it."""
    split = np.uint64(chance)
    bit = (state & _MASK) < split
    start, width = (np.uint64(0), split) if bit else (split, _SCALE - split)
    state, at = _advanced(words, state, at, start, width)
    return bit, state, at


@register_jitable
def read_symbol(
    words: np.uint64, state: np.uint64, at: int, row: np.uint64, symbol: int = 0
) -> tuple[int, np.uint64, int]:
    """A symbol, and state and place behind it; the search begins at one that is not behind it."""
    slot = state & _MASK
    start = load16_at(row + np.uint64(2 * symbol))
    end = load16_at(row + np.uint64(2 * symbol + 2))
    while end <= slot:
        symbol += 1
        start, end = end, load16_at(row + np.uint64(2 * symbol + 2))
    state, at = _advanced(words, state, at, start, end - start)
    return symbol, state, at


@register_jitable
def hint_of(hints: np.uint64, context: int) -> np.uint64:
    """Address of a context's hints in an array of those of all."""
    return hints + np.uint64(2 * HINTS * context)


@register_jitable
def read_hinted(
    words: np.uint64, state: np.uint64, at: int, row: np.uint64, hint: np.uint64
) -> tuple[int, np.uint64, int]:
    """As `read_symbol`, from the first symbol on that is possible."""
    place = (state & _MASK) >> _HINT_SHIFT
    return read_symbol(words, state, at, row, np.int64(load16_at(hint + place + place)))


@register_jitable
def read_bits(words: np.uint64, state: np.uint64, at: int, bits: int) -> tuple[int, np.uint64, int]:
    """An integer of that many uniform bits, and state and place behind it."""
    shift = np.uint64(SCALE_BITS - bits)
    value = (state & _MASK) >> shift
    state, at = _advanced(words, state, at, value << shift, np.uint64(1) << shift)
    return np.int64(value), state, at


@register_jitable
def read_number(words: np.uint64, state: np.uint64, at: int) -> tuple[int, np.uint64, int]:
    """A number from 1 to 2**32 - 1, and state and place behind it."""
    length, state, at = read_bits(words, state, at, _LENGTH_BITS)
    number = 1
    while length > 0:
        bits = min(length, SCALE_BITS)
        length -= bits
        low, state, at = read_bits(words, state, at, bits)
        number = number << bits | low
    return number, state, at


@register_jitable
def read_magnitude(
    words: np.uint64, state: np.uint64, at: int, row: np.uint64
) -> tuple[int, np.uint64, int]:
    """An integer from 0 on, and state and place behind it."""
    size, state, at = read_symbol(words, state, at, row)
    if size == ESCAPE:
        number, state, at = read_number(words, state, at)
        size = ESCAPE + number - 1
    return size, state, at


@register_jitable
def read_level(
    words: np.uint64, state: np.uint64, at: int, row: np.uint64
) -> tuple[int, np.uint64, int]:
    """An integer of any sign, and state and place behind it."""
    level, state, at = read_magnitude(words, state, at, row)
    if level:
        is_negative, state, at = read_bits(words, state, at, 1)
        level = -level if is_negative else level
    return level, state, at
