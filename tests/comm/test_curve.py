"""Keys: where they are needed, how they are kept, whom they let in."""

import json
from pathlib import Path

import pytest
import zmq
from zmq.utils import z85

from dlrm_hybrid.comm.zmq.curve import (
    CurveKeys,
    check_listening,
    make_key_file,
    read_key_file,
    zap_reply,
)
from dlrm_hybrid.types import ConfigError, ResourceError

KEYS = CurveKeys(*zmq.curve_keypair())


@pytest.mark.parametrize(
    ("address", "keys", "enclosed"),
    [
        ("127.0.0.1", None, False),
        ("127.1.2.3", None, False),
        ("10.0.0.1", KEYS, False),
        ("198.18.0.1", None, True),
    ],
)
def test_ranks_may_listen(address: str, keys: CurveKeys | None, enclosed: bool) -> None:
    check_listening(address, keys, enclosed)


@pytest.mark.parametrize(
    ("address", "keys", "message"),
    [
        ("10.0.0.1", None, "network.bind: other machines can reach 10.0.0.1, .* network.keys"),
        ("198.18.0.1", None, "network.bind: other machines can reach 198.18.0.1"),
        ("8.8.8.8", None, "network.bind: other machines can reach 8.8.8.8"),
        ("0.0.0.0", None, "network.bind: 0.0.0.0 is not the address of one interface"),
        ("0.0.0.0", KEYS, "network.bind: 0.0.0.0 is not the address of one interface"),
        ("224.0.0.1", KEYS, "network.bind: 224.0.0.1 is not the address of one interface"),
        ("localhost", KEYS, "network.bind: 'localhost' is not an IPv4 address"),
        ("::1", KEYS, "network.bind: '::1' is not an IPv4 address"),
        ("127.0.0.1:5000", None, "is not an IPv4 address"),
        ("", None, "network.bind: '' is not an IPv4 address"),
    ],
)
def test_ranks_may_not_listen(address: str, keys: CurveKeys | None, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check_listening(address, keys, enclosed=False)


def test_a_key_file_is_private_and_holds_a_pair(tmp_path: Path) -> None:
    path = tmp_path / "keys.json"
    keys = make_key_file(path)
    assert path.stat().st_mode & 0o777 == 0o600
    assert read_key_file(path) == keys
    assert zmq.curve_public(keys.secret) == keys.public
    assert sorted(json.loads(path.read_text())) == ["public", "secret"]
    assert keys.secret.decode() not in repr(keys)
    assert make_key_file(tmp_path / "others.json") != keys


def test_a_key_file_is_never_replaced(tmp_path: Path) -> None:
    path = tmp_path / "keys.json"
    keys = make_key_file(path)
    with pytest.raises(ResourceError, match="keys are never replaced"):
        make_key_file(path)
    assert read_key_file(path) == keys


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o644])
def test_a_key_file_that_others_may_read_is_refused(tmp_path: Path, mode: int) -> None:
    path = tmp_path / "keys.json"
    make_key_file(path)
    path.chmod(mode)
    with pytest.raises(ConfigError, match=f"network.keys: .* has mode {mode:o}, .*chmod 600"):
        read_key_file(path)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "{}",
        '{"public": 1, "secret": 2}',
        '{"public": "é", "secret": "x"}',
        json.dumps({"public": KEYS.public.decode(), "secret": ""}),
        json.dumps({"public": KEYS.public.decode(), "secret": "~" * 40}),
        json.dumps({"public": KEYS.secret.decode(), "secret": KEYS.public.decode()}),
    ],
    ids=range(8),  # the keys are others every time
)
def test_what_is_not_a_pair_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "keys.json"
    path.write_text(text, encoding="utf-8")
    path.chmod(0o600)
    with pytest.raises(ConfigError, match=f"network.keys: {path} (is not a key|holds no CURVE)"):
        read_key_file(path)


def test_a_missing_key_file_is_told(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="network.keys: .*none.json: No such file"):
        read_key_file(tmp_path / "none.json")


@pytest.mark.parametrize(
    ("credentials", "status"),
    [
        ([b"CURVE", z85.decode(KEYS.public)], b"200"),
        ([b"CURVE", z85.decode(zmq.curve_keypair()[0])], b"400"),
        ([b"CURVE", KEYS.public], b"400"),
        ([b"CURVE", b""], b"400"),
        ([b"CURVE"], b"400"),
        ([b"NULL"], b"400"),
        ([b"PLAIN", b"user", z85.decode(KEYS.public)], b"400"),
        ([], b"400"),
    ],
)
def test_only_the_key_of_the_run_is_admitted(credentials: list[bytes], status: bytes) -> None:
    request = [b"1.0", b"77", b"dlrm_hybrid", b"127.0.0.1", b"", *credentials]
    reply = zap_reply(request, KEYS)
    assert reply[:3] == [b"1.0", b"77", status]
    assert len(reply) == 6
