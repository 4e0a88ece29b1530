"""What became of made-up input."""

from __future__ import annotations

from dataclasses import dataclass, field


class WrongError(Exception):
    """Something was taken, or read, that must not be."""


@dataclass(slots=True)
class Told:
    """What became of all that was tried.

    Attributes:
        tried: how many there were.
        accepted: taken for good.
        faults: what must not happen.
        remark: what else was measured.
    """

    tried: int = 0
    accepted: int = 0
    faults: list[str] = field(default_factory=list[str])
    remark: str = ""


def require(holds: bool, otherwise: str) -> None:
    """Raise WrongError unless something holds."""
    if not holds:
        raise WrongError(otherwise)
