"""A board that ranks on several machines share: a key-value store that one process serves.

The store is torch.distributed's TCPStore. Whoever reaches its port can read and write it, so what
keeps strangers out of a run are the CURVE keys, which never go through it.
"""

from __future__ import annotations

import errno
import json
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import timedelta
from ipaddress import IPv4Address
from typing import TypeVar, cast, final

from torch._C._distributed_c10d import PrefixStore, Store, TCPStore

from dlrm_hybrid.types import ConfigError, DeadlineError, DlrmError, ResourceError, RunFailedError

FAILURE = "failure.json"
IN_USE = "; another program uses it, perhaps another job: give each job its own port"
POLL_SECONDS = 0.05
LEAST_SECONDS = 1.0
ALL_ATTEMPTS = "dlrm_hybrid"
Answer = TypeVar("Answer")


@final
@dataclass(frozen=True, slots=True)
class StoreBoard:
    """A `Board` on which a rank also says why the run cannot go on.

    Attributes:
        store: where texts lie, under names of this attempt only.
        place: `10.0.0.1:29500`, for messages.
        check: called with every `get`; may raise what ends the waiting.
    """

    store: Store
    place: str
    check: Callable[[], None]

    def __str__(self) -> str:
        return f"the store at {self.place}"

    def for_all_attempts(self) -> StoreBoard:
        """Another board in the same store, for what later attempts must know."""
        store = PrefixStore(ALL_ATTEMPTS, cast(PrefixStore, self.store).underlying_store)
        return replace(self, store=store)

    def put(self, name: str, text: str) -> bool:
        """See `Board`; `text` is not empty. The same text twice is no fault."""
        return self._asked(lambda: self.store.compare_set(name, "", text)) == text.encode()

    def get(self, name: str) -> str | None:
        """See `Board`.

        Raises:
            RunFailedError: a rank has said that the run cannot go on.
        """
        self.check()
        failure = self.failure()
        if failure is not None:
            raise failure
        return self.read(name)

    def fail(self, exit_code: int, message: str) -> None:
        """Say why the run cannot go on; the first reason stays."""
        self.put(FAILURE, json.dumps({"exit_code": exit_code, "message": message}))

    def failure(self) -> RunFailedError | None:
        """What a rank said with `fail`."""
        text = self.read(FAILURE)
        return None if text is None else RunFailedError(**json.loads(text))

    def read(self, name: str) -> str | None:
        """The text of this name, whether or not the run can go on."""
        if not self._asked(lambda: self.store.check([name])):
            return None
        return self._asked(lambda: self.store.get(name)).decode()

    def _asked(self, question: Callable[[], Answer]) -> Answer:
        try:
            return question()
        except RuntimeError as error:
            raise DlrmError(f"{self} does not answer: {_first_line(error)}") from error


def serve_board(host: str, port: int, prefix: str, check: Callable[[], None]) -> StoreBoard:
    """Serve a store on one address of this machine, for as long as the board is kept.

    Raises:
        ConfigError: `host` is no address of one interface.
        ResourceError: nothing can listen there.
    """
    try:
        address = socket.gethostbyname(host)
        if IPv4Address(address).is_unspecified:
            raise ConfigError(f"MASTER_ADDR = {host}: is not the address of one interface")
        listening = socket.create_server((address, port))
    except OSError as error:
        raise ResourceError(
            f"MASTER_ADDR = {host}, MASTER_PORT = {port}: rank 0 cannot listen there: "
            f"{error.strerror or error}" + (IN_USE if error.errno == errno.EADDRINUSE else "")
        ) from error
    # By itself a TCPStore listens on every interface, whatever name it is given.
    store = TCPStore(
        address, port, is_master=True, wait_for_workers=False, master_listen_fd=listening.detach()
    )
    return StoreBoard(PrefixStore(prefix, store), f"{address}:{port}", check)


def reach_board(
    host: str, port: int, prefix: str, check: Callable[[], None], deadline_seconds: float
) -> StoreBoard:
    """Connect to a store that another process serves.

    Raises:
        DeadlineError: nobody serves it.
    """
    until = time.monotonic() + deadline_seconds
    while not _is_served(host, port) and time.monotonic() < until:
        check()
        time.sleep(POLL_SECONDS)  # a TCPStore that waits heeds no signal
    try:
        timeout = timedelta(seconds=max(LEAST_SECONDS, until - time.monotonic()))
        store = TCPStore(host, port, is_master=False, timeout=timeout, wait_for_workers=False)
    except RuntimeError as error:
        raise DeadlineError(
            f"MASTER_ADDR = {host}, MASTER_PORT = {port}: no store there within "
            f"{deadline_seconds:g} s: {_first_line(error)}"
        ) from error
    return StoreBoard(PrefixStore(prefix, store), f"{host}:{port}", check)


def _is_served(host: str, port: int) -> bool:
    try:
        with socket.create_connection((host, port), timeout=LEAST_SECONDS):
            return True
    except OSError:
        return False


def _first_line(error: RuntimeError) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
