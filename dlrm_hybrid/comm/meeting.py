"""Where the ranks of one attempt meet: in a folder of one machine, or at a store."""

from __future__ import annotations

import fcntl
import time
from collections.abc import Collection, Generator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, final

from torch._C._distributed_c10d import FileStore, PrefixStore, Store

from dlrm_hybrid.comm.rendezvous import Board, FolderBoard
from dlrm_hybrid.comm.store_board import StoreBoard

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


class Meeting(Protocol):
    """Where the members of one process group meet."""

    def enter(self, rank: int, size: int) -> AbstractContextManager[tuple[Store, Presence]]:
        """Come as the rank that is `rank` in the run, one of `size` members.

        Returns:
            The store of the group, and who tells of members that are gone.
        """
        ...


class Rendezvous(Protocol):
    """Where all ranks meet, and the members of their process group."""

    @property
    def board(self) -> Board:
        """For what all ranks must know."""
        ...

    def meeting(self, ranks: Presence) -> Meeting:
        """For the process group.

        Args:
            ranks: notices when a rank of the run goes.
        """
        ...


@final
@dataclass(frozen=True, slots=True)
class FolderMeeting:
    """A meeting on one machine.

    Attributes:
        folder: shared by all members, made where it is missing.
        name: of the group; folder and name together are used by one group only, or its members
            would call the addresses of the dead.
    """

    folder: Path
    name: str

    @contextmanager
    def enter(self, rank: int, size: int) -> Generator[tuple[Store, Presence], None, None]:
        """See `Meeting`."""
        self.folder.mkdir(parents=True, exist_ok=True)
        with locks(self.folder, self.name, rank) as present:
            yield FileStore(str(self.folder / self.name), size), present


@final
@dataclass(frozen=True, slots=True)
class StoreMeeting:
    """A meeting of several machines.

    Attributes:
        store: for this group only.
        ranks: notices when a rank of the run goes.
    """

    store: Store
    ranks: Presence

    @contextmanager
    def enter(self, rank: int, size: int) -> Generator[tuple[Store, Presence], None, None]:
        """See `Meeting`."""
        yield self.store, self.ranks


@final
@dataclass(frozen=True, slots=True)
class FolderRendezvous:
    """For ranks of one machine.

    Attributes:
        folder: shared by the ranks of a run.
        attempt: how often the run has been restarted.
    """

    folder: Path
    attempt: int

    @property
    def board(self) -> Board:
        """See `Rendezvous`."""
        return FolderBoard(self.folder)

    def meeting(self, ranks: Presence) -> Meeting:
        """See `Rendezvous`; locks tell of a member's end at once, so `ranks` is not asked."""
        return FolderMeeting(self.folder, f"embeddings-{self.attempt}")


@final
@dataclass(frozen=True, slots=True)
class StoreRendezvous:
    """For ranks of several machines.

    Attributes:
        board: of one attempt.
    """

    board: StoreBoard

    def meeting(self, ranks: Presence) -> Meeting:
        """See `Rendezvous`."""
        return StoreMeeting(PrefixStore("embeddings", self.board.store), ranks)
