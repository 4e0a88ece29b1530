"""Rates and delays as people write them and as `tc` does: `100mbit`, `2.5gbit`, `5ms`."""

from __future__ import annotations

import re
from fractions import Fraction

LEAST_BITS_PER_SECOND = 10**6
MOST_BITS_PER_SECOND = 10**11
MOST_SECONDS = 10

_QUANTITY = re.compile(r"(\d{1,9}(?:\.\d{1,9})?)([a-z]+)")
_BITS_PER_SECOND = {"kbit": 10**3, "mbit": 10**6, "gbit": 10**9}
_SECONDS = {"us": Fraction(1, 10**6), "ms": Fraction(1, 10**3), "s": Fraction(1)}


def bits_per_second(text: str) -> int:
    """The rate that `100mbit` or `2.5gbit` means.

    Raises:
        ValueError: it is none, or below 1mbit or above 100gbit.
    """
    found = _QUANTITY.fullmatch(text)
    if found is None or found[2] not in _BITS_PER_SECOND:
        raise ValueError("must be a rate such as 100mbit or 2.5gbit")
    rate = Fraction(found[1]) * _BITS_PER_SECOND[found[2]]
    if not LEAST_BITS_PER_SECOND <= rate <= MOST_BITS_PER_SECOND:
        raise ValueError("must be a rate from 1mbit to 100gbit")
    return int(rate)


def seconds(text: str) -> float:
    """The time that `5ms`, `250us` or `1s` means.

    Raises:
        ValueError: it is none, zero or above 10 s.
    """
    found = _QUANTITY.fullmatch(text)
    if found is None or found[2] not in _SECONDS:
        raise ValueError("must be a time such as 5ms or 250us")
    time = Fraction(found[1]) * _SECONDS[found[2]]
    if not 0 < time <= MOST_SECONDS:
        raise ValueError("must be a time above 0 and up to 10s")
    return float(time)
