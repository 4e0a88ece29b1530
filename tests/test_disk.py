import errno
import os
import socket
import subprocess
import sys
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

import pytest
from small_disk import enlarge, fill, needs_mount, small_disk

from dlrm_hybrid import disk
from dlrm_hybrid.disk import HeldError, append, locked, refusals, writing
from dlrm_hybrid.telemetry.events import Event, Kind, read
from dlrm_hybrid.telemetry.sinks import JsonLines, TensorBoard
from dlrm_hybrid.types import ResourceError

SCORES = {"samples": 8, "log_loss": 0.5, "accuracy": 0.5, "auc": None, "normalized_entropy": 1.0}
ROOM = 64


def test_the_umask_decides_who_else_may_write_a_file(tmp_path: Path) -> None:
    path = tmp_path / "file"
    before = os.umask(0o002)
    try:
        disk.replace_text(path, "text")
    finally:
        os.umask(before)
    assert path.stat().st_mode & 0o777 == 0o664


def test_nothing_is_written_through_a_link(tmp_path: Path) -> None:
    own = tmp_path / "own"
    own.write_text("mine")
    for name in ("file", ".file.partial", "part"):
        (tmp_path / name).symlink_to(own)
    disk.replace_text(tmp_path / "file", "text")
    disk.write(tmp_path / "part", [memoryview(b"text")])
    assert own.read_text() == "mine"
    for name in ("file", "part"):
        assert not (tmp_path / name).is_symlink()
        assert (tmp_path / name).read_text() == "text"
    assert not os.path.lexists(tmp_path / ".file.partial")


def test_a_refusal_names_file_and_key(tmp_path: Path) -> None:
    path = tmp_path / "none" / "file"
    with pytest.raises(ResourceError) as error, writing(path, "a.key"):
        path.write_text("")
    assert str(error.value) == f"{path}: cannot be written: No such file or directory (a.key)"


def test_a_refusal_that_nobody_expects_names_its_file(tmp_path: Path) -> None:
    with pytest.raises(ResourceError) as error, refusals():
        (tmp_path / "none" / "folder").mkdir()
    assert str(error.value) == f"{tmp_path}/none/folder: No such file or directory"


@pytest.mark.parametrize(
    "error",
    [
        OSError(errno.ECONNREFUSED, "refused", "file"),
        OSError(errno.ENOSPC, "no file is named"),
        BrokenPipeError(),
        ValueError("other"),
    ],
)
def test_what_no_disk_refuses_passes(error: Exception) -> None:
    with pytest.raises(type(error)) as caught, refusals():
        raise error
    assert caught.value is error


@needs_mount
def test_a_line_is_in_the_file_or_not(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", ROOM) as disk:
        descriptor = os.open(disk / "lines", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        append(descriptor, b"first\n")
        fill(disk)
        with pytest.raises(OSError, match="No space left"):
            append(descriptor, bytes(10_000))
        assert (disk / "lines").read_bytes() == b"first\n"
        enlarge(disk, 2 * ROOM)
        append(descriptor, b"second\n")
        os.close(descriptor)
        assert (disk / "lines").read_bytes() == b"first\nsecond\n"


@needs_mount
def test_events_on_a_full_disk_are_refused_whole(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", ROOM) as disk:
        sink = JsonLines(disk / "events.jsonl")
        fill(disk)
        many = Event(Kind.EVALUATED, 1, 1.0, {**SCORES, "text": "x" * 10_000})
        with pytest.raises(ResourceError, match=r"events.jsonl: cannot be written: No space left"):
            sink.write(many)
        sink.close()
        assert list(read(disk / "events.jsonl")) == []


@needs_mount
@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_scalars_on_a_full_disk_are_a_resource_error(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", ROOM) as disk:
        sink = TensorBoard(disk / "tensorboard", 0)
        fill(disk)
        with pytest.raises(ResourceError, match=r"tensorboard: cannot be written: No space left"):
            for step in range(1_000):
                sink.write(Event(Kind.EVALUATED, step, 1.0, SCORES))
        (disk / "filler").unlink()
        sink.close()


HOLD = """
import sys
from pathlib import Path
from dlrm_hybrid.disk import locked
with locked(Path(sys.argv[1])):
    print("held", flush=True)
    sys.stdin.readline()
"""


@contextmanager
def held_elsewhere(path: Path) -> Generator[subprocess.Popen[str], None, None]:
    """Another process holds the lock until a line is written to it."""
    command = [sys.executable, "-c", HOLD, str(path)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "held\n"
        try:
            yield other
        finally:
            other.kill()


def test_a_lock_names_its_holder_and_ends_with_it(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    with held_elsewhere(path) as other:
        holder = f"process {other.pid} on {socket.gethostname()}"
        with pytest.raises(HeldError, match=f"^{holder}$"), locked(path):
            pass
        said: list[str] = []

        def end(who: str) -> None:
            said.append(who)
            other.kill()

        with locked(path, end):
            assert said == [holder]
    assert list(tmp_path.iterdir()) == []


def test_who_waits_for_a_lock_that_is_removed_gets_the_new_one(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    with held_elsewhere(path) as other:

        def end(who: str) -> None:
            other.communicate("\n")

        with locked(path, end):
            assert path.read_text() == f"process {os.getpid()} on {socket.gethostname()}"
            with pytest.raises(HeldError, match=f"process {os.getpid()} on "), locked(path):
                pass
        with locked(path):
            assert path.exists()


RACE = """
import sys
from pathlib import Path
from dlrm_hybrid.disk import HeldError, locked
sys.stdin.read(1)
try:
    with locked(Path(sys.argv[1])):
        print("held", flush=True)
        sys.stdin.read(1)
except HeldError as error:
    print(error, flush=True)
"""


def test_of_those_that_lock_at_once_one_wins_and_the_others_name_it(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    for killed in (False, True):
        command = [sys.executable, "-c", RACE, str(path)]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        three = [subprocess.Popen(command, **pipes) for _ in range(3)]
        for one in three:
            one.stdin.write("x")
            one.stdin.flush()
        told = {one.pid: one.stdout.readline().strip() for one in three}
        (winner,) = (one for one in three if told[one.pid] == "held")
        others = {told[one.pid] for one in three if one is not winner}
        assert others == {f"process {winner.pid} on {socket.gethostname()}"}
        if killed:
            winner.kill()
        for one in three:
            one.communicate()
        assert path.exists() is killed  # and the next round takes it over


def test_a_lock_does_not_last_with_what_its_holder_has_started(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    with locked(path):
        child = subprocess.Popen(["sleep", "60"], close_fds=False)
    try:
        with locked(path):
            assert path.exists()
    finally:
        child.kill()
        child.wait()
    assert not path.exists()


def test_a_lock_file_that_is_a_link_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "lock").symlink_to(tmp_path / "target")
    with pytest.raises(OSError, match="symbolic links"), locked(tmp_path / "lock"):
        pass
    assert not (tmp_path / "target").exists()
