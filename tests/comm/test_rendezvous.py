"""Ranks find each other, and name who does not come."""

import json
import threading
import time
from pathlib import Path

import pytest

from dlrm_hybrid.comm.rendezvous import Endpoint, FolderBoard, await_text, meet
from dlrm_hybrid.types import DeadlineError, DlrmError, ResourceError

DEADLINE_SECONDS = 20.0


def endpoint(rank: int) -> Endpoint:
    return Endpoint(f"tcp://127.0.0.1:{40_000 + rank}", f"{rank:032x}")


def test_all_ranks_learn_all_endpoints(tmp_path: Path) -> None:
    ranks = 6
    found: dict[int, tuple[Endpoint, ...]] = {}

    def come(rank: int) -> None:
        time.sleep(0.003 * rank)
        found[rank] = meet(
            FolderBoard(tmp_path / "a" / "0"), rank, ranks, endpoint(rank), DEADLINE_SECONDS
        )

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
    with pytest.raises(DeadlineError):
        meet(FolderBoard(tmp_path), 2, 5, endpoint(2), 0.0)
    start = time.monotonic()
    with pytest.raises(DeadlineError, match=r"of ranks 0 to 4, these did not .* 0\.1 s: 0, 1, 4$"):
        meet(FolderBoard(tmp_path), 3, 5, endpoint(3), 0.1)
    assert 0.1 <= time.monotonic() - start < 5


def test_a_rank_comes_once(tmp_path: Path) -> None:
    meet(FolderBoard(tmp_path), 0, 1, endpoint(0), DEADLINE_SECONDS)
    before = (tmp_path / "0.json").read_text()
    with pytest.raises(DlrmError, match=f"rank 0 has come to {tmp_path} before"):
        meet(FolderBoard(tmp_path), 0, 1, endpoint(9), DEADLINE_SECONDS)
    assert (tmp_path / "0.json").read_text() == before
    assert [path.name for path in tmp_path.iterdir()] == ["0.json"]


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "{}",
        json.dumps({"address": 1, "token": "00" * 16}),
        json.dumps({"address": "ipc://x", "token": "00" * 16}),
        json.dumps({"address": "tcp://127.0.0.1:1", "token": "00"}),
        json.dumps({"address": "tcp://127.0.0.1:1;tcp://1.2.3.4:5", "token": "00" * 16}),
    ],
)
def test_a_file_that_is_no_endpoint_is_told(tmp_path: Path, text: str) -> None:
    (tmp_path / "1.json").write_text(text)
    with pytest.raises(DlrmError, match=r"1\.json does not say where a rank listens"):
        meet(FolderBoard(tmp_path), 0, 2, endpoint(0), DEADLINE_SECONDS)


def test_a_folder_that_cannot_be_made_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ResourceError, match=r"0\.json cannot be written"):
        meet(FolderBoard(tmp_path / "file" / "0"), 0, 2, endpoint(0), DEADLINE_SECONDS)


def test_a_token_is_not_printed() -> None:
    assert endpoint(3).token not in repr(endpoint(3))


def test_a_text_is_awaited_and_never_replaced(tmp_path: Path) -> None:
    board = FolderBoard(tmp_path / "new")
    with pytest.raises(DeadlineError, match=r"note did not come to .*new within 0 s"):
        await_text(board, "note", 0.0)
    assert board.put("note", "first")
    assert not board.put("note", "second")
    assert await_text(board, "note", 0.0) == "first"
