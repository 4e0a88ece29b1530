"""Ranks find each other, and name who does not come."""

import json
import threading
import time
from pathlib import Path

import pytest
from patience import HANG_SECONDS
from small_disk import enlarge, fill, needs_mount, small_disk

from dlrm_hybrid.comm.rendezvous import Endpoint, Rendezvous, own_address, share_folder
from dlrm_hybrid.types import (
    ConfigError,
    DeadlineError,
    DlrmError,
    InterruptedRunError,
    ResourceError,
)


def endpoint(rank: int) -> Endpoint:
    return Endpoint(f"tcp://127.0.0.1:{40_000 + rank}", f"{rank:032x}")


def meet(
    rendezvous: Rendezvous, rank: int, ranks: int, own: Endpoint, seconds: float
) -> tuple[Endpoint, ...]:
    found = rendezvous.join(rank, dict.fromkeys(range(ranks), 0), own, seconds)
    return tuple(found.values())


def test_all_ranks_learn_all_endpoints(tmp_path: Path) -> None:
    ranks = 6
    found: dict[int, tuple[Endpoint, ...]] = {}

    def come(rank: int) -> None:
        rendezvous = share_folder(tmp_path / "a" / "0")
        found[rank] = meet(rendezvous, rank, ranks, endpoint(rank), HANG_SECONDS)

    threads = [threading.Thread(target=come, args=(rank,)) for rank in range(ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == dict.fromkeys(range(ranks), tuple(endpoint(rank) for rank in range(ranks)))
    files = sorted((tmp_path / "a" / "0").iterdir())
    assert [path.name for path in files] == [f"{rank}.json" for rank in range(ranks)]
    assert {path.stat().st_mode & 0o777 for path in files} == {0o600}


def test_missing_ranks_are_named_at_the_deadline(tmp_path: Path) -> None:
    rendezvous = share_folder(tmp_path)
    with pytest.raises(DeadlineError):
        meet(rendezvous, 2, 5, endpoint(2), 0.0)
    start = time.monotonic()
    with pytest.raises(DeadlineError, match=r"of ranks 0 to 4, these did not .* 0\.1 s: 0, 1, 4$"):
        meet(rendezvous, 3, 5, endpoint(3), 0.1)
    assert time.monotonic() - start >= 0.1


def test_a_rank_comes_once(tmp_path: Path) -> None:
    meet(share_folder(tmp_path), 0, 1, endpoint(0), HANG_SECONDS)
    again = share_folder(tmp_path)
    with pytest.raises(DlrmError, match=f"rank 0 has come to {tmp_path} before: 0.json is there"):
        meet(again, 0, 1, endpoint(9), HANG_SECONDS)
    assert meet(again, 0, 1, endpoint(0), 0.0) == (endpoint(0),)


@pytest.mark.parametrize(
    "text",
    [
        "[]",
        "{}",
        "no JSON",
        json.dumps({"address": 1, "token": "00" * 16}),
        json.dumps({"address": "ipc://x", "token": "00" * 16}),
        json.dumps({"address": "tcp://127.0.0.1:1", "token": "00"}),
        json.dumps({"address": "tcp://127.0.0.1:1;tcp://1.2.3.4:5", "token": "00" * 16}),
    ],
)
def test_a_text_that_is_no_endpoint_is_told(tmp_path: Path, text: str) -> None:
    rendezvous = share_folder(tmp_path)
    rendezvous.put("1.json", text)
    with pytest.raises(DlrmError, match=r"1\.json does not say where a rank listens"):
        meet(rendezvous, 0, 2, endpoint(0), HANG_SECONDS)


def test_a_folder_that_cannot_be_made_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ResourceError, match="file/0 cannot be used: Not a directory"):
        meet(share_folder(tmp_path / "file" / "0"), 0, 2, endpoint(0), HANG_SECONDS)


@needs_mount
def test_a_full_disk_is_told_and_nobody_waits_for_half_a_text(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", 16) as disk:
        fill(disk)
        with pytest.raises(ResourceError, match="disk/0 cannot be used: No space left on device"):
            meet(share_folder(disk / "0"), 0, 2, endpoint(0), HANG_SECONDS)
        enlarge(disk, 32)
        assert meet(share_folder(disk / "0"), 0, 1, endpoint(0), 0.0) == (endpoint(0),)


def test_waiting_ends_where_a_check_says_so(tmp_path: Path) -> None:
    def stop() -> None:
        raise InterruptedRunError("Ctrl-C")

    with pytest.raises(InterruptedRunError):
        meet(share_folder(tmp_path, stop), 0, 2, endpoint(0), HANG_SECONDS)


def test_a_token_is_not_printed() -> None:
    assert endpoint(3).token not in repr(endpoint(3))


def test_a_text_is_awaited_and_never_replaced(tmp_path: Path) -> None:
    rendezvous = share_folder(tmp_path / "new")
    with pytest.raises(DeadlineError, match=r"note did not come to .*new within 0 s"):
        rendezvous.wait("note", 0.0)
    assert rendezvous.put("note", "first")
    assert not rendezvous.put("note", "second")
    assert rendezvous.wait("note", 0.0) == "first"


def test_an_address_is_taken_as_it_is() -> None:
    assert own_address("10.20.30.40") == "10.20.30.40"


def test_a_network_means_the_address_in_it() -> None:
    assert own_address("127.0.0.0/8") == "127.0.0.1"


@pytest.mark.parametrize(
    ("bind", "fault"),
    [
        ("203.0.113.0/24", "needs one address in 203.0.113.0/24, it has none"),
        ("127.0.0.1/8", "is not an IPv4 network"),
        ("10.0.0.0/99", "is not an IPv4 network"),
    ],
)
def test_what_means_no_address_is_refused(bind: str, fault: str) -> None:
    with pytest.raises(ConfigError, match=fault):
        own_address(bind)
