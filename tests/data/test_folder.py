from __future__ import annotations

import dataclasses
import multiprocessing
import os
import resource
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from criteo_rows import everything, make_lines, run_prepare, semantics

from dlrm_hybrid.data import folder, manifest
from dlrm_hybrid.data.prepare import PrepareOptions, prepare
from dlrm_hybrid.types import DataError, ResourceError

DEADLINE_SECONDS = 30


@pytest.fixture(scope="module")
def raw(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("raw") / "train.txt"
    path.write_bytes(b"".join(make_lines(900, seed=1)))
    return path


@pytest.fixture(scope="module")
def made(raw: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What an undisturbed run with the options of `prepare_child` makes; not to be changed."""
    output = tmp_path_factory.mktemp("made") / "out"
    run_prepare(raw, output, min_count=2)
    return output


def copy(made: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(made, tmp_path / "out"))


def test_a_finished_output_is_left_as_it_is(raw: Path, made: Path) -> None:
    before = {path: path.stat().st_mtime_ns for path in made.rglob("*")}
    result = run_prepare(raw, made, min_count=2, block_bytes=1000)
    assert result.up_to_date
    assert result.rows_per_second == 0
    assert result.manifest == manifest.read(made)
    assert {path: path.stat().st_mtime_ns for path in made.rglob("*")} == before
    assert not made.with_name("out.partial").exists()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"min_count": 3}, r"data.min_count is 3, there it was 2"),
        ({"days": 2, "min_count": 2}, r"data.days is 2, there it was 7"),
        ({"vocabulary": "train_days", "min_count": 2}, r"data.vocabulary is 'train_days'"),
    ],
)
def test_other_options_refuse_the_folder(
    raw: Path, made: Path, changes: dict[str, object], message: str
) -> None:
    before = everything(made)
    with pytest.raises(DataError, match=message + r".*choose another data.prepared"):
        run_prepare(raw, made, **changes)  # type: ignore[arg-type]
    assert everything(made) == before


def test_other_bytes_or_files_refuse_the_folder(tmp_path: Path, raw: Path, made: Path) -> None:
    same_name = tmp_path / "train.txt"
    same_name.write_bytes(raw.read_bytes()[:-9])
    with pytest.raises(DataError, match=r"data.raw holds other bytes, there it was train.txt"):
        run_prepare(same_name, made, min_count=2)
    with pytest.raises(DataError, match=r"data.raw holds other files, there it was train.txt"):
        run_prepare([raw, raw], made, min_count=2)


def test_foreign_and_damaged_folders_are_refused(tmp_path: Path, raw: Path, made: Path) -> None:
    foreign = tmp_path / "foreign"
    foreign.mkdir()
    (foreign / "thesis.tex").write_text("precious")
    with pytest.raises(DataError, match="foreign was not made by prepare.*data.prepared"):
        run_prepare(raw, foreign)
    assert everything(foreign) == {"thesis.tex": b"precious"}
    damaged = copy(made, tmp_path)
    os.truncate(damaged / "day_3.bin", 160)
    with pytest.raises(DataError, match=r"day_3.bin: not \d+ bytes: the folder is damaged"):
        run_prepare(raw, damaged, min_count=2)
    (damaged / "manifest.json").write_text("{")
    with pytest.raises(DataError, match="was not made by prepare"):
        run_prepare(raw, damaged, min_count=2)


def test_an_empty_folder_is_filled(tmp_path: Path, raw: Path, made: Path) -> None:
    (tmp_path / "out").mkdir()
    assert not run_prepare(raw, tmp_path / "out", min_count=2).up_to_date
    assert everything(tmp_path / "out") == everything(made)


def test_two_at_a_time_do_not_meet(tmp_path: Path, raw: Path) -> None:
    output = tmp_path / "out"
    with folder.partial(output) as held:
        (held.result / "mine").touch()
        with pytest.raises(ResourceError, match=r"another prepare is at work in .*out.partial"):
            run_prepare(raw, output)
        assert (held.result / "mine").exists()
    assert list(tmp_path.iterdir()) == []


def test_what_a_killed_run_left_is_gone_before_work_begins(tmp_path: Path) -> None:
    leftover = tmp_path / "out.partial" / "spill-0"
    leftover.mkdir(parents=True)
    (leftover / "C01.bin").write_bytes(bytes(1000))
    (tmp_path / "out.partial" / "file").touch()
    with folder.partial(tmp_path / "out") as held:
        assert set(held.folder.iterdir()) == {held.result, held.spill.folder}


def test_too_little_space_is_told_before_any_work(
    tmp_path: Path, raw: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=100_000))  # type: ignore[attr-defined]
    with pytest.raises(
        ResourceError, match=r"needs about \d{3},\d{3} bytes.*100,000 are free.*data.prepared"
    ):
        run_prepare(raw, tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


@contextmanager
def largest_file(num_bytes: int) -> Iterator[None]:
    """The kernel refuses writes beyond this size, as on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.parametrize("processes", [1, 2])
def test_a_disk_that_fills_up_is_a_resource_error(
    tmp_path: Path, raw: Path, processes: int
) -> None:
    with (
        largest_file(20_000),
        pytest.raises(ResourceError, match=r"out: no room left on the disk.*data.prepared"),
    ):
        run_prepare(raw, tmp_path / "out", processes=processes)
    assert list(tmp_path.iterdir()) == []
    assert multiprocessing.active_children() == []


def test_a_place_that_cannot_be_written_is_a_resource_error(tmp_path: Path, raw: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ResourceError, match=r"cannot be made: .*data.prepared"):
        run_prepare(raw, tmp_path / "file" / "out")


@pytest.mark.parametrize(("stage", "processes"), [("parse", 1), ("vocabulary", 2), ("assemble", 1)])
def test_an_interrupt_leaves_nothing(tmp_path: Path, raw: Path, stage: str, processes: int) -> None:
    def interrupt(at: str, done: int, total: int | None) -> None:
        if at == stage and done:
            raise KeyboardInterrupt

    options = PrepareOptions(semantics=semantics(), max_bad_rows=0, processes=2, block_bytes=20_000)
    with pytest.raises(KeyboardInterrupt):
        prepare([raw], tmp_path / "out", options, interrupt)
    assert list(tmp_path.iterdir()) == []
    assert multiprocessing.active_children() == []


def test_a_file_that_changes_while_it_is_read_is_refused(tmp_path: Path) -> None:
    raw = tmp_path / "train.txt"
    raw.write_bytes(b"".join(make_lines(50)))

    def grow(stage: str, done: int, total: int | None) -> None:
        if stage == "parse" and done == total:
            raw.write_bytes(raw.read_bytes() * 2)

    options = PrepareOptions(semantics=semantics(), max_bad_rows=0, processes=1, block_bytes=5000)
    with pytest.raises(DataError, match="train.txt: changed while it was read"):
        prepare([raw], tmp_path / "out", options, grow)


def test_a_manifest_reads_back_and_foreign_ones_are_refused(tmp_path: Path, made: Path) -> None:
    found = manifest.read(made)
    manifest.write(tmp_path, dataclasses.replace(found, zero_keys=7))
    assert manifest.read(tmp_path) == dataclasses.replace(found, zero_keys=7)
    assert [path.name for path in tmp_path.iterdir()] == [manifest.MANIFEST_FILE]
    for text in ("[]", '{"format": 99}', '{"format": 1}', "\0"):
        (tmp_path / manifest.MANIFEST_FILE).write_text(text)
        with pytest.raises(DataError, match=r"manifest.json: (not a manifest|cannot be read)"):
            manifest.read(tmp_path)
