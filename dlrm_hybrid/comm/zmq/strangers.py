"""Who comes to a rank from outside its run: counted, told once of each kind, and nothing else."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import final


@final
@dataclass(slots=True)
class Strangers:
    """Counts them.

    Attributes:
        rank: to which they came.
        report: called with a line of text for the first of each kind.
        foreign_messages: that were dropped.
        refused_connections: that did not come so far as to send one, without the keys of the run or
            for a broken greeting; programs that do not even try ZeroMQ's are not seen here.
    """

    rank: int
    report: Callable[[str], None] = field(repr=False)
    foreign_messages: int = 0
    refused_connections: int = 0

    def message(self, fault: Exception) -> None:
        """Count a message that was dropped for this reason."""
        self.foreign_messages += 1
        if self.foreign_messages == 1:
            self.report(
                f"rank {self.rank}: dropped a message from outside this run: {fault}; "
                "further ones are only counted"
            )

    def connection(self) -> None:
        """Count a connection that was refused."""
        self.refused_connections += 1
        if self.refused_connections == 1:
            self.report(
                f"rank {self.rank}: refused a connection without this run's keys or with "
                "another protocol; further ones are only counted"
            )

    def values(self) -> dict[str, int]:
        """Both counts, as JSON values."""
        return {
            "foreign_messages": self.foreign_messages,
            "refused_connections": self.refused_connections,
        }
