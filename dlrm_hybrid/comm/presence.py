"""Who of a group still lives: every process holds a lock that the kernel drops when it ends."""

from __future__ import annotations

import fcntl
import time
from collections.abc import Generator, Iterable
from contextlib import contextmanager
from pathlib import Path
from typing import final

POLL_SECONDS = 0.005


@contextmanager
def presence(folder: Path, name: str, rank: int) -> Generator[Presence, None, None]:
    """Show this process to the group `name` until the context ends, or the process does."""
    with (folder / f"{name}.{rank}").open("w", encoding="ascii") as mine:
        # Not flock: a forked child would keep that lock alive.
        fcntl.lockf(mine, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield Presence(folder, name)


@final
class Presence:
    """Looks for members that have shown themselves and are gone."""

    def __init__(self, folder: Path, name: str) -> None:
        self._folder = folder
        self._name = name

    def gone(self, ranks: Iterable[int], patience_seconds: float) -> int | None:
        """The first of `ranks`, not this process's own, that is gone; None if all live on.

        A connection may break a moment before the lock does: looks for `patience_seconds`.
        """
        deadline = time.monotonic() + patience_seconds
        others = tuple(ranks)
        while True:
            for rank in others:
                if self._is_gone(rank):
                    return rank
            if time.monotonic() > deadline:
                return None
            time.sleep(POLL_SECONDS)

    def _is_gone(self, rank: int) -> bool:
        try:
            with (self._folder / f"{self._name}.{rank}").open("r", encoding="ascii") as theirs:
                fcntl.lockf(theirs, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        except FileNotFoundError:
            return False
        return True
