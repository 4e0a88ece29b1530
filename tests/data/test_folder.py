from __future__ import annotations

import dataclasses
import json
import os
import resource
import shutil
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pytest
from criteo_rows import everything, make_lines, options, run_prepare
from ctrl_c import press
from forked import exit_code_of
from patience import HANG_SECONDS

from dlrm_hybrid.data import folder, manifest
from dlrm_hybrid.data.prepare import PrepareResult
from dlrm_hybrid.types import DataError, ResourceError


@pytest.fixture(scope="module")
def raw(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("raw") / "train.txt"
    path.write_bytes(b"".join(make_lines(3_000, seed=1)))
    return path


@pytest.fixture(scope="module")
def made(raw: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What an undisturbed run makes; not to be changed."""
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


def test_other_options_refuse_the_folder(raw: Path, made: Path) -> None:
    before = everything(made)
    told = (
        r"data.days: prepared with 7, the configuration says 2"
        r"; data.vocabulary: prepared with 'all_days', the configuration says 'train_days'"
        r"; data.min_count: prepared with 2, the configuration says 3; ADVICE"
    )
    with pytest.raises(DataError, match=told):
        run_prepare(raw, made, min_count=3, days=2, vocabulary="train_days")
    assert everything(made) == before


def test_other_bytes_or_files_refuse_the_folder(tmp_path: Path, raw: Path, made: Path) -> None:
    same_name = tmp_path / "train.txt"
    same_name.write_bytes(raw.read_bytes()[:-9])
    with pytest.raises(
        DataError, match=r"train.txt has changed since it was prepared \(data.raw\)"
    ):
        run_prepare(same_name, made, min_count=2)
    with pytest.raises(DataError, match=r"the rows of train.txt, not those of train.txt, train"):
        run_prepare([raw, raw], made, min_count=2)


@pytest.mark.parametrize("hides_it", [False, True])
def test_a_byte_in_the_middle_of_a_raw_file_counts(
    tmp_path: Path, raw: Path, hides_it: bool
) -> None:
    """The size is the same; the time of the change too, where somebody has put it back."""
    path, output = tmp_path / "train.txt", tmp_path / "out"
    # Between the sampled pieces: these rows are more than the samples hold together.
    path.write_bytes(raw.read_bytes() * (1 + (8 << 20) // raw.stat().st_size))
    run_prepare(path, output)
    before, said = path.stat(), []
    at = before.st_size // 2 + (1 << 17)
    with path.open("r+b") as file:
        file.seek(at)
        text = file.read(400)
        line = text.index(b"\n") + 1
        file.seek(at + line)
        file.write(b"0" if text[line : line + 1] == b"1" else b"1")
    if hides_it:
        os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    with pytest.raises(DataError, match=r"train.txt has changed since it was prepared .*; ADVICE"):
        run_prepare(path, output, say=said.append)
    assert said == [f"{path}: copied or touched since it was prepared; comparing its whole content"]
    assert not run_prepare(path, output, overwrite=True).up_to_date
    assert run_prepare(path, output).up_to_date


def test_a_copy_of_the_raw_file_is_compared_once(tmp_path: Path, raw: Path, made: Path) -> None:
    output, said = copy(made, tmp_path), []
    for name in ("one", "other"):
        (tmp_path / name).mkdir()
        shutil.copyfile(raw, tmp_path / name / "train.txt")
    # of one that was killed while it noted another copy
    (output / manifest.UNFINISHED_FILE).write_text("{")
    for count, folder_name in enumerate(("one", "other", "one", "other", "one")):
        paths = [tmp_path / folder_name / "train.txt"]
        found = folder.current(output, paths, options(min_count=2), said.append)
        assert isinstance(found, manifest.Manifest)
        assert len(said) == min(count + 1, 2)
    os.utime(paths[0])
    assert run_prepare(paths[0], output, min_count=2, say=said.append).up_to_date
    assert len(said) == 3


def test_what_prepare_made_is_overwritten_and_nothing_else(
    tmp_path: Path, raw: Path, made: Path
) -> None:
    output, said = copy(made, tmp_path), []
    result = run_prepare(raw, output, min_count=3, overwrite=True, say=said.append)
    assert not result.up_to_date
    assert said == [
        f"{output} was prepared differently: data.min_count: prepared with 2, "
        "the configuration says 3; replacing it",
        f"  {raw}: {result.manifest.rows:,} rows read, {result.manifest.rows:,} kept, 0 bad",
    ]
    assert manifest.read(output).semantics.min_count == 3
    (output / "thesis.tex").write_text("precious")
    before = everything(output)
    with pytest.raises(DataError, match="holds 'thesis.tex', which prepare did not write"):
        run_prepare(raw, output, overwrite=True)
    assert everything(output) == before


def test_foreign_and_damaged_folders_are_refused(tmp_path: Path, raw: Path, made: Path) -> None:
    foreign = tmp_path / "foreign"
    foreign.mkdir()
    (foreign / "thesis.tex").write_text("precious")
    for overwrite in (False, True):
        with pytest.raises(DataError, match="foreign was not made by prepare.*data.prepared"):
            run_prepare(raw, foreign, overwrite=overwrite)
    assert everything(foreign) == {"thesis.tex": b"precious"}
    damaged = copy(made, tmp_path)
    os.truncate(damaged / "ids.npy", 160)
    message = r"ids.npy: has 160 bytes, expected \d+ for 3,000 rows: the folder is damaged; ADVICE"
    with pytest.raises(DataError, match=message):
        run_prepare(raw, damaged, min_count=2)
    (damaged / "manifest.json").write_text("{")
    with pytest.raises(DataError, match=r"not a manifest of prepared rows: .*; ADVICE"):
        run_prepare(raw, damaged, min_count=2)
    assert not run_prepare(raw, damaged, min_count=2, overwrite=True).up_to_date


def test_an_empty_folder_is_filled(tmp_path: Path, raw: Path, made: Path) -> None:
    (tmp_path / "out").mkdir()
    assert not run_prepare(raw, tmp_path / "out", min_count=2).up_to_date
    assert everything(tmp_path / "out") == everything(made)


def test_the_second_of_two_waits_and_takes_what_the_first_has_made(
    tmp_path: Path, raw: Path
) -> None:
    output, said = tmp_path / "out", []
    second = threading.Thread(target=lambda: found.append(run_prepare(raw, output, say=say)))
    found: list[PrepareResult] = []
    is_waiting = threading.Event()

    def say(line: str) -> None:
        said.append(line)
        is_waiting.set()

    def progress(stage: str, done: int, total: int | None) -> None:
        if not second.ident:
            second.start()
            assert is_waiting.wait(HANG_SECONDS)

    run_prepare(raw, output, block_bytes=20_000, progress=progress)
    second.join(HANG_SECONDS)
    assert [result.up_to_date for result in found] == [True]
    holder = f"process {os.getpid()} on {socket.gethostname()}"
    assert said == [f"{output}: {holder} is preparing these rows; waiting for it"]
    assert list(tmp_path.iterdir()) == [output]


def test_what_a_killed_run_left_is_gone_before_work_begins(tmp_path: Path) -> None:
    leftover = tmp_path / "out.partial" / "spill-0"
    leftover.mkdir(parents=True)
    (leftover / "C01.bin").write_bytes(bytes(1000))
    (tmp_path / "out.partial" / "file").touch()
    (tmp_path / "out.lock").write_text("process 1 on nowhere")
    with folder.partial(tmp_path / "out", print) as held:
        assert set(held.folder.iterdir()) == {held.result, held.spill}
    assert list(tmp_path.iterdir()) == []


def test_a_link_stands_for_its_folder(tmp_path: Path, raw: Path, made: Path) -> None:
    (tmp_path / "big_disk" / "out").mkdir(parents=True)
    (tmp_path / "out").symlink_to(tmp_path / "big_disk" / "out")
    run_prepare(raw, tmp_path / "out", min_count=2)
    assert (tmp_path / "out").is_symlink()
    assert everything(tmp_path / "big_disk" / "out") == everything(made)


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


def threads_of_prepare() -> list[str]:
    names = [thread.name for thread in threading.enumerate()]
    return [name for name in names if name.startswith("ThreadPoolExecutor")]


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
    assert threads_of_prepare() == []


def test_a_place_that_cannot_be_written_is_a_resource_error(tmp_path: Path, raw: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ResourceError, match=r"cannot be made: .*data.prepared"):
        run_prepare(raw, tmp_path / "file" / "out")


@pytest.mark.parametrize("stage", ["parse", "vocabulary", "assemble"])
def test_an_interrupt_leaves_nothing(tmp_path: Path, raw: Path, stage: str) -> None:
    def interrupt(at: str, done: int, total: int | None) -> None:
        if at == stage and done:
            press()

    with pytest.raises(KeyboardInterrupt):
        run_prepare(raw, tmp_path / "out", processes=2, block_bytes=20_000, progress=interrupt)
    assert list(tmp_path.iterdir()) == []
    assert threads_of_prepare() == []


@pytest.mark.parametrize(
    "change",
    [
        lambda path: path.write_bytes(path.read_bytes() * 2),
        lambda path: os.truncate(path, path.read_bytes().rfind(b"\n", 0, 9000) + 1),
        lambda path: path.write_bytes(path.read_bytes()),
        lambda path: Path(shutil.copyfile(path, path.with_name("copy"))).rename(path),
    ],
    ids=["grown", "cut", "rewritten", "replaced"],
)
def test_a_file_that_changes_while_it_is_read_is_refused(
    tmp_path: Path, change: Callable[[Path], object]
) -> None:
    raw = tmp_path / "train.txt"
    raw.write_bytes(b"".join(make_lines(50)))
    changed: list[object] = []

    def progress(stage: str, done: int, total: int | None) -> None:
        if stage == "parse" and done and not changed:
            changed.append(change(raw))

    with pytest.raises(DataError, match="train.txt: changed while it was read"):
        run_prepare(raw, tmp_path / "out", block_bytes=5000, progress=progress)
    assert changed
    assert {path.name for path in tmp_path.iterdir()} <= {"train.txt", "copy"}


def test_raw_rows_that_can_be_made_again_are_made_aside_and_removed(
    tmp_path: Path, raw: Path, made: Path
) -> None:
    output = tmp_path / "out"
    written: list[Path] = []

    def write(path: Path) -> None:
        written.append(path)
        shutil.copyfile(raw, path)

    for _ in range(2):
        result = run_prepare(folder.Generated("rows-1.txt", write), output, min_count=2)
    assert result.up_to_date
    assert [path.parent for path in written] == [tmp_path / "out.partial"]
    assert [source.stamp.name for source in result.manifest.sources] == ["rows-1.txt"]
    assert list(tmp_path.iterdir()) == [output]
    other = folder.Generated("rows-2.txt", write)
    with pytest.raises(DataError, match=r"the rows of rows-1.txt, not those of rows-2.txt"):
        run_prepare(other, output, min_count=2)


def test_a_manifest_reads_back_and_foreign_ones_are_refused(tmp_path: Path, made: Path) -> None:
    found = manifest.read(made)
    manifest.write(tmp_path, dataclasses.replace(found, zero_keys=7))
    assert manifest.read(tmp_path) == dataclasses.replace(found, zero_keys=7)
    assert [path.name for path in tmp_path.iterdir()] == [manifest.MANIFEST_FILE]
    for text in ("[]", '{"format": 99}', '{"format": 3}', "\0", "[" * 100_000):
        (tmp_path / manifest.MANIFEST_FILE).write_text(text)
        with pytest.raises(DataError, match=r"manifest.json: not a manifest of prepared rows: "):
            manifest.read(tmp_path)


@pytest.mark.parametrize(
    ("where", "value", "message"),
    [
        (("parts", "train", "rows"), -1, r"parts.train.rows: .*greater than or equal to 0"),
        (("parts", "train", "rows"), 10**30, r"parts.train.rows"),
        (("parts", "train", "rows"), 1e3, r"parts.train.rows"),
        (("parts", "train", "rows"), 9000, r"arrays.0: <f4 \(\d+,\) instead of <f4 \(\d+,\)"),
        (("parts", "test", "clicks"), 10**6, r"parts.test.clicks: 1000000 of \d+ rows"),
        (("arrays", 2, "file"), "../x", r"arrays: lists \['label.npy', 'dense.npy', '../x'\]"),
        (("arrays", 1, "shape", 1), 12, r"arrays.1: <f4 \(\d+, 12\) instead of <f4 \(\d+, 13\)"),
        (("arrays", 0, "dtype"), "<i4", r"arrays.0: <i4"),
        (("arrays", 0, "dtype"), "|O", r"arrays.0.dtype"),
        (("arrays", 0, "blocks"), [], r"arrays.0.blocks: 0 checksums for \d+ rows"),
        (("arrays", 2, "blocks", 0), "\x1b[31m", r"arrays.2.blocks.0"),
        (("arrays",), [], r"arrays: lists \[\] instead of"),
        (("table_rows",), [1, 2], r"table_rows: 2 values for 26 columns"),
        (("table_rows", 3), 0, r"table_rows.3: .*greater than or equal to 1"),
        (("semantics", "days"), "7", r"semantics.days"),
        (("semantics", "schema", "label"), 3, r"semantics.schema.label"),
        (("semantics", "schema", "dense"), [], r"scales: 13 values for 0 columns"),
        (("sources", 0), 7, r"sources.0"),
    ],
)
def test_a_manifest_that_lies_is_refused_with_its_field(
    tmp_path: Path, made: Path, where: tuple[str | int, ...], value: object, message: str
) -> None:
    values = json.loads((made / "manifest.json").read_text())
    inner = values
    for key in where[:-1]:
        inner = inner[key]
    inner[where[-1]] = value
    (tmp_path / "manifest.json").write_text(json.dumps(values))
    with pytest.raises(DataError, match=message) as caught:
        manifest.read(tmp_path)
    assert str(caught.value).isprintable()


def struck_in(wanted: str, output: Path, strike: Callable[[], None]) -> Callable[..., None]:
    """Strikes at the first progress of a stage with something on the disk."""

    def progress(stage: str, done: int, total: int | None) -> None:
        spilled = Path(f"{output}.partial").rglob("spill-*/1.bin")
        if stage == wanted and any(path.stat().st_size for path in spilled):
            strike()

    return progress


@pytest.mark.parametrize("stage", ["parse", "vocabulary", "assemble"])
def test_killed_and_started_again_gives_the_same_bytes(
    tmp_path: Path, raw: Path, made: Path, stage: str
) -> None:
    output = tmp_path / "out"
    killed = struck_in(stage, output, lambda: os.kill(os.getpid(), signal.SIGKILL))
    begin = partial(run_prepare, raw, output, min_count=2, processes=2, block_bytes=20_000)
    assert exit_code_of(lambda: begin(progress=killed)) == -signal.SIGKILL
    assert not output.exists()
    left = [path.stat().st_size for path in (tmp_path / "out.partial").rglob("spill-*/1.bin")]
    assert left[0] > 0, "the kill came before anything was written"
    assert not run_prepare(raw, output, min_count=2).up_to_date
    assert everything(output) == everything(made)
    assert not (tmp_path / "out.partial").exists()
