"""Whatever is killed while a checkpoint is made, and wherever: `latest` names a whole one."""

import os
from pathlib import Path
from shutil import rmtree

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from saver_kills import strike_at, tensors
from torch import Tensor

from dlrm_hybrid.checkpoint.commit import Preparing, Shard, clean, commit
from dlrm_hybrid.checkpoint.folder import LATEST_FILE, RetentionPolicy, find, partial_folders
from dlrm_hybrid.checkpoint.reader import open_checkpoint
from dlrm_hybrid.checkpoint.writer import ShardWriter
from dlrm_hybrid.model.tensors import Piece
from dlrm_hybrid.run.supervisor import Rank, run_ranks
from dlrm_hybrid.types import DlrmError, ExitCode, ResourceError

NOTHING = Shard(files={}, tensors={}, seconds=0.0, fault=None)
FULL = Shard(files={}, tensors={}, seconds=0.0, fault="dense.server-0: no space")


@given(order=st.permutations(range(4)), fails=st.sets(st.integers(0, 3)))
def test_all_must_have_written(order: list[int], fails: set[int]) -> None:
    preparing = Preparing(step=7, owed={rank: f"rank-{rank}" for rank in range(4)}, shards={})
    for number, rank in enumerate(order):
        assert not preparing.is_prepared
        if rank in fails:
            with pytest.raises(ResourceError, match=rf"rank-{rank} \(rank {rank}\): dense.server"):
                preparing.took(rank, FULL)
            return
        preparing = preparing.took(rank, NOTHING)
        assert len(preparing.owed) == 3 - number
        with pytest.raises(DlrmError, match=f"rank {rank} has nothing to add .* step 7"):
            preparing.took(rank, NOTHING)
    assert preparing.is_prepared


def shard(shape: list[int], length: int) -> Shard:
    part = {"file": "f", "begin": [0, 0], "shape": [length, 3]}
    entry = {"group": "dense", "dtype": "F32", "shape": shape, "parts": [part]}
    return Shard(files={}, tensors={"t": entry}, seconds=0.0, fault=None)


@pytest.mark.parametrize(
    ("first", "second", "fault"),
    [
        (shard([6, 3], 3), shard([6, 3], 3), None),
        (shard([6, 3], 3), shard([9, 2], 3), "t: two ranks have saved it as different tensors"),
        (shard([6, 3], 3), shard([6, 3], 2), r"t: 15 elements saved, its shape is \[6, 3\]"),
        (shard([6, 3], 3), shard([6, 3], 4), r"t: 21 elements saved, its shape is \[6, 3\]"),
    ],
)
def test_parts_of_ranks_make_whole_tensors(first: Shard, second: Shard, fault: str | None) -> None:
    preparing = Preparing(step=7, owed={0: "a", 1: "b"}, shards={}).took(0, first).took(1, second)
    if fault is None:
        assert len(preparing.contents()["tensors"]["t"]["parts"]) == 2
        return
    with pytest.raises(DlrmError, match=fault):
        preparing.contents()


def test_what_a_rank_that_is_gone_has_written_is_in_no_checkpoint(tmp_path: Path) -> None:
    writers = [ShardWriter(root=tmp_path, rank=f"worker-{one}.0", attempt=0) for one in (0, 1)]
    for rank, writer in enumerate(writers):
        view = torch.full((6, 3), float(rank))
        writer.begin(4, [Piece(name=f"t{rank}", shape=(6, 3), begin=(0, 0), view=view)])
    there, gone = (writer.take(9.0) for writer in writers)
    assert there is not None and gone is not None
    prepared = Preparing(step=4, owed={0: "a", 1: "b"}, shards={}).took(0, there).without(1)
    keep = RetentionPolicy(newest=1, best=False)
    folder, num_bytes = commit(tmp_path, 0, prepared, {"score": None}, keep)
    names = {path.name for path in folder.iterdir()}
    assert names == {*there.files, "manifest.json"} and not names & set(gone.files)
    assert num_bytes == sum(path.stat().st_size for path in folder.iterdir())
    assert open_checkpoint(folder).names("dense") == ["t0"]


class KilledError(BaseException):
    """The leader is gone."""


def piece(step: int, rank: int) -> list[Piece]:
    view = torch.full((2, 3), float(step))
    return [Piece(name="t", shape=(6, 3), begin=(2 * rank, 0), view=view)]


def assert_latest_is_full(root: Path, steps: set[int]) -> None:
    """`latest` names one of these, and every byte of it is right."""
    named = root / (root / LATEST_FILE).read_text().strip()
    assert named == find(root)
    checkpoint = open_checkpoint(named)
    assert checkpoint.manifest.step in steps
    assert checkpoint.tensor("t").eq(float(checkpoint.manifest.step)).all()


@settings(max_examples=60)
@given(data=st.data())
def test_latest_is_full_whoever_fails_or_is_killed(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    root = tmp_path_factory.mktemp("two-phase", numbered=True) / "checkpoints"
    keep = RetentionPolicy(newest=data.draw(st.integers(1, 2)), best=data.draw(st.booleans()))
    step, latest = 0, 0
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda _: None)
        for attempt in range(data.draw(st.integers(1, 6))):
            clean(root)
            assert not partial_folders(root)
            step = data.draw(st.integers(latest + 1, step + 2))  # again, or further than before
            end = data.draw(st.sampled_from(["valid", "fault", "rank killed", "leader killed"]))
            done = _write(root, step, attempt, data.draw(st.permutations(range(3))), end)
            loss = data.draw(st.sampled_from([None, 0.1, 0.2]))
            test = {"part": "test", "monitor": "log_loss", "value": loss}
            facts = {"score": None if loss is None else test}
            if done.is_prepared:
                with pytest.MonkeyPatch.context() as armed:
                    if end == "leader killed":
                        at = data.draw(st.integers(0, 30))
                        strike_at(at, _kill, armed.setattr)
                    try:
                        commit(root, attempt, done, facts, keep)
                    except KilledError:
                        end = "killed"
            if end in ("valid", "leader killed"):  # it was done before it could be killed
                assert find(root).name == f"step_{step:08d}"
            if (root / LATEST_FILE).exists():
                possible = {latest, step} if end == "killed" else {latest}
                possible = {step} if end in ("valid", "leader killed") else possible
                assert_latest_is_full(root, possible)
                latest = open_checkpoint(find(root)).manifest.step
    rmtree(root.parent)


def _kill() -> None:
    raise KilledError


def _write(root: Path, step: int, attempt: int, order: list[int], end: str) -> Preparing:
    """What ranks say that write in this order, until one of them cannot."""
    names = {rank: f"worker-{rank}" for rank in range(3)}
    preparing = Preparing(step=step, owed=names, shards={})
    for rank in order:
        if rank == 1 and end in ("fault", "rank killed"):
            break
        writer = ShardWriter(root=root, rank=names[rank], attempt=attempt)
        writer.begin(step, piece(step, rank))
        shard = writer.take(60.0)
        assert shard is not None
        preparing = preparing.took(rank, shard)
    return preparing


def test_a_process_may_die_at_any_operation_of_a_save(tmp_path: Path) -> None:
    found: list[int] = []
    rank = Rank(index=0, name="worker-0", argument=str(tmp_path), log_folder=tmp_path / "log")
    outcome = run_ranks(
        [rank], "saver_kills:is_killed_anywhere", lambda event: found.append(event.values["code"])
    )
    assert outcome.exit_code == ExitCode.DONE, outcome.message
    assert found[-1] == 0
    assert len(found) > 20
    steps: list[int] = []
    for number in range(len(found)):
        root = tmp_path / str(number)
        checkpoint = open_checkpoint(find(root))
        steps.append(checkpoint.manifest.step)
        assert (root / LATEST_FILE).read_text() == f"step_{steps[-1]:08d}\n"
        expected: dict[str, Tensor] = tensors(steps[-1])
        assert checkpoint.manifest.tensors.keys() == expected.keys()
        for name, tensor in expected.items():
            assert torch.equal(checkpoint.tensor(name), tensor)
    assert steps == sorted(steps)
    assert (steps[0], steps[-1]) == (1, 2)
