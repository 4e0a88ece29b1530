"""Who of a group still lives: every process holds a lock that the kernel drops when it ends."""

from __future__ import annotations

import fcntl
import time
from collections.abc import Collection, Generator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, final

POLL_SECONDS = 0.005


class Presence(Protocol):
    """Tells of other ranks that are gone."""

    def gone(self, ranks: Collection[int], patience_seconds: float) -> int | None:
        """The first of `ranks`, not this process's own, that is gone; None if all live on.

        A connection may break a moment before this shows: looks for `patience_seconds`.
        """
        ...


@contextmanager
def locks(folder: Path, name: str, rank: int) -> Generator[Presence, None, None]:
    """Show this process to the others of the group `name` on this machine, until it ends."""
    with (folder / f"{name}.{rank}").open("w", encoding="ascii") as mine:
        # Not flock: a forked child would keep that lock alive.
        fcntl.lockf(mine, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield _Locks(folder, name)


@final
@dataclass(frozen=True, slots=True)
class _Locks:
    folder: Path
    name: str

    def gone(self, ranks: Collection[int], patience_seconds: float) -> int | None:
        """See `Presence`."""
        deadline = time.monotonic() + patience_seconds
        while True:
            for rank in ranks:
                if self._is_gone(rank):
                    return rank
            if time.monotonic() > deadline:
                return None
            time.sleep(POLL_SECONDS)

    def _is_gone(self, rank: int) -> bool:
        try:
            with (self.folder / f"{self.name}.{rank}").open("r", encoding="ascii") as theirs:
                fcntl.lockf(theirs, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        except FileNotFoundError:
            return False
        return True
