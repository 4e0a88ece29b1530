"""The version of the weights that a step uses; the pushes of step k make version k + 1."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, final

from dlrm_hybrid.types import ConfigError


class Policy(Protocol):
    """How far behind the newest version workers compute; both steps and versions count from 0."""

    @property
    def staleness(self) -> int:
        """Versions by which a step may be behind; also how many steps a worker may run ahead."""
        ...

    def version(self, step: int) -> int:
        """The one version that `step` is computed with, on every worker."""
        ...


@final
@dataclass(frozen=True, slots=True)
class Sync:
    """Step k is computed with version k: every push of every earlier step is in it."""

    @property
    def staleness(self) -> int:
        """None."""
        return 0

    def version(self, step: int) -> int:
        """The step's own."""
        return step


@final
@dataclass(frozen=True, slots=True)
class Bounded:
    """Step k is computed with version max(0, k - staleness), so pushes and pulls overlap steps.

    As deterministic as `Sync`: a worker waits for this version, and takes no newer one.

    Raises:
        ConfigError: `sync.staleness` is below 1.
    """

    staleness: int

    def __post_init__(self) -> None:
        if self.staleness < 1:
            raise ConfigError(f"sync.staleness: {self.staleness} must be at least 1")

    def version(self, step: int) -> int:
        """The step's own, less the staleness."""
        return max(0, step - self.staleness)
