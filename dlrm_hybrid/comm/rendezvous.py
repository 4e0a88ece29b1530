"""How ranks learn where the others listen: one file for each rank, in a folder they share."""

from __future__ import annotations

import json
import os
import re
import time
from dataclasses import dataclass, field
from pathlib import Path

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


def meet(
    folder: Path, rank: int, world_size: int, endpoint: Endpoint, deadline_seconds: float
) -> tuple[Endpoint, ...]:
    """Publish this rank's endpoint and wait for those of all ranks.

    Files appear whole and are readable by this user only.

    Args:
        folder: shared by the ranks of one attempt, new for each; made if missing.
        rank: this one.
        world_size: how many ranks there are.
        endpoint: of this rank.
        deadline_seconds: how long to wait for the others.

    Returns:
        The endpoints by rank.

    Raises:
        DlrmError: this rank has been published before, or a file is not an endpoint.
        ResourceError: the folder cannot be written.
        DeadlineError: names the ranks that did not come.
    """
    until = time.monotonic() + deadline_seconds
    _publish(folder, rank, endpoint)
    known = {rank: endpoint}
    pause_seconds = FIRST_PAUSE_SECONDS
    while True:
        for other in range(world_size):
            path = folder / f"{other}.json"
            if other not in known and path.exists():
                known[other] = _read(path)
        if len(known) == world_size:
            return tuple(known[one] for one in range(world_size))
        if time.monotonic() >= until:
            missing = ", ".join(str(one) for one in range(world_size) if one not in known)
            raise DeadlineError(
                f"rank {rank}: of ranks 0 to {world_size - 1}, these did not come to {folder} "
                f"within {deadline_seconds:g} s: {missing}"
            )
        time.sleep(pause_seconds)
        pause_seconds = min(2 * pause_seconds, LONGEST_PAUSE_SECONDS)


def _publish(folder: Path, rank: int, endpoint: Endpoint) -> None:
    path = folder / f"{rank}.json"
    temporary = folder / f"{rank}.{os.getpid()}.{endpoint.token[:8]}.tmp"
    text = json.dumps({"address": endpoint.address, "token": endpoint.token})
    try:
        folder.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "w", encoding="ascii") as file:
            file.write(text)
        try:
            path.hardlink_to(temporary)  # unlike a rename, refuses to replace a file
        finally:
            temporary.unlink()
    except FileExistsError as error:
        raise DlrmError(f"rank {rank} has come to {folder} before: {path} exists") from error
    except OSError as error:
        raise ResourceError(f"rank {rank} cannot write {path}: {error.strerror}") from error


def _read(path: Path) -> Endpoint:
    try:
        values = json.loads(path.read_text(encoding="ascii"))
        endpoint = Endpoint(values["address"], values["token"])
        if _ADDRESS.fullmatch(endpoint.address) and _TOKEN.fullmatch(endpoint.token):
            return endpoint
    except (ValueError, KeyError, TypeError, OSError) as error:
        raise DlrmError(f"{path} does not say where a rank listens: {error}") from error
    raise DlrmError(f"{path} does not say where a rank listens")
