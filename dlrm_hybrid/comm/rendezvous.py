"""How ranks learn where the others listen: each leaves a text on a board that all can read."""

from __future__ import annotations

import json
import os
import re
import secrets
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol, final

from dlrm_hybrid.types import DeadlineError, DlrmError, ResourceError

FIRST_PAUSE_SECONDS = 0.001
LONGEST_PAUSE_SECONDS = 0.05
_ADDRESS = re.compile(r"tcp://\d{1,3}(\.\d{1,3}){3}:\d{1,5}")
_TOKEN = re.compile(r"[0-9a-f]{32}")


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Where a rank listens.

    Attributes:
        address: `tcp://127.0.0.1:40001`.
        token: 32 hex digits that a sender must know; other programs, other runs and earlier
            attempts do not.
    """

    address: str
    token: str = field(repr=False)


class Board(Protocol):
    """Where the ranks of one attempt leave short texts for each other; `str` says where it is."""

    def put(self, name: str, text: str) -> bool:
        """Leave a text; False, and nothing done, if there is one of this name.

        Raises:
            ResourceError: the board cannot be written.
        """
        ...

    def get(self, name: str) -> str | None:
        """The text of this name, None as long as there is none."""
        ...


@final
@dataclass(frozen=True, slots=True)
class FolderBoard:
    """A board in a folder of one machine: one file for each text, for this user's eyes only.

    Attributes:
        folder: new for each attempt; made if missing.
    """

    folder: Path

    def __str__(self) -> str:
        return str(self.folder)

    def put(self, name: str, text: str) -> bool:
        """See `Board`; the file appears whole."""
        path = self.folder / name
        temporary = self.folder / f"{name}.{os.getpid()}.{secrets.token_hex(4)}.tmp"
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            with os.fdopen(descriptor, "w", encoding="ascii") as file:
                file.write(text)
            try:
                path.hardlink_to(temporary)  # unlike a rename, refuses to replace a file
            except FileExistsError:
                return False
            finally:
                temporary.unlink()
        except OSError as error:
            raise ResourceError(f"{path} cannot be written: {error.strerror}") from error
        return True

    def get(self, name: str) -> str | None:
        """See `Board`."""
        try:
            return (self.folder / name).read_text(encoding="ascii")
        except (FileNotFoundError, NotADirectoryError):
            return None


def meet(
    board: Board, rank: int, world_size: int, endpoint: Endpoint, deadline_seconds: float
) -> tuple[Endpoint, ...]:
    """Publish this rank's endpoint and wait for those of all ranks.

    Args:
        board: of this attempt.
        rank: this one.
        world_size: how many ranks there are.
        endpoint: of this rank.
        deadline_seconds: how long to wait for the others.

    Returns:
        The endpoints by rank.

    Raises:
        DlrmError: this rank has been published before, or a text is not an endpoint.
        ResourceError: the board cannot be written.
        DeadlineError: names the ranks that did not come.
    """
    text = json.dumps({"address": endpoint.address, "token": endpoint.token})
    if not board.put(_name(rank), text):
        raise DlrmError(f"rank {rank} has come to {board} before: {_name(rank)} is there")
    known = {rank: endpoint}
    for _ in _polls(deadline_seconds):
        for other in range(world_size):
            if other not in known and (found := board.get(_name(other))) is not None:
                known[other] = _endpoint(found, f"{board}/{_name(other)}")
        if len(known) == world_size:
            return tuple(known[one] for one in range(world_size))
    missing = ", ".join(str(one) for one in range(world_size) if one not in known)
    raise DeadlineError(
        f"rank {rank}: of ranks 0 to {world_size - 1}, these did not come to {board} "
        f"within {deadline_seconds:g} s: {missing}"
    )


def await_text(board: Board, name: str, deadline_seconds: float) -> str:
    """The text of this name, as soon as it is there.

    Raises:
        DeadlineError: it did not come.
    """
    for _ in _polls(deadline_seconds):
        if (text := board.get(name)) is not None:
            return text
    raise DeadlineError(f"{name} did not come to {board} within {deadline_seconds:g} s")


def _name(rank: int) -> str:
    return f"{rank}.json"


def _polls(seconds: float) -> Iterator[None]:
    """Moments to look again, at first close to each other; at least one, the last at the end."""
    until = time.monotonic() + seconds
    pause_seconds = FIRST_PAUSE_SECONDS
    while True:
        is_last = time.monotonic() >= until
        yield
        if is_last:
            return
        time.sleep(pause_seconds)
        pause_seconds = min(2 * pause_seconds, LONGEST_PAUSE_SECONDS)


def _endpoint(text: str, where: str) -> Endpoint:
    try:
        values = json.loads(text)
        endpoint = Endpoint(values["address"], values["token"])
        if _ADDRESS.fullmatch(endpoint.address) and _TOKEN.fullmatch(endpoint.token):
            return endpoint
    except (ValueError, KeyError, TypeError) as error:
        raise DlrmError(f"{where} does not say where a rank listens: {error}") from error
    raise DlrmError(f"{where} does not say where a rank listens")
