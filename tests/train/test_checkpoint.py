import json
from pathlib import Path
from shutil import rmtree

import pytest
import torch
from torch import Tensor

from dlrm_hybrid.train import checkpoint
from dlrm_hybrid.train.checkpoint_folder import Keeping, find, read_facts
from dlrm_hybrid.types import DataError, ResourceError

ONE, TWO = (Keeping(newest=newest, best=False) for newest in (1, 2))
Groups = dict[str, dict[str, Tensor]]


def groups(fill: float) -> Groups:
    storage = torch.full((6, 2), fill)
    return {
        "dense": {"bottom.1.weight": torch.full((3, 2), fill), "bottom.1.bias": torch.ones(3)},
        # Tables are views into one storage, as FBGEMM keeps them.
        "embeddings": {"embedding.1": storage[:4], "embedding.2": storage[4:]},
    }


def test_what_was_saved_is_loaded(tmp_path: Path) -> None:
    saved = checkpoint.save(tmp_path / "checkpoints", 12, groups(0.1), {"seed": 3}, keep=TWO)
    assert saved.folder.name == "step_00000012"
    assert saved.num_bytes == sum(path.stat().st_size for path in saved.folder.iterdir())
    into = groups(9.0)
    checkpoint.load(find(tmp_path), into)
    for group, tensors in groups(0.1).items():
        for name, tensor in tensors.items():
            assert torch.equal(into[group][name], tensor)
    facts = read_facts(saved.folder)
    assert (facts["step"], facts["seed"]) == (12, 3)
    assert not list(tmp_path.glob("**/*.partial"))


def test_the_newest_are_kept_and_latest_names_the_last(tmp_path: Path) -> None:
    for step in (1, 2, 10, 3000):
        checkpoint.save(tmp_path, step, groups(step), {}, keep=TWO)
    assert sorted(path.name for path in tmp_path.glob("step_*")) == [
        "step_00000010",
        "step_00003000",
    ]
    assert find(tmp_path).name == "step_00003000"
    assert find(tmp_path / "step_00000010").name == "step_00000010"


def test_the_best_is_kept_besides(tmp_path: Path) -> None:
    keep = Keeping(newest=1, best=True)
    losses = {1: 0.6, 2: None, 3: 0.4, 4: 0.5, 5: None, 6: 0.4, 7: 0.7}
    kept = {1: [1], 2: [1, 2], 3: [3], 4: [3, 4], 5: [3, 5], 6: [6], 7: [6, 7]}
    for step, loss in losses.items():
        checkpoint.save(tmp_path, step, groups(step), {"test_loss": loss}, keep)
        assert [int(path.name[5:]) for path in sorted(tmp_path.glob("step_*"))] == kept[step]
        assert (tmp_path / "best").read_text() == f"step_{kept[step][0]:08d}\n"
        assert find(tmp_path).name == f"step_{step:08d}"
    checkpoint.save(tmp_path, 8, groups(8), {"test_loss": 0.1}, ONE)
    assert not (tmp_path / "best").exists()


@pytest.mark.parametrize("file", ["dense.safetensors", "manifest.json"])
def test_the_one_before_a_damaged_one_is_offered(tmp_path: Path, file: str) -> None:
    for step in (1, 2, 3):
        checkpoint.save(tmp_path, step, groups(step), {}, keep=TWO)
    before, newest = (tmp_path / f"step_{step:08d}" for step in (2, 3))
    (newest / file).write_bytes(b"{}")
    with pytest.raises(DataError, match=file) as caught:
        checkpoint.load(find(tmp_path), groups(0.0))
    offer = f"; the one before it is {before}: to go on from there remove {newest}"
    assert str(caught.value).endswith(offer)
    (before / file).write_bytes(b"{}")
    with pytest.raises(DataError, match=rf"{before}/{file}: [^;]*$"):
        checkpoint.load(before, groups(0.0))


def test_without_the_latest_the_newest_that_is_there_is_found(tmp_path: Path) -> None:
    for step in (1, 2):
        checkpoint.save(tmp_path, step, groups(step), {}, keep=TWO)
    rmtree(tmp_path / "step_00000002")
    assert find(tmp_path).name == "step_00000001"


def test_a_step_is_written_once(tmp_path: Path) -> None:
    folder = checkpoint.save(tmp_path, 1, groups(1.0), {}, keep=TWO).folder
    before = (folder / "manifest.json").stat().st_mtime_ns
    checkpoint.save(tmp_path, 1, groups(1.0), {}, keep=TWO)
    assert (folder / "manifest.json").stat().st_mtime_ns == before


def test_a_removal_cut_short_does_not_count(tmp_path: Path) -> None:
    folder = checkpoint.save(tmp_path, 1, groups(1.0), {}, keep=TWO).folder
    (folder / "manifest.json").unlink()
    checkpoint.save(tmp_path, 1, groups(2.0), {}, keep=TWO)
    into = groups(0.0)
    checkpoint.load(find(tmp_path), into)
    assert into["dense"]["bottom.1.weight"].eq(2.0).all()


@pytest.mark.parametrize("file", ["dense.safetensors", "embeddings.safetensors"])
def test_every_flipped_byte_and_every_cut_is_found(tmp_path: Path, file: str) -> None:
    folder = checkpoint.save(tmp_path, 1, groups(1.0), {}, keep=ONE).folder
    path = folder / file
    whole = path.read_bytes()
    damaged = [whole[:length] for length in range(len(whole))] + [
        whole[:at] + bytes([whole[at] ^ 0x10]) + whole[at + 1 :] for at in range(len(whole))
    ]
    path.chmod(0o644)
    for content in damaged:
        path.write_bytes(content)
        with pytest.raises(DataError, match=file):
            checkpoint.load(folder, groups(0.0))
    path.write_bytes(whole)
    checkpoint.load(folder, groups(0.0))


def test_a_missing_file_and_foreign_manifests_are_refused(tmp_path: Path) -> None:
    folder = checkpoint.save(tmp_path, 1, groups(1.0), {}, keep=ONE).folder
    (folder / "dense.safetensors").unlink()
    with pytest.raises(DataError, match=r"dense\.safetensors: No such file"):
        checkpoint.load(folder, groups(0.0))
    for text in ("", "[]", "{}", json.dumps({"format": 99})):
        (folder / "manifest.json").write_text(text)
        with pytest.raises(DataError, match=r"manifest\.json"):
            read_facts(folder)
    with pytest.raises(DataError, match="no checkpoint here"):
        find(tmp_path / "elsewhere")


def test_other_shapes_and_names_are_refused(tmp_path: Path) -> None:
    folder = checkpoint.save(tmp_path, 1, groups(1.0), {}, keep=ONE).folder
    wider = groups(0.0)
    wider["dense"]["bottom.1.bias"] = torch.zeros(4)
    with pytest.raises(DataError, match=r"bottom\.1\.bias is torch\.float32 \[3\], .* \[4\]"):
        checkpoint.load(folder, wider)
    deeper = groups(0.0)
    deeper["dense"]["bottom.2.bias"] = torch.zeros(4)
    with pytest.raises(DataError, match=r"other tensors .* bottom\.2\.bias"):
        checkpoint.load(folder, deeper)
    with pytest.raises(DataError, match=r"momentum\.safetensors: not in this checkpoint"):
        checkpoint.load(folder, {"momentum": {}})


def test_a_disk_that_cannot_be_written_leaves_the_old_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint.save(tmp_path, 1, groups(1.0), {}, keep=ONE)

    def full(path: Path) -> None:
        raise OSError(28, "No space left on device", str(path))

    monkeypatch.setattr(checkpoint, "_flush", full)
    with pytest.raises(ResourceError, match="No space left on device"):
        checkpoint.save(tmp_path, 2, groups(2.0), {}, keep=ONE)
    monkeypatch.undo()
    into = groups(0.0)
    checkpoint.load(find(tmp_path), into)
    assert into["dense"]["bottom.1.weight"].eq(1.0).all()
