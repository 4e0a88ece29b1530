"""The rendezvous of the ranks of one attempt: a store of texts that they leave for each other.

Ranks of one machine share a folder that only this user can read, those of several machines a
TCPStore that one process serves. Anyone who reaches its port can read and write it, so what keeps
unknown peers out of a run are the CURVE keys, which never pass through it.
"""

from __future__ import annotations

import errno
import json
import os
import re
import secrets
import socket
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from datetime import timedelta
from ipaddress import IPv4Address, IPv4Network
from pathlib import Path
from typing import TypeVar, final

import psutil
from torch.distributed import (  # documented there, which its stubs do not know
    FileStore,  # pyright: ignore[reportPrivateImportUsage]
    PrefixStore,  # pyright: ignore[reportPrivateImportUsage]
    Store,  # pyright: ignore[reportPrivateImportUsage]
    TCPStore,  # pyright: ignore[reportPrivateImportUsage]
)

from dlrm_hybrid.types import ConfigError, DeadlineError, DlrmError, ResourceError, RunFailedError

FIRST_PAUSE_SECONDS = 0.001
LONGEST_PAUSE_SECONDS = 0.05
CONNECT_POLL_SECONDS = 0.05
LEAST_SECONDS = 1.0
GROUPS = "process_groups"
FAILURE = "failure.json"
ALL_ATTEMPTS = "dlrm_hybrid"
IN_USE = "; another program uses it, perhaps another job: give each job its own port"
_ADDRESS = re.compile(r"tcp://\d{1,3}(\.\d{1,3}){3}:\d{1,5}")
_TOKEN = re.compile(r"[0-9a-f]{32}")
_Answer = TypeVar("_Answer")


@dataclass(frozen=True, slots=True)
class Endpoint:
    """The address on which a rank listens, with its token.

    Attributes:
        address: `tcp://127.0.0.1:40001`.
        token: 32 hex digits that senders must know; other programs, runs and attempts do not.
    """

    address: str
    token: str = field(repr=False)

    def to_json(self) -> str:
        """The text that `endpoint_of` reads."""
        return json.dumps({"address": self.address, "token": self.token})


def go_on() -> None:
    """Do nothing, so that only the deadline ends a wait."""


@final
@dataclass(frozen=True, slots=True)
class FolderTexts:
    """A store of texts as files of a folder, each of which appears whole.

    Readers of a torch FileStore wait forever for the rest of a text whose writer failed.

    Attributes:
        path: the folder; made if missing.
    """

    path: Path

    def compare_set(self, key: str, expected: str, text: str) -> bytes:
        """Write a text unless there is one (`expected` is empty); returns the text then present."""
        path = self._path(key)
        temporary = path.with_name(f"{path.name}.{os.getpid()}.{secrets.token_hex(4)}.tmp")
        self.path.mkdir(parents=True, exist_ok=True)
        try:
            descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            with os.fdopen(descriptor, "wb") as file:
                file.write(text.encode())
            path.hardlink_to(temporary)  # unlike a rename, refuses to replace a file
        except FileExistsError:
            return path.read_bytes()
        finally:
            temporary.unlink(missing_ok=True)
        return text.encode()

    def check(self, keys: list[str]) -> bool:
        """Whether all of these texts exist."""
        return all(self._path(key).exists() for key in keys)

    def get(self, key: str) -> bytes:
        """A text that exists."""
        return self._path(key).read_bytes()

    def _path(self, key: str) -> Path:
        return self.path / Path(key).name


@final
@dataclass(frozen=True, slots=True)
class Rendezvous:
    """The texts that the ranks of one attempt leave for each other; `str` says where they are.

    Attributes:
        root: the store of all attempts, or this one's folder.
        attempt: prefix of the names of this attempt's texts.
        place: the folder, or `the store at 10.0.0.1:29500`, for error messages.
        check: called while a rank waits; may raise to end the wait.
    """

    root: Store | FolderTexts
    attempt: str
    place: str
    check: Callable[[], None] = go_on

    def __str__(self) -> str:
        return self.place

    def for_all_attempts(self) -> Rendezvous:
        """The rendezvous of all attempts, for texts that later ones need too."""
        return replace(self, attempt=ALL_ATTEMPTS)

    def store(self, name: str) -> Store:
        """The part of the store that belongs to one process group."""
        root = self.root
        if isinstance(root, FolderTexts):
            root.path.mkdir(parents=True, exist_ok=True)
            path = root.path / GROUPS
            os.close(os.open(path, os.O_CREAT, 0o600))  # for this user's eyes only
            root = FileStore(str(path))
        return PrefixStore(name, PrefixStore(self.attempt, root))

    def put(self, name: str, text: str) -> bool:
        """Write a text, which is not empty; False, without effect, if the name has another.

        Raises:
            ResourceError: the file cannot be written.
            DlrmError: the store does not respond.
        """
        key = f"{self.attempt}/{name}"
        return self._ask(lambda: self.root.compare_set(key, "", text)) == text.encode()

    def read(self, name: str) -> str | None:
        """The text of this name, None if there is none yet."""
        key = f"{self.attempt}/{name}"
        if not self._ask(lambda: self.root.check([key])):
            return None
        return self._ask(lambda: self.root.get(key)).decode()

    def wait(self, name: str, deadline_seconds: float) -> str:
        """Wait for the text of this name.

        Raises:
            DeadlineError: it did not appear in time.
            RunFailedError: a rank reported that the run has failed.
        """
        texts = self.wait_for_all([name], deadline_seconds)
        if not texts:
            raise DeadlineError(f"{name} did not come to {self} within {deadline_seconds:g} s")
        return texts[name]

    def wait_for_all(self, names: Iterable[str], deadline_seconds: float) -> dict[str, str]:
        """Wait for the texts of these names; those missing at the deadline are left out.

        Raises:
            RunFailedError: a rank reported that the run has failed.
        """
        until = time.monotonic() + deadline_seconds
        pause_seconds = FIRST_PAUSE_SECONDS
        missing, texts = list(names), dict[str, str]()
        while True:
            is_last = time.monotonic() >= until
            self.check()
            if failure := self.failure():
                raise failure
            texts |= {name: text for name in missing if (text := self.read(name)) is not None}
            missing = [name for name in missing if name not in texts]
            if is_last or not missing:
                return texts
            time.sleep(pause_seconds)  # a waiting TCPStore blocks signals
            pause_seconds = min(2 * pause_seconds, LONGEST_PAUSE_SECONDS)

    def join(
        self,
        rank: int,
        incarnations: Mapping[int, int],
        endpoint: Endpoint,
        deadline_seconds: float,
    ) -> dict[int, Endpoint]:
        """Publish this rank's endpoint and wait for those of some ranks, each maybe restarted.

        Each incarnation has its own name for its endpoint, so none of an ended process is found.

        Args:
            rank: this rank.
            incarnations: how often each of the ranks, this one included, was started before.
            endpoint: of this rank.
            deadline_seconds: how long to wait for the others.

        Returns:
            The endpoints of these ranks.

        Raises:
            DlrmError: this rank was published before, or a text is not an endpoint.
            ResourceError: the file cannot be written.
            DeadlineError: names the ranks that did not appear.
        """
        names = {
            peer: f"{peer}.{number}.json" if number else f"{peer}.json"
            for peer, number in incarnations.items()
        }
        if not self.put(names[rank], endpoint.to_json()):
            raise DlrmError(f"rank {rank} has come to {self} before: {names[rank]} is there")
        texts = self.wait_for_all(names.values(), deadline_seconds)
        if missing := [str(peer) for peer, name in names.items() if name not in texts]:
            raise DeadlineError(
                f"rank {rank}: of ranks {min(names)} to {max(names)}, these did not come to "
                f"{self} within {deadline_seconds:g} s: {', '.join(missing)}"
            )
        return {peer: endpoint_of(texts[name], f"{self}/{name}") for peer, name in names.items()}

    def fail(self, exit_code: int, message: str) -> None:
        """Report why the run has failed; the first reason stays."""
        self.put(FAILURE, json.dumps({"exit_code": exit_code, "message": message}))

    def failure(self) -> RunFailedError | None:
        """The reason reported with `fail`, if any."""
        text = self.read(FAILURE)
        return None if text is None else RunFailedError(**json.loads(text))

    def _ask(self, question: Callable[[], _Answer]) -> _Answer:
        try:
            return question()
        except OSError as error:
            raise ResourceError(f"{self} cannot be used: {error.strerror}") from error
        except RuntimeError as error:
            raise DlrmError(f"{self} does not answer: {_first_line(error)}") from error


def share_folder(folder: Path, check: Callable[[], None] = go_on) -> Rendezvous:
    """The rendezvous of one machine's ranks in a folder, new for each attempt; made if missing."""
    return Rendezvous(FolderTexts(folder), "ranks", str(folder), check)


def serve_store(host: str, port: int, attempt: str) -> Rendezvous:
    """Serve a store on one address of this machine, for as long as the rendezvous exists.

    Raises:
        ConfigError: `host` is not the address of one interface.
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
    # Without this a TCPStore listens on every interface, whatever address it is given.
    store = TCPStore(
        address, port, is_master=True, wait_for_workers=False, master_listen_fd=listening.detach()
    )
    return Rendezvous(store, attempt, f"the store at {address}:{port}")


def reach_store(host: str, port: int, attempt: str, deadline_seconds: float) -> Rendezvous:
    """Connect to a store served by another process.

    Raises:
        DeadlineError: no process serves it in time.
    """
    until = time.monotonic() + deadline_seconds
    while not _is_served(host, port) and time.monotonic() < until:
        time.sleep(CONNECT_POLL_SECONDS)  # a waiting TCPStore blocks signals
    try:
        timeout = timedelta(seconds=max(LEAST_SECONDS, until - time.monotonic()))
        store = TCPStore(host, port, is_master=False, timeout=timeout, wait_for_workers=False)
    except RuntimeError as error:
        raise DeadlineError(
            f"MASTER_ADDR = {host}, MASTER_PORT = {port}: no store there within "
            f"{deadline_seconds:g} s: {_first_line(error)}"
        ) from error
    return Rendezvous(store, attempt, f"the store at {host}:{port}")


def own_address(bind: str) -> str:
    """Resolve `network.bind` to an IPv4 address of this machine.

    Args:
        bind: an address, used as it is; or a network, `10.0.0.0/24`, in which this machine has one
            address, so that all machines of a run can share a configuration.

    Raises:
        ConfigError: it is not a network, or the machine has none or several addresses in it.
    """
    if "/" not in bind:
        return bind
    try:
        network = IPv4Network(bind)
    except ValueError as error:
        raise ConfigError(f"network.bind: {bind!r} is not an IPv4 network: {error}") from error
    matches = sorted(
        entry.address
        for addresses in psutil.net_if_addrs().values()
        for entry in addresses
        if entry.family is socket.AF_INET and IPv4Address(entry.address) in network
    )
    if len(matches) != 1:
        shown = ", ".join(matches) or "none"
        raise ConfigError(
            f"network.bind: {socket.gethostname()} needs one address in {bind}, it has {shown}"
        )
    return matches[0]


def endpoint_of(text: str, where: str) -> Endpoint:
    """Parse an endpoint from JSON; raises DlrmError, beginning with `where`, if it is none."""
    fault = ""
    try:
        endpoint = Endpoint(**json.loads(text))
        if _ADDRESS.fullmatch(endpoint.address) and _TOKEN.fullmatch(endpoint.token):
            return endpoint
    except (ValueError, TypeError) as error:
        fault = f": {error}"
    raise DlrmError(f"{where} does not say where a rank listens{fault}")


def _is_served(host: str, port: int) -> bool:
    try:
        with socket.create_connection((host, port), timeout=LEAST_SECONDS):
            return True
    except OSError:
        return False


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
