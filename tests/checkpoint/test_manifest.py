"""Manifests that lie with a checksum that fits: refused with file and field, nothing is touched."""

import json
import os
from collections.abc import Callable
from dataclasses import asdict
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dlrm_hybrid.checkpoint import reader as checkpoint
from dlrm_hybrid.checkpoint.commit import Preparing, commit
from dlrm_hybrid.checkpoint.folder import (
    RetentionPolicy,
    complete,
    find,
    has_checkpoint,
    lost_latest,
    read,
    read_facts,
)
from dlrm_hybrid.checkpoint.manifest import manifest_text
from dlrm_hybrid.checkpoint.writer import ShardWriter
from dlrm_hybrid.model.tensors import Piece
from dlrm_hybrid.run.rank.facts import resumed
from dlrm_hybrid.run.request import TrainTask
from dlrm_hybrid.train.progress import Progress
from dlrm_hybrid.types import DataError, Group

Values = dict[str, Any]
FILE = "dense.worker-0.safetensors"
FACTS = {"progress": {}, "config": {}, "config_hash": "", "rows": []}


def save(root: Path, step: int, **facts: object) -> Path:
    """A checkpoint of one tensor of 4 × 2 in two parts, filled with its step."""
    table = torch.full((4, 2), float(step))
    halves = [
        Piece(name="t", shape=(4, 2), begin=(top, 0), view=table[top : top + 2]) for top in (0, 2)
    ]
    writer = ShardWriter(root=root, rank="worker-0", attempt=0)
    writer.begin(step, halves)
    shard = writer.take(60.0)
    assert shard is not None
    preparing = Preparing(step=step, owed={0: "worker-0"}, shards={}).took(0, shard)
    return commit(root, 0, preparing, facts, RetentionPolicy(newest=9, best=True))[0]


def read_dense(folder: Path) -> dict[str, torch.Tensor]:
    """All dense tensors of a checkpoint."""
    found = checkpoint.open_checkpoint(folder)
    return found.tensors(found.names("dense"))


def forge(folder: Path, change: Callable[[Values], object]) -> None:
    """Change a manifest, and seal it again."""
    path = folder / "manifest.json"
    values = json.loads(path.read_text())
    del values["format"], values["xxh3"]
    change(values)
    path.write_text(manifest_text(values))


def part(values: Values, number: int = 0) -> Values:
    return values["tensors"]["t"]["parts"][number]


LIES: dict[str, tuple[Callable[[Values], object], str]] = {
    "arithmetic that is a list": (lambda v: v.update(arithmetic=[1]), "arithmetic"),
    "a file above": (lambda v: part(v).update(file="../x"), "tensors.t.parts.0.file = '../x'"),
    "an absolute file": (lambda v: part(v).update(file="/etc/passwd"), "tensors.t.parts.0.file"),
    "a name with an escape": (
        lambda v: part(v).update(file="\x1b[2Jx"),
        r"tensors.t.parts.0.file = '\x1b[2Jx'",
    ),
    "a file that is not listed": (lambda v: part(v).update(file="x"), "is not among files"),
    "a listed file above": (lambda v: v["files"].update({"../x": v["files"][FILE]}), "files.../x"),
    "a negative begin": (lambda v: part(v).update(begin=[-1, 0]), "tensors.t.parts.0.begin.0 = -1"),
    "an overlap": (lambda v: part(v, 1).update(begin=[1, 0]), "tensors.t.parts: do not make up"),
    "a gap": (lambda v: v["tensors"]["t"]["parts"].pop(), "tensors.t.parts: do not make up"),
    "the same part twice": (
        lambda v: v["tensors"]["t"]["parts"].append(part(v)),
        "tensors.t.parts: do not make up",
    ),
    "a part beyond": (lambda v: part(v, 1).update(begin=[4, 0]), "tensors.t.parts: do not make"),
    "a part of other dimensions": (lambda v: part(v).update(begin=[0]), "tensors.t.parts: do not"),
    "more elements than bytes": (
        lambda v: v["tensors"].update(
            huge={
                "group": "dense",
                "dtype": "F64",
                "shape": [2**40, 2**20],
                "parts": [{"file": FILE, "begin": [0, 0], "shape": [2**40, 2**20]}],
            }
        ),
        f"files.{FILE}.num_bytes",
    ),
    "an unknown dtype": (lambda v: v["tensors"]["t"].update(dtype="C64"), "tensors.t.dtype"),
    "a wider dtype": (lambda v: v["tensors"]["t"].update(dtype="F64"), f"{FILE}: t@0x0 is F32"),
    "other shapes": (
        lambda v: (
            v["tensors"]["t"].update(shape=[2, 4]),
            part(v).update(shape=[1, 4]),
            part(v, 1).update(begin=[1, 0], shape=[1, 4]),
        ),
        "manifest says",
    ),
    "a text for a number": (lambda v: v.update(step="1"), "step = '1'"),
    "a step of -1": (lambda v: v.update(step=-1), "step = -1"),
    "a huge step": (lambda v: v.update(step=10**30), "step = 1000"),
    "the step of another folder": (lambda v: v.update(step=2), "step = 2: the folder is step_0"),
    "an infinite loss": (lambda v: v.update(score=1e999), "not a checkpoint: Infinity"),
    "rows that are no list": (lambda v: v.update(rows="abc"), "rows = 'abc'"),
    "a configuration that is none": (lambda v: v.update(config=[1]), "config = [1]"),
    "no tensors": (lambda v: v.pop("tensors"), "tensors = "),
    "tensors that are none": (lambda v: v.update(tensors=None), "tensors = None"),
}


@pytest.mark.parametrize("lie", LIES)
def test_a_manifest_that_lies_is_refused(lie: str, tmp_path: Path) -> None:
    folder = save(tmp_path, 1, **FACTS)
    change, told = LIES[lie]
    forge(folder, change)
    with pytest.raises(DataError) as caught:
        read_dense(folder)
    message = str(caught.value)
    assert message.startswith(str(folder))
    assert told in message
    assert message.isprintable()


def test_further_facts_are_accepted_and_missing_ones_named(tmp_path: Path) -> None:
    folder = save(tmp_path, 1, **FACTS, arithmetic={"threads": 1})
    assert read_facts(folder)["arithmetic"] == {"threads": 1}
    forge(folder, lambda values: values.pop("rows"))
    assert read(folder).step == 1
    with pytest.raises(DataError, match=r"manifest\.json: does not say rows"):
        read_facts(folder)


@pytest.mark.parametrize("file", [FILE, "manifest.json"])
@pytest.mark.parametrize("other", ["link outside", "folder", "pipe", "device"])
def test_only_plain_files_of_the_folder_are_opened(file: str, other: str, tmp_path: Path) -> None:
    folder = save(tmp_path, 1)
    path = folder / file
    outside = path.rename(tmp_path / "outside")
    if other == "link outside":
        path.symlink_to(outside)
    elif other == "folder":
        path.mkdir()
    elif other == "pipe":
        os.mkfifo(path)
    else:
        path.symlink_to("/dev/zero")
    with pytest.raises(DataError, match=file):
        read_dense(folder)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"step": 2}, "is none of step 1"),
        ({"loader": {"epoch": 10**30, "block": 0, "row": 0}}, "is none of step 1"),
        ({"samples": -1}, "is none of step 1"),
        ({"emptied": 2}, "is none of step 1"),
        ({"loader": None}, "'progress.loader' is None"),
        ({"interval": {"rows": "1"}}, "'progress.interval.rows' is '1'"),
        ({"score": []}, "'progress.score' is []"),
    ],
)
def test_progress_that_cannot_be_is_refused(change: Values, told: str) -> None:
    task = TrainTask(
        run_folder="run", prepared="", resume_from="run", rank=0, attempt=0, rendezvous=""
    )
    facts = {"step": 1, "progress": {**asdict(Progress(step=1)), **change}}
    with pytest.raises(DataError) as caught:
        resumed(task, facts, frozenset(Group))
    assert told in str(caught.value)
    good = {**facts, "progress": asdict(Progress(step=1))}
    assert resumed(task, good, frozenset(Group)) == Progress(step=1)


def test_a_manifest_of_any_size_or_depth_is_refused(tmp_path: Path) -> None:
    folder = save(tmp_path, 1)
    path = folder / "manifest.json"
    for text in ("[" * 1_000_000, '{"format": ' + "1" * 10_000 + "}", '{"format": NaN}'):
        path.write_text(text)
        with pytest.raises(DataError, match=r"manifest\.json: not a checkpoint"):
            read(folder)
    with path.open("wb") as file:
        file.truncate(1 << 40)
    with pytest.raises(DataError, match=r"manifest\.json: has more than 33,554,432 bytes"):
        read(folder)


def test_what_others_have_put_beside_checkpoints_is_ignored(tmp_path: Path) -> None:
    root = tmp_path / "checkpoints"
    first, second = (save(root, step) for step in (1, 2))
    for name in ("step_00000250.bak", "step_", "step_1", "step_+0000003", "step_٠٠٠٠٠٠٠٣"):
        copied = root / name
        copied.mkdir()
        (copied / "manifest.json").write_bytes((first / "manifest.json").read_bytes())
    (root / "step_00000900").symlink_to(second)
    assert complete(root) == [first, second]
    assert save(root, 3) == find(tmp_path)
    assert (root / "step_00000250.bak").is_dir()
    # Whoever names a copy means it.
    assert read(find(root / "step_00000250.bak")).step == 1


@pytest.mark.parametrize(
    "text", [None, "", "step_00000009\n", "../step_00000002\n", "x" * 200, "\0"]
)
def test_a_latest_that_is_lost_is_found_again(text: str | None, tmp_path: Path) -> None:
    root = tmp_path / "checkpoints"
    _, second, third = (save(root, step) for step in (1, 2, 3))
    assert lost_latest(tmp_path) is None
    if text is None:
        (root / "latest").unlink()
    else:
        (root / "latest").write_text(text)
    assert has_checkpoint(tmp_path)
    told = lost_latest(tmp_path)
    assert told is not None
    assert told.endswith("does not name a complete checkpoint; using the newest, step_00000003")
    assert find(tmp_path) == find(root) == find(root / "latest") == third
    forge(third, lambda values: values.update(step=7))
    assert find(tmp_path) == second
    for folder in complete(root):
        (folder / "manifest.json").write_text("{}")
    assert has_checkpoint(tmp_path)  # a run does not begin anew, and deletes none of them
    with pytest.raises(DataError, match="no usable checkpoint here"):
        find(tmp_path)


@settings(max_examples=200)
@given(data=st.data())
def test_parts_are_accepted_exactly_if_each_element_is_in_one(
    tmp_path: Path, data: st.DataObject
) -> None:
    shape = data.draw(st.lists(st.integers(0, 3), max_size=3))
    boxes = data.draw(
        st.lists(st.tuples(*([st.tuples(*([st.integers(0, 3)] * len(shape)))] * 2)), max_size=4)
    )
    everies = data.draw(st.lists(st.sampled_from((1, 1, 1, 2, 3)), min_size=4, max_size=4))
    if data.draw(st.booleans()):
        everies = everies[:1] * 4
    count = {place: 0 for place in product(*(range(length) for length in shape))}
    inside = True
    for (begin, length), every in zip(boxes, everies, strict=False):
        steps = [every, 1, 1]  # of rows, elements of the first dimension
        spans = zip(begin, length, steps, strict=False)
        for place in product(*(range(b, b + n * step, step) for b, n, step in spans)):
            inside = inside and place in count
            count[place] = count.get(place, 0) + 1
    parts = [
        {"file": FILE, "begin": list(b), "shape": list(n), "every": every}
        for (b, n), every in zip(boxes, everies, strict=False)
    ]
    alike = len({part["every"] for part in parts} | ({1} if not shape else set())) <= 1
    values = {
        "step": 0,
        "files": {FILE: {"num_bytes": 10**6, "xxh3": "0" * 32}},
        "tensors": {"t": {"group": "g", "dtype": "F32", "shape": shape, "parts": parts}},
    }
    (tmp_path / "manifest.json").write_text(manifest_text(values))
    if alike and inside and all(number == 1 for number in count.values()):
        assert read(tmp_path).tensors["t"].shape == tuple(shape)
    else:
        with pytest.raises(DataError, match=r"tensors\.t\.parts: do not make up"):
            read(tmp_path)


@settings(max_examples=150)
@given(
    at=st.lists(st.sampled_from(["step", "files", FILE, "tensors", "t", "parts", "0", "begin"])),
    value=st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    ),
)
def test_any_value_anywhere_is_data_or_refused(
    tmp_path: Path, at: list[str], value: object
) -> None:
    folder = tmp_path / "any"
    if not folder.exists():
        save(tmp_path, 1).rename(folder)
        (folder / "manifest.json").rename(folder / "original")
    values = json.loads((folder / "original").read_text())
    del values["format"], values["xxh3"]
    inner: Any = values
    for key in at[:-1]:
        following = inner.get(key) if isinstance(inner, dict) else inner[0]
        inner = following if isinstance(following, (dict, list)) and following else inner
    inner.update({(at or ["x"])[-1]: value}) if isinstance(inner, dict) else inner.append(value)
    (folder / "manifest.json").write_text(manifest_text(values))
    try:
        read_dense(folder)
    except DataError as error:
        assert str(error).isprintable()
