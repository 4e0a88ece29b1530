"""Categories to numbers in order of first appearance: an open-addressing table.

A slot is `key << 32 | number + 1`, empty is 0: one cache line tells key and number. Linear probing
from a 32-bit mix (MurmurHash3's finaliser, a bijection) of the key.

Shapes: N keys, S slots (a power of two), V numbers in use.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from dlrm_hybrid.kernels.jit import kernel

Keys = npt.NDArray[np.uint32]
Slots = npt.NDArray[np.uint64]

_LOW = np.uint64(0xFFFFFFFF)
_ONE = np.uint64(1)
_EMPTY = np.uint64(0)
_KEY_SHIFT = np.uint64(32)
_MIX_1, _MIX_2 = np.uint64(0x85EBCA6B), np.uint64(0xC2B2AE35)
_SHIFT_1, _SHIFT_2 = np.uint64(16), np.uint64(13)
# Tables beyond the cache are touched ahead in groups, so that the misses overlap.
_TOUCH_FROM_SLOTS = 1 << 16
_GROUP = 256


@kernel
def _home(key: np.uint64, mask: np.uint64) -> np.uint64:
    key ^= key >> _SHIFT_1
    key = key * _MIX_1 & _LOW
    key ^= key >> _SHIFT_2
    key = key * _MIX_2 & _LOW
    key ^= key >> _SHIFT_1
    return key & mask


@kernel
def _touch(keys_N: Keys, slots_S: Slots) -> np.uint64:
    mask = np.uint64(slots_S.size - 1)
    touched = _EMPTY
    for key in keys_N:
        touched ^= slots_S[_home(np.uint64(key), mask)]
    return touched


@kernel
def insert(
    keys_N: Keys, slots_S: Slots, used: int, limit: int, first_id: int
) -> tuple[int, int, np.uint64]:
    """Replace keys by `first_id` + number, giving new keys the next number.

    Returns:
        keys replaced (fewer than N when a new key came with `limit` numbers in use), numbers in
        use, and a value without meaning that keeps the touching loads alive.
    """
    mask = np.uint64(slots_S.size - 1)
    touched = _EMPTY
    offset = np.uint64(first_id) - _ONE
    for i in range(keys_N.size):
        if i % _GROUP == 0 and slots_S.size >= _TOUCH_FROM_SLOTS:
            touched ^= _touch(keys_N[i : i + _GROUP], slots_S)
        key = np.uint64(keys_N[i])
        at = _home(key, mask)
        while True:
            slot = slots_S[at]
            if slot == _EMPTY:
                if used == limit:
                    return i, used, touched
                used += 1
                slot = key << _KEY_SHIFT | np.uint64(used)
                slots_S[at] = slot
            if slot >> _KEY_SHIFT == key:
                keys_N[i] = (slot & _LOW) + offset
                break
            at = at + _ONE & mask
    return keys_N.size, used, touched


@kernel
def lookup(keys_N: Keys, slots_S: Slots) -> np.uint64:
    """Replace keys by 1 + their number, unknown ones by 0; returns a value without meaning."""
    mask = np.uint64(slots_S.size - 1)
    touched = _EMPTY
    for i in range(keys_N.size):
        if i % _GROUP == 0 and slots_S.size >= _TOUCH_FROM_SLOTS:
            touched ^= _touch(keys_N[i : i + _GROUP], slots_S)
        key = np.uint64(keys_N[i])
        at = _home(key, mask)
        while slots_S[at] != _EMPTY and slots_S[at] >> _KEY_SHIFT != key:
            at = at + _ONE & mask
        keys_N[i] = slots_S[at] & _LOW
    return touched


@kernel
def rehash(old_S: Slots, new_S: Slots) -> None:
    """Move all entries of `old_S` into the empty, larger `new_S`."""
    mask = np.uint64(new_S.size - 1)
    for slot in old_S:
        if slot != _EMPTY:
            at = _home(slot >> _KEY_SHIFT, mask)
            while new_S[at] != _EMPTY:
                at = at + _ONE & mask
            new_S[at] = slot


@kernel
def keys_by_number(slots_S: Slots, keys_V: Keys) -> None:
    """Write every key of the table at its number."""
    for slot in slots_S:
        if slot != _EMPTY:
            keys_V[(slot & _LOW) - _ONE] = slot >> _KEY_SHIFT


@kernel
def count(ids_N: Keys, counts_V: Keys, first_id: int) -> None:
    """Add one to counts_V[id - first_id] for every id."""
    for number in ids_N:
        counts_V[number - first_id] += np.uint32(1)
