"""What one process compiles the next one loads, from a folder of ours and if it is whole."""

import fcntl
import os
import pickle
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
from numba import TypingError
from small_disk import fill, needs_mount, small_disk

from dlrm_hybrid.kernels import ALL, jit
from dlrm_hybrid.kernels.jit import argument_types, kernel, kernel_folder

Float32s = npt.NDArray[np.float32]


def add_one(values_N: Float32s) -> None:
    for i in range(values_N.size):
        values_N[i] += np.float32(1)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The empty cache folder."""
    monkeypatch.delenv("NUMBA_CACHE_DIR", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    found = kernel_folder()
    assert found.refused == ()
    assert found.path is not None and found.path.parent == tmp_path / "dlrm_hybrid"
    return found.path


def hits_of_a_new_process() -> int:
    """Call the kernel as a process would that has just started; how often the cache has served."""
    fresh = kernel(add_one)
    values = np.zeros(3, np.float32)
    fresh(values)
    assert values.tolist() == [1, 1, 1]
    stats = fresh.stats  # pyright: ignore[reportFunctionMemberAccess]
    return sum(stats.cache_hits.values())


def test_what_one_process_compiles_the_next_one_loads(folder: Path) -> None:
    before = os.umask(0)
    try:
        assert hits_of_a_new_process() == 0
    finally:
        os.umask(before)
    assert hits_of_a_new_process() == 1
    assert folder.stat().st_mode & 0o777 == 0o700
    assert jit.kept_kernels(folder) == 1


def test_a_kernel_that_cannot_be_compiled_keeps_nobody_waiting(folder: Path) -> None:
    with pytest.raises(TypingError):
        kernel(add_one)("no array")  # pyright: ignore[reportArgumentType]
    (lock,) = folder.glob("*.add_one.lock")
    with lock.open() as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)


def test_processes_that_start_at_once_compile_a_kernel_once(folder: Path) -> None:
    program = (
        "import sys; import numpy as np;"
        "from dlrm_hybrid.kernels.criteo import fill_log_table as kernel;"
        "print(); sys.stdout.flush(); sys.stdin.readline();"
        "table = np.ones(7, np.float32); kernel(table);"
        "print(*table, sum(kernel.stats.cache_misses.values()))"
    )
    pipe = subprocess.PIPE
    processes = [
        subprocess.Popen([sys.executable, "-c", program], stdin=pipe, stdout=pipe, text=True)
        for _ in range(2)
    ]
    for process in processes:
        assert process.stdin is not None and process.stdout is not None
        process.stdout.readline()  # all of them are ready
    for process in processes:
        assert process.stdin is not None
        process.stdin.write("\n")
        process.stdin.flush()
    outputs = [process.communicate()[0].rpartition(" ") for process in processes]
    (table,) = {table for table, _, _ in outputs}
    assert table.startswith("0.0 0.6931472 ")  # log(1 + n)
    assert sum(int(misses) for _, _, misses in outputs) == 1


def _cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-100])


def _flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[content.index(b"add_one")] ^= 1  # not any byte: some of an index say nothing
    path.write_bytes(content)


def _empty(path: Path) -> None:
    path.write_bytes(b"")


def _other_content(path: Path) -> None:
    path.write_bytes(pickle.dumps(("not", "a", "kernel")))


@pytest.mark.parametrize("damage", [_cut, _flip, _empty, _other_content])
@pytest.mark.parametrize("suffix", [".nbi", ".nbc"])
def test_a_damaged_kernel_is_compiled_again_in_one_line(
    damage: Callable[[Path], None], suffix: str, folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    hits_of_a_new_process()
    (path,) = folder.glob(f"*{suffix}")
    damage(path)
    assert hits_of_a_new_process() == 0
    lines = capfd.readouterr().err.splitlines()
    assert len(lines) == 1 or (suffix == ".nbi" and not lines)  # an index may just be of others
    assert all(
        line.startswith(f"{folder}: add_one is damaged") and line.endswith("compiled again")
        for line in lines
    )
    assert hits_of_a_new_process() == 1
    assert capfd.readouterr().err == ""


def _writable_by_others(path: Path) -> None:
    path.chmod(0o777)


def _is_a_file(path: Path) -> None:
    path.rmdir()
    path.write_text("")


def _is_a_link(path: Path) -> None:
    path.rename(path.parent / "elsewhere")
    path.symlink_to(path.parent / "elsewhere")


def _of_another_user(path: Path) -> None:
    os.chown(path, 4711, -1)


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (_writable_by_others, "may be written by others"),
        (_is_a_file, "cannot be used"),
        (_is_a_link, "is not a folder"),
        pytest.param(
            *(_of_another_user, "belongs to another user (uid 4711)"),
            marks=pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files away"),
        ),
    ],
)
def test_a_folder_that_must_not_be_used_is_named_and_another_one_taken(
    damage: Callable[[Path], None],
    reason: str,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(folder.parents[1]))
    damage(folder)
    jit._first_usable.cache_clear()  # another process
    assert hits_of_a_new_process() == 0
    refused, used = capfd.readouterr().err.splitlines()
    assert refused.startswith(f"{folder}: ") and reason in refused
    path = kernel_folder().path
    assert path is not None and path.parent == folder.parents[1]
    assert used == f"compiled kernels are kept in {path}"
    assert jit.kept_kernels(path) == 1
    assert folder.is_file() or jit.kept_kernels(folder) == 0


def test_without_a_home_the_temporary_folder_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("NUMBA_CACHE_DIR", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", "/proc/nobody")  # nobody can make a folder there, root neither
    found = kernel_folder()
    assert found.path is not None and found.path.name.startswith(f"dlrm_hybrid-{os.geteuid()}-")
    assert "/proc/nobody" in found.refused[0]


@needs_mount
def test_a_full_disk_is_told_once_and_nothing_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("NUMBA_CACHE_DIR", raising=False)
    with small_disk(tmp_path / "small", 64) as root:
        monkeypatch.setenv("XDG_CACHE_HOME", str(root))
        assert kernel_folder().refused == ()
        fill(root)
        assert hits_of_a_new_process() == 0
        assert hits_of_a_new_process() == 0
    (line,) = capfd.readouterr().err.splitlines()
    assert "cannot be kept" in line and "No space left" in line


def test_a_numba_with_other_private_parts_is_told_once_and_nothing_fails(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delattr("numba.core.compiler.CompileResult._reduce")
    assert hits_of_a_new_process() == 0
    assert hits_of_a_new_process() == 0
    (line,) = capfd.readouterr().err.splitlines()
    assert line.startswith(f"{folder}: compiled kernels cannot be kept")


def test_the_user_s_own_kernels_are_kept_where_numba_keeps_them(
    folder: Path, tmp_path: Path
) -> None:
    (tmp_path / "own.py").write_text(
        "import numba, numpy as np\n"
        "from dlrm_hybrid.kernels.criteo import fill_log_table\n"
        "own = numba.njit(cache=True)(lambda value: value + 1)\n"
        "fill_log_table(np.ones(7, np.float32))\n"
        "print(own(1), own.stats.cache_path)\n"
    )
    ended = subprocess.run(
        [sys.executable, tmp_path / "own.py"], capture_output=True, text=True, check=True
    )
    assert ended.stdout.split() == ["2", str(tmp_path / "__pycache__")]
    assert jit.kept_kernels(folder) == 1


def test_types_of_every_kernel_follow_from_its_annotations() -> None:
    typed = {name: argument_types(function.py_func) for name, function in jit.kernels()}
    assert {name.rpartition(".")[0] for name in typed} == set(ALL)
    files = {path.stem for path in Path(jit.__file__).parent.glob("*.py")}
    assert files - set(ALL) == {"__init__", "bits", "device", "jit"}  # of no kernels of numba


def test_a_kernel_compiled_ahead_serves_the_call_unless_another_process_compiles_it(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from dlrm_hybrid.kernels import criteo

    fresh = kernel(criteo.fill_log_table.py_func)  # pyright: ignore
    monkeypatch.setattr(jit, "kernels", lambda: iter([("other", None), ("criteo", fresh)]))
    lock = folder / "dlrm_hybrid.kernels.criteo.fill_log_table.lock"
    with lock.open("w") as other_process:
        fcntl.flock(other_process, fcntl.LOCK_EX)
        jit.compile_missing(["criteo"])
    assert jit.kept_kernels(folder) == 0
    assert not jit.are_kept(["criteo.fill_log_table"])
    jit.compile_missing(["criteo"])
    assert jit.kept_kernels(folder) == 1
    assert jit.are_kept(["criteo.fill_log_table"])
    assert not jit.are_kept(["criteo.fill_log_table", "scatter.gather"])
    fresh(np.ones(7, np.float32))
    assert set(fresh.signatures) == {argument_types(fresh.py_func)}


def test_folders_of_old_versions_go_when_long_unused(folder: Path) -> None:
    old, recent = (folder.parent / f"kernels-{digit * 16}" for digit in "ab")
    foreign = folder.parent / "kernels-of-mine"
    month_ago = time.time() - 31 * 86_400
    for path in (old, recent, foreign):
        path.mkdir()
        (path / "file").write_text("12345")
    for path in (folder, old, foreign):
        os.utime(path, (month_ago,) * 2)
    jit._first_usable.cache_clear()  # another process
    assert kernel_folder().path == folder  # in use
    assert folder.stat().st_mtime > month_ago + 1
    assert not old.exists() and recent.exists() and foreign.exists()
