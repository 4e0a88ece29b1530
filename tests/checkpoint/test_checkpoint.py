"""Checkpoints of one process and of several ranks: what was saved is loaded, damage is found."""

import json
from dataclasses import asdict
from pathlib import Path
from shutil import rmtree
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch import Tensor

from dlrm_hybrid import disk
from dlrm_hybrid.checkpoint import commit as checkpoint_commit
from dlrm_hybrid.checkpoint import reader as checkpoint
from dlrm_hybrid.checkpoint.commit import Preparing, amend, clean, commit
from dlrm_hybrid.checkpoint.folder import (
    RetentionPolicy,
    complete,
    find,
    find_best,
    partial_folder,
    read,
    shown,
)
from dlrm_hybrid.checkpoint.writer import ShardWriter, write_tensors
from dlrm_hybrid.model.row_storage import InFiles
from dlrm_hybrid.model.tensors import Piece, full_pieces
from dlrm_hybrid.types import ConfigError, DataError, DlrmError, Group, ResourceError

ONE, TWO = (RetentionPolicy(newest=newest, best=False) for newest in (1, 2))
DENSE = "dense.worker-0.safetensors"
Groups = dict[str, dict[str, Tensor]]


def groups(fill: float) -> Groups:
    storage = torch.full((6, 2), fill)
    return {
        "dense": {"bottom.1.weight": torch.full((3, 2), fill), "bottom.1.bias": torch.ones(3)},
        # Tables are views into one storage, as FBGEMM keeps them.
        "embeddings": {"embedding.1": storage[:4], "embedding.2": storage[4:]},
    }


def pieces_of(held: Groups) -> list[Piece]:
    return [piece for group in held for piece in full_pieces(held[group], Group(group))]


def write(root: Path, step: int, *ranks: list[Piece], place: str | None = None) -> Preparing:
    """What these ranks have written."""
    names = {number: f"worker-{number}" for number in range(len(ranks))}
    preparing = Preparing(step=step, owed=names, shards={})
    for number, pieces in enumerate(ranks):
        writer = ShardWriter(root=root, rank=names[number], attempt=0, place=place)
        writer.begin(step, pieces)
        shard = writer.take(60.0)
        assert shard is not None
        preparing = preparing.took(number, shard)
    return preparing


def save(root: Path, step: int, held: Groups, keep: RetentionPolicy, **facts: object) -> Path:
    return commit(root, 0, write(root, step, pieces_of(held)), facts, keep)[0]


def load(folder: Path, held: Groups) -> None:
    checkpoint.open_checkpoint(folder).fill(pieces_of(held))


def test_what_was_saved_is_loaded(tmp_path: Path) -> None:
    root = tmp_path / "checkpoints"
    folder, num_bytes = commit(root, 0, write(root, 12, pieces_of(groups(0.1))), {"seed": 3}, TWO)
    assert folder.name == "step_00000012"
    assert num_bytes == sum(path.stat().st_size for path in folder.iterdir())
    into = groups(9.0)
    load(find(tmp_path), into)
    for group, tensors in groups(0.1).items():
        for name, tensor in tensors.items():
            assert torch.equal(into[group][name], tensor)
    manifest = read(folder)
    assert (manifest.step, manifest.values["seed"]) == (12, 3)
    assert not list(tmp_path.glob("**/*.partial"))


def test_others_can_read_the_files(tmp_path: Path) -> None:
    tensors = {
        "f32": torch.randn(3, 5),
        "bf16": torch.randn(4).bfloat16(),
        "flags": torch.tensor([True, False, True]),
        "bytes": torch.arange(7, dtype=torch.uint8),
        "count": torch.tensor(3),
        "nothing": torch.empty(0, 4),
    }
    path = tmp_path / "some.safetensors"
    written = write_tensors(path, tensors)
    assert written == disk.content(path)
    found = load_file(path)
    assert found.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name], tensor)


def test_the_writer_copies_before_it_returns(tmp_path: Path) -> None:
    held = groups(1.0)
    writer = ShardWriter(root=tmp_path, rank="worker-0", attempt=0)
    for step in (1, 2):
        writer.begin(step, pieces_of(held))
        for tensors in held.values():
            for tensor in tensors.values():
                tensor.fill_(step + 1.0)
        with pytest.raises(DlrmError, match="before the last one is written"):
            writer.begin(step + 1, [])
        assert writer.take(60.0) is not None
        assert writer.take(0.0) is None
        saved = load_file(partial_folder(tmp_path, step, 0) / DENSE)
        assert saved["bottom.1.weight"].eq(float(step)).all()


def test_rows_in_files_are_written_before_the_writer_returns(tmp_path: Path) -> None:
    """A copy of them may not fit into memory."""
    storage = InFiles(tmp_path / "rows")
    table = storage.zeros(50, 4)
    writer = ShardWriter(root=tmp_path, rank="tables-0", attempt=0, storage=storage)
    for step in (1, 2):
        table.fill_(float(step))
        writer.begin(step, full_pieces({"embedding.1.weight": table}))
        shard = writer.take(0.0)
        assert shard is not None
        (file,) = shard.files
        saved = load_file(partial_folder(tmp_path, step, 0) / file)
        assert saved["embedding.1.weight"].eq(float(step)).all()
    table[3, 3] = torch.nan
    writer.begin(3, full_pieces({"embedding.1.weight": table}))
    shard = writer.take(0.0)
    assert shard is not None
    assert shard.not_finite == "embedding.1.weight"


@settings(max_examples=60)
@given(data=st.data())
def test_any_pieces_are_read_from_any_others(tmp_path: Path, data: st.DataObject) -> None:
    rows, columns = data.draw(st.integers(1, 9)), data.draw(st.integers(1, 5))
    table = torch.arange(rows * columns, dtype=torch.float32).view(rows, columns)

    def cut(tensor: Tensor) -> list[Piece]:
        every = data.draw(st.sampled_from((1, 1, 2, 3, 10)))
        return [piece for first in range(every) for piece in boxes(tensor, first, every)]

    def boxes(tensor: Tensor, first: int, every: int) -> list[Piece]:
        own = tensor[first::every]
        row_cuts = [0, *sorted(data.draw(st.sets(st.integers(0, len(own))))), len(own)]
        column_cuts = [0, *sorted(data.draw(st.sets(st.integers(1, columns)))), columns]
        return [
            Piece(
                name="t",
                shape=(rows, columns),
                begin=(first + every * top, left),
                view=own[top:bottom, left:right],
                every=every,
            )
            for top, bottom in zip(row_cuts, row_cuts[1:], strict=False)
            for left, right in zip(column_cuts, column_cuts[1:], strict=False)
            if bottom > top and right > left
        ]

    pieces = cut(table)
    mine = data.draw(st.sets(st.integers(0, len(pieces) - 1)))
    shares = [
        [piece for number, piece in enumerate(pieces) if (number in mine) is is_mine]
        for is_mine in (True, False)
    ]
    root = tmp_path / "any"
    rmtree(root, ignore_errors=True)
    folder, _ = commit(root, 0, write(root, 1, *shares), {}, ONE)
    into = torch.full((rows, columns), torch.nan)
    checkpoint.open_checkpoint(folder).fill(cut(into))
    assert torch.equal(into, table)
    into = torch.full((rows, columns), torch.nan)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checkpoint, "BLOCK_ELEMENTS", data.draw(st.integers(1, 9)))
        checkpoint.open_checkpoint(folder).fill(cut(into))
    assert torch.equal(into, table)


def test_a_file_is_opened_once_whatever_is_read_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    many = {f"t{number}": torch.full((2,), float(number)) for number in range(100)}
    folder = save(tmp_path / "checkpoints", 1, {"dense": many}, ONE)
    opened: list[Path] = []

    def safe_open(path: Path, framework: str) -> Any:
        opened.append(path)
        return original(path, framework=framework)

    original: Any = checkpoint.safetensors.safe_open
    monkeypatch.setattr(checkpoint.safetensors, "safe_open", safe_open)
    found = checkpoint.open_checkpoint(folder).tensors(many)
    assert all(torch.equal(found[name], many[name]) for name in many)
    assert opened == [folder / DENSE]


def test_the_newest_are_kept_and_latest_names_the_last(tmp_path: Path) -> None:
    for step in (1, 2, 10, 3000):
        save(tmp_path, step, groups(float(step)), TWO)
    assert sorted(path.name for path in tmp_path.glob("step_*")) == [
        "step_00000010",
        "step_00003000",
    ]
    assert find(tmp_path).name == "step_00003000"
    assert find(tmp_path / "step_00000010").name == "step_00000010"


def test_a_step_of_nine_digits_is_after_one_of_eight(tmp_path: Path) -> None:
    last, first = 99_999_999, 100_000_000
    for step in (last, first):
        save(tmp_path, step, groups(1.0), TWO)
    assert [folder.name for folder in complete(tmp_path)] == [f"step_{last}", f"step_{first}"]
    save(tmp_path, last, groups(1.0), TWO)  # of a run that went back: what came after is gone
    assert [folder.name for folder in complete(tmp_path)] == [f"step_{last}"]


def scored(loss: float | None) -> dict[str, object] | None:
    """Facts of an evaluation of the test part, or none."""
    return None if loss is None else {"part": "test", "monitor": "log_loss", "value": loss}


def test_the_best_is_kept_besides_and_found_by_name(tmp_path: Path) -> None:
    keep = RetentionPolicy(newest=1, best=True)
    losses = {1: 0.6, 2: None, 3: 0.4, 4: 0.5, 5: None, 6: 0.4, 7: 0.7}
    kept = {1: [1], 2: [1, 2], 3: [3], 4: [3, 4], 5: [3, 5], 6: [6], 7: [6, 7]}
    for step, loss in losses.items():
        save(tmp_path, step, groups(float(step)), keep, score=scored(loss))
        assert [int(path.name[5:]) for path in sorted(tmp_path.glob("step_*"))] == kept[step]
        assert find(tmp_path / "best").name == f"step_{kept[step][0]:08d}"
        assert find(tmp_path / "latest") == find(tmp_path) == tmp_path / f"step_{step:08d}"
    amend(tmp_path, 7, {"score": scored(0.2)}, keep)
    assert find(tmp_path / "best") == find(tmp_path)
    assert [path.name for path in tmp_path.glob("step_*")] == ["step_00000007"]
    amend(tmp_path, 8, {"score": scored(0.1)}, keep)  # of another run
    assert find(tmp_path / "best") == find(tmp_path)
    save(tmp_path, 9, groups(9), ONE, score=scored(0.1))
    assert not (tmp_path / "best").exists()


def test_the_best_is_the_best_of_those_scored_as_the_newest(tmp_path: Path) -> None:
    keep = RetentionPolicy(newest=9, best=True)

    def best(step: int, part: str, monitor: str, value: float) -> str:
        score = {"part": part, "monitor": monitor, "value": value}
        save(tmp_path, step, groups(float(step)), keep, score=score)
        return find(tmp_path / "best").name

    save(tmp_path, 1, groups(1.0), keep, score=scored(0.1))
    assert best(2, "test", "log_loss", 0.2) == "step_00000001"
    assert best(3, "validation", "log_loss", 0.5) == "step_00000003"
    assert best(4, "validation", "auc", 0.7) == "step_00000004"
    assert best(5, "validation", "auc", 0.6) == "step_00000004"
    assert best(6, "validation", "auc", 0.8) == "step_00000006"
    save(tmp_path, 7, groups(7.0), keep, score=None)
    assert find(tmp_path / "best").name == "step_00000006"


def test_a_line_says_which_of_best_and_latest_was_taken(tmp_path: Path) -> None:
    keep = RetentionPolicy(newest=3, best=True)
    for step, loss in ((1, 0.25), (2, 0.5), (3, 0.75)):
        save(tmp_path, step, groups(float(step)), keep, score=scored(loss))
    one, two, three = (tmp_path / f"step_{step:08d}" for step in (1, 2, 3))
    score = "test log-loss 0.2500"
    assert find_best(tmp_path) == one
    assert find_best(tmp_path / "latest") == find_best(three) == three
    best = f"checkpoint {one}, step 1, the best: {score}; {tmp_path / 'latest'} is step 3"
    latest = f"checkpoint {three}, step 3, the latest; {tmp_path / 'best'} is step 1: {score}"
    assert [shown(one, 1), shown(three, 3)] == [best, latest]
    assert shown(two, 2) == f"checkpoint {two}, step 2"
    (one / "manifest.json").write_text("{}")
    assert shown(three, 3) == f"checkpoint {three}, step 3"
    (tmp_path / "best").unlink()
    assert find_best(tmp_path) == three


@pytest.mark.parametrize("file", [DENSE, "manifest.json"])
def test_the_one_before_a_damaged_one_is_offered(tmp_path: Path, file: str) -> None:
    for step in (1, 2, 3):
        save(tmp_path, step, groups(float(step)), TWO)
    before, newest = (tmp_path / f"step_{step:08d}" for step in (2, 3))
    (newest / file).write_bytes(b"{}")
    with pytest.raises(DataError, match=file) as caught:
        load(find(tmp_path), groups(0.0))
    offer = f"; to resume from the one before, {before}, remove {newest}"
    assert str(caught.value).endswith(offer)
    (before / file).write_bytes(b"{}")
    with pytest.raises(DataError, match=rf"{before}/{file}: [^;]*$"):
        load(before, groups(0.0))


def test_what_a_cut_short_life_has_left_does_not_count(tmp_path: Path) -> None:
    folder = save(tmp_path, 5, groups(5.0), ONE)
    (folder / "manifest.json").unlink()  # its removal was cut short
    (tmp_path / "latest").unlink()
    save(tmp_path, 5, groups(2.0), ONE)
    into = groups(0.0)
    load(find(tmp_path), into)
    assert into["dense"]["bottom.1.weight"].eq(2.0).all()
    (tmp_path / "latest").write_text("step_00000003\n")  # it was valid, but `latest` did not move
    save(tmp_path, 4, groups(4.0), ONE)
    assert [path.name for path in tmp_path.glob("step_*")] == ["step_00000004"]
    partial_folder(tmp_path, 6, 1).mkdir()
    clean(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {"latest", "step_00000004"}


@pytest.mark.parametrize("file", [DENSE, "embeddings.worker-0.safetensors", "manifest.json"])
def test_every_flipped_byte_and_every_cut_is_found(tmp_path: Path, file: str) -> None:
    folder = save(tmp_path, 1, groups(1.0), ONE)
    path = folder / file
    data = path.read_bytes()
    damaged = [data[:length] for length in range(len(data))] + [
        data[:at] + bytes([data[at] ^ 0x10]) + data[at + 1 :] for at in range(len(data))
    ]
    for content in damaged:
        path.write_bytes(content)
        with pytest.raises(DataError, match=path.name):
            load(folder, groups(0.0))
    path.write_bytes(data)
    load(folder, groups(0.0))


def test_a_missing_file_and_foreign_manifests_are_refused(tmp_path: Path) -> None:
    folder = save(tmp_path, 1, groups(1.0), ONE)
    (folder / DENSE).unlink()
    with pytest.raises(DataError, match=r"dense\.worker-0\.safetensors: No such file"):
        load(folder, groups(0.0))
    for text in ("", "[]", "{}", json.dumps({"format": 99})):
        (folder / "manifest.json").write_text(text)
        with pytest.raises(DataError, match=r"manifest\.json"):
            read(folder)
    (folder / "manifest.json").write_text(json.dumps({"format": 1, "step": 1, "files": {}}))
    with pytest.raises(DataError, match="of format 1; this version of the program reads format 2"):
        read(folder)
    with pytest.raises(DataError, match="no checkpoint found .*; name the folder of a run"):
        find(tmp_path / "elsewhere")
    (tmp_path / "latest").write_bytes(b"\xffstep_00000001")
    with pytest.raises(DataError, match=r"no usable checkpoint here\n .* of format 1"):
        read(find(tmp_path / "latest"))


def test_other_shapes_and_names_are_refused(tmp_path: Path) -> None:
    folder = save(tmp_path, 1, groups(1.0), ONE)
    wider = groups(0.0)
    wider["dense"]["bottom.1.bias"] = torch.zeros(4)
    with pytest.raises(DataError, match=r"bottom\.1\.bias is torch\.float32 \[3\], .* \[4\]"):
        load(folder, wider)
    deeper = groups(0.0)
    deeper["dense"]["bottom.2.bias"] = torch.zeros(4)
    with pytest.raises(DataError, match=r"no tensor bottom\.2\.bias"):
        load(folder, deeper)


@pytest.mark.parametrize("place", [None, "import.output = theirs"])
@pytest.mark.parametrize("file", [".step_00000002.0.partial/" + DENSE, ".latest.partial"])
def test_a_disk_that_is_full_leaves_the_old_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, file: str, place: str | None
) -> None:
    root = tmp_path / "checkpoints"
    save(root, 1, groups(1.0), ONE)
    real = disk.write

    def full(path: Path, parts: object) -> disk.Content:
        if path == root / file:
            raise OSError(28, "No space left on device", str(path))
        return real(path, parts)

    monkeypatch.setattr("dlrm_hybrid.checkpoint.writer.write", full)
    monkeypatch.setattr(disk, "write", full)
    with pytest.raises(ResourceError) as caught:
        prepared = write(root, 2, pieces_of(groups(2.0)), place=place)
        commit(root, 0, prepared, {}, ONE, place)
    monkeypatch.undo()
    told = str(caught.value)
    assert f"{root / file}: the checkpoint cannot be written: No space left on device" in told
    run = f"hydra.run.dir = {tmp_path}; checkpoints before it are intact"
    assert told.endswith(f"No space left on device ({place or run})")
    assert told.startswith("worker-0 (rank 0): ") is (DENSE in file)
    into = groups(0.0)
    load(find(tmp_path), into)
    assert into["dense"]["bottom.1.weight"].eq(1.0).all()


def test_a_file_of_another_machine_that_is_not_seen_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpoint_commit, "SEEN_SECONDS", 0.0)
    root = tmp_path / "run" / "checkpoints"
    pieces = full_pieces({"t": torch.zeros(2)})
    prepared = write(root, 1, [], pieces)
    (partial_folder(root, 1, 0) / "dense.worker-1.safetensors").unlink()
    with pytest.raises(ConfigError, match=r"worker-1 has written .*dense\.worker-1\.safe") as told:
        commit(root, 0, prepared, {}, ONE)
    assert f"hydra.run.dir = {tmp_path / 'run'} must be shared" in str(told.value)


def test_shards_travel_as_json(tmp_path: Path) -> None:
    (shard,) = write(tmp_path, 1, full_pieces({"t": torch.zeros(2, 3)})).shards.values()
    assert type(shard)(**json.loads(json.dumps(asdict(shard)))) == shard
