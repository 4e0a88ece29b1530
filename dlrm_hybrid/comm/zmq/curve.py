"""CURVE keys, which let the ranks of a run, and nobody else, talk over an open network.

All ranks share one key pair: each is server to those that send to it and client of the others,
and admits only clients that hold that pair. ZeroMQ asks about each client by ZAP
(https://rfc.zeromq.org/spec/27).
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from ipaddress import AddressValueError, IPv4Address
from pathlib import Path

import zmq
from zmq.utils import z85

from dlrm_hybrid.types import ConfigError, ResourceError

KEY_CHARACTERS = 40
ZAP_ENDPOINT = "inproc://zeromq.zap.01"
ZAP_DOMAIN = b"dlrm_hybrid"
_ZAP_VERSION = b"1.0"


@dataclass(frozen=True, slots=True)
class CurveKeys:
    """The CURVE key pair that all ranks of a run share.

    Attributes:
        public: 40 characters, Z85.
        secret: 40 characters, Z85; never printed.
    """

    public: bytes
    secret: bytes = field(repr=False)


def check_listening(address: str, keys: CurveKeys | None, enclosed: bool) -> None:
    """Raise ConfigError unless ranks may listen on `address`.

    Without keys only on loopback: anyone who reaches the port could send gradients.

    Args:
        address: IPv4.
        keys: those of the run.
        enclosed: only ranks of the run are on the network of this address.
    """
    try:
        parsed = IPv4Address(address)
    except AddressValueError as error:
        raise ConfigError(f"network.bind: {address!r} is not an IPv4 address") from error
    if parsed.is_unspecified or parsed.is_multicast:
        raise ConfigError(
            f"network.bind: {address} is not the address of one interface, which other machines "
            "could connect to"
        )
    if not parsed.is_loopback and keys is None and not enclosed:
        raise ConfigError(
            f"network.bind: other machines can reach {address}, so ranks need CURVE "
            "keys: create a key file with doctor.action=keys and set network.keys to it"
        )


def make_key_file(path: Path) -> CurveKeys:
    """Make a new key pair in a file that only this user can read.

    The file is JSON: {"public": 40 characters, "secret": 40 characters}; all machines need a copy.

    Raises:
        ResourceError: the file exists, or cannot be written.
    """
    public, secret = zmq.curve_keypair()
    text = json.dumps({"public": public.decode(), "secret": secret.decode()}, indent=2)
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except OSError as error:
        raise ResourceError(f"{path}: {error.strerror}; keys are never replaced") from error
    with os.fdopen(descriptor, "w", encoding="ascii") as file:
        file.write(text + "\n")
    return CurveKeys(public, secret)


def read_key_file(path: Path) -> CurveKeys:
    """Read the key pair from a file made by `make_key_file`.

    Raises:
        ConfigError: the file is missing, open to other users, or holds no pair.
    """
    try:
        mode = path.stat().st_mode & 0o777
        values = json.loads(path.read_text(encoding="ascii"))
        public, secret = values["public"].encode("ascii"), values["secret"].encode("ascii")
    except OSError as error:
        raise ConfigError(f"network.keys: {path}: {error.strerror}") from error
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ConfigError(f"network.keys: {path} is not a key file") from error
    if mode & 0o077:
        raise ConfigError(
            f"network.keys: {path} has mode {mode:o}, other users may read it: chmod 600 {path}"
        )
    if not _is_pair(public, secret):
        raise ConfigError(f"network.keys: {path} holds no CURVE key pair")
    return CurveKeys(public, secret)


def _is_pair(public: bytes, secret: bytes) -> bool:
    if len(public) != KEY_CHARACTERS or len(secret) != KEY_CHARACTERS:
        return False
    try:
        return zmq.curve_public(secret) == public
    except (zmq.ZMQError, ValueError):
        return False


def zap_reply(request: Sequence[bytes], keys: CurveKeys) -> list[bytes]:
    """The ZAP reply that admits or refuses a client.

    Args:
        request: version, request id, domain, client address, identity, mechanism, credentials.
        keys: only a client with this public key is admitted.
    """
    admitted = list(request[5:]) == [b"CURVE", z85.decode(keys.public)]
    status = [b"200", b"OK"] if admitted else [b"400", b"this key is not of this run"]
    return [_ZAP_VERSION, request[1], *status, b"", b""]
