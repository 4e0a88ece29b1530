"""Times as logs have them, ISO 8601 or numbers since 1970, as whole numbers that compare.

Without a zone a time is in UTC. Numbers are seconds, milli-, micro- or nanoseconds by their size.
"""

from __future__ import annotations

import datetime
import math
import re
from decimal import Decimal

from dlrm_hybrid.data.sources.cells import NUMBER

FORM = "a time as 2024-03-01 12:00:00, 2024-03-01T12:00:00.5+02:00 or seconds since 1970"
_EPOCH = datetime.date(1970, 1, 1).toordinal()
_ISO = re.compile(
    r"([0-9]{4})-([0-9]{2})-([0-9]{2})"
    r"(?:[T ]([0-9]{2})(?::?([0-9]{2})(?::?([0-9]{2})(?:[.,]([0-9]+))?)?)?"
    r" ?(Z|UTC|[+-][0-9]{2}(?::?[0-9]{2})?)?)?",
    re.IGNORECASE,
)
_NUMBER = re.compile(NUMBER, re.ASCII)
# Smaller numbers might be days, or dates as 20240301; 1e8 seconds are March of 1973.
_SMALLEST = 10**8
# Below a size numbers are seconds, milli- or microseconds, with so many digits to nanoseconds.
_UNITS = ((10**11, 9), (10**14, 6), (10**17, 3))


def instant(text: str) -> int | None:
    """Microseconds since 1970 of a time, the rest cut off; None for what is no time."""
    found = nanoseconds(text)
    return None if found is None else found // 1000


def nanoseconds(text: str) -> int | None:
    """Nanoseconds since 1970 of a time, the rest cut off; None for what is no time."""
    text = text.strip()
    found = _ISO.fullmatch(text)
    if found is None:
        return _since_epoch(text) if _NUMBER.fullmatch(text) else None
    year, month, day, hour, minute, second = (int(part or 0) for part in found.groups()[:6])
    is_midnight = hour == 24 and not minute and not second and not int(found[7] or 0)
    offset = _offset(found[8] or "Z")
    if (hour > 23 and not is_midnight) or minute > 59 or second > 59 or offset is None:
        return None
    try:
        days = datetime.date(year, month, day).toordinal() - _EPOCH
    except ValueError:
        return None
    seconds = (days * 24 + hour) * 3600 + minute * 60 + second - offset
    return seconds * 10**9 + int((found[7] or "0")[:9].ljust(9, "0"))


def _offset(zone: str) -> int | None:
    """Seconds that a zone is ahead of UTC; None where there is no such zone."""
    digits = re.sub("[^0-9]", "", zone).ljust(4, "0")
    hours, minutes = int(digits[:2]), int(digits[2:])
    if hours > 23 or minutes > 59:
        return None
    seconds = hours * 3600 + minutes * 60
    return -seconds if zone.startswith("-") else seconds


def _since_epoch(text: str) -> int | None:
    """Of seconds, milli-, micro- or nanoseconds; None where they are too few, or beyond 64 bits."""
    try:
        number = Decimal(text)
    except ArithmeticError:  # an exponent beyond all bounds
        return None
    size = number.copy_abs()
    if size < _SMALLEST or size >= 2**63:
        return None
    digits = next((digits for below, digits in _UNITS if size < below), 0)
    return math.floor(number.scaleb(digits))
