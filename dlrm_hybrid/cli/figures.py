"""Figures that a person reads at a glance."""

from __future__ import annotations

UNITS = ("", "k", "M", "G", "T")
BYTES_PER_MB = 1e6


def quantity(amount: float) -> str:
    """Three digits and a decimal unit, to put a `B` behind: `12.3 M`."""
    exponent = 0
    while abs(amount) >= 999.5 and exponent < len(UNITS) - 1:
        amount /= 1000
        exponent += 1
    digits = f"{amount:.0f}" if exponent == 0 or abs(amount) >= 99.95 else f"{amount:#.3g}"
    return f"{digits} {UNITS[exponent]}"


def rate(done: float, seconds: float, unit: str) -> str:
    """How much is done in a second, as `123,456 rows/s`; of bytes in MB."""
    if unit == "bytes":
        done, unit = done / BYTES_PER_MB, "MB"
    return f"{done / seconds if seconds > 0 else 0.0:,.0f} {unit}/s"
