"""Compiled kernels are kept and found again, and not believed where not whole and ours."""

import os
import pickle
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
from small_disk import fill, needs_mount, small_disk

from dlrm_hybrid.kernels import ALL
from dlrm_hybrid.kernels.compiler import cache, jit
from dlrm_hybrid.kernels.compiler.jit import argument_types, kernel

Float32s = npt.NDArray[np.float32]


def add_one(values_N: Float32s) -> None:
    for i in range(values_N.size):
        values_N[i] += np.float32(1)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The empty cache folder."""
    monkeypatch.delenv("NUMBA_CACHE_DIR", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    found = cache.kernel_folder()
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


def only_file(folder: Path) -> Path:
    (path,) = folder.iterdir()
    return path


def test_what_one_process_compiles_the_next_one_loads(folder: Path) -> None:
    assert hits_of_a_new_process() == 0
    assert hits_of_a_new_process() == 1
    assert only_file(folder).suffix == cache.SUFFIX
    assert folder.stat().st_mode & 0o777 == 0o700


def test_a_generous_umask_opens_no_file_to_others(folder: Path) -> None:
    before = os.umask(0o002)
    try:
        assert hits_of_a_new_process() == 0
    finally:
        os.umask(before)
    assert only_file(folder).stat().st_mode & 0o777 == 0o600
    assert hits_of_a_new_process() == 1


def _cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-100])


def _flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def _empty(path: Path) -> None:
    path.write_bytes(b"")


def _link(path: Path) -> None:
    path.rename(path.with_suffix(".moved"))
    path.symlink_to(path.with_suffix(".moved"))


def _pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def _open_to_others(path: Path) -> None:
    path.chmod(0o666)


class _Evil:
    def __reduce__(self) -> tuple[Callable[..., object], tuple[object, ...]]:
        return os.mkdir, (str(Path(os.environ["XDG_CACHE_HOME"]) / "evil"),)


def _plant(path: Path) -> None:
    path.write_bytes(pickle.dumps(_Evil()))


def _other_content(path: Path) -> None:
    """Whole, but not what numba makes: as of a version that nobody has thought of."""
    payload = pickle.dumps(("not", "a", "kernel"))
    path.write_bytes(cache._checksum(payload) + payload)


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (_cut, "is damaged"),
        (_flip, "is damaged"),
        (_empty, "is damaged"),
        (_plant, "is damaged"),
        (_link, "cannot be read"),
        (_pipe, "is not a file"),
        (_open_to_others, "may be written by others"),
        (_other_content, "is of no use"),
    ],
)
def test_a_file_that_is_not_whole_and_ours_is_compiled_again_in_one_line(
    damage: Callable[[Path], None], reason: str, folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    hits_of_a_new_process()
    path = only_file(folder)
    damage(path)
    assert hits_of_a_new_process() == 0
    (line,) = capfd.readouterr().err.splitlines()
    assert line.startswith(f"{path}: {reason}")
    assert hits_of_a_new_process() == 1
    assert capfd.readouterr().err == ""
    assert not (folder.parent.parent / "evil").exists()


def _writable_by_others(root: Path) -> None:
    cache.kernel_folder()
    path = next(root.glob("dlrm_hybrid/kernels-*"))
    path.chmod(0o777)


def _is_a_file(root: Path) -> None:
    (root / "dlrm_hybrid").write_text("")


def _is_a_link(root: Path) -> None:
    cache.kernel_folder()
    path = next(root.glob("dlrm_hybrid/kernels-*"))
    path.rename(root / "elsewhere")
    path.symlink_to(root / "elsewhere")


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (_writable_by_others, "may be written by others"),
        (_is_a_file, "cannot be used"),
        (_is_a_link, "is not a folder"),
    ],
)
def test_a_folder_that_must_not_be_used_is_named_and_another_one_taken(
    damage: Callable[[Path], None], reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = tmp_path / "cache"
    root.mkdir()
    monkeypatch.delenv("NUMBA_CACHE_DIR", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(root))
    damage(root)
    cache._first_usable.cache_clear()
    found = cache.kernel_folder()
    assert len(found.refused) == 1 and reason in found.refused[0]
    assert str(root) in found.refused[0]
    assert found.path is not None and root not in found.path.parents


def test_without_a_home_the_temporary_folder_is_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("NUMBA_CACHE_DIR", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", "/proc/nobody")  # nobody can make a folder there, root neither
    found = cache.kernel_folder()
    assert found.path is not None and found.path.parent.name == f"dlrm_hybrid-{os.geteuid()}"
    assert "/proc/nobody" in found.refused[0]


@needs_mount
def test_a_full_disk_is_passed_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NUMBA_CACHE_DIR", raising=False)
    with small_disk(tmp_path / "small", 64) as root:
        monkeypatch.setenv("XDG_CACHE_HOME", str(root))
        found = cache.kernel_folder()
    assert "No space left" in found.refused[0]
    assert found.path is not None and root not in found.path.parents


@needs_mount
def test_a_disk_that_fills_up_later_is_told_once_and_nothing_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("NUMBA_CACHE_DIR", raising=False)
    with small_disk(tmp_path / "small", 8192) as root:
        monkeypatch.setenv("XDG_CACHE_HOME", str(root))
        assert cache.kernel_folder().refused == ()
        fill(root)
        assert hits_of_a_new_process() == 0
        assert hits_of_a_new_process() == 0
    (line,) = capfd.readouterr().err.splitlines()
    assert "No space left" in line


def test_a_numba_with_other_private_parts_is_told_once_and_nothing_fails(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delattr(cache.CompileResult, "_reduce")
    assert hits_of_a_new_process() == 0
    assert hits_of_a_new_process() == 0
    (line,) = capfd.readouterr().err.splitlines()
    assert "compiled kernels cannot be kept (numba" in line


def test_types_of_every_kernel_follow_from_its_annotations(folder: Path) -> None:
    seen = jit.cache_state(folder, ALL)
    assert {name.rpartition(".")[0] for name in seen.missing} == set(ALL)
    assert seen.compiled == 0 < seen.kernels == len(seen.missing)
    files = {path.stem for path in Path(jit.__file__).parents[1].glob("*.py")}
    assert files - set(ALL) == {"__init__", "bits", "device"}  # of no kernels of numba


def test_a_kernel_compiled_ahead_serves_the_call(folder: Path) -> None:
    from dlrm_hybrid.kernels.criteo import fill_log_table

    # In a process of its own: in this one a test may have called the kernel before.
    name = "criteo.fill_log_table"
    done = subprocess.run(
        [sys.executable, "-c", "from dlrm_hybrid.kernels.compiler.jit import serve; serve()"],
        input=f"{name}\n",
        check=True,
        capture_output=True,
        text=True,
    )
    assert done.stdout == f"{name}\n"
    state = jit.cache_state(folder, ["criteo"])
    assert name not in state.missing
    assert (state.compiled, state.kernels) == (1, 1 + len(state.missing))
    fill_log_table(np.ones(7, np.float32))
    assert set(fill_log_table.signatures) == {argument_types(fill_log_table.py_func)}  # pyright: ignore
    _flip(only_file(folder))
    state = jit.cache_state(folder, ["criteo"])
    assert name in state.missing
    assert "is damaged" in state.damaged[0]
    assert not list(folder.iterdir())


def test_folders_of_old_versions_go_when_long_unused(folder: Path) -> None:
    old, recent = (folder.parent / f"kernels-{digit * 16}" for digit in "ab")
    foreign = folder.parent / "kernels-of-mine"
    for path in (old, recent, foreign):
        path.mkdir()
        (path / "file").write_text("12345")
    (folder / "x.4711.tmp").write_text("cut off")
    now = folder.stat().st_mtime
    os.utime(old, (now - 31 * 86_400,) * 2)
    os.utime(foreign, (now - 31 * 86_400,) * 2)
    assert jit.other_folders(folder) == [(old, 5), (recent, 5)]
    jit.tidy(folder)
    assert not old.exists() and recent.exists() and foreign.exists()
    assert not list(folder.iterdir())


def test_a_folder_in_daily_use_is_not_old_to_another_version(folder: Path) -> None:
    month_ago = folder.stat().st_mtime - 31 * 86_400
    other = folder.parent / f"kernels-{'a' * 16}"
    for path in (folder, other):
        path.mkdir(exist_ok=True)
        os.utime(path, (month_ago,) * 2)
    cache._first_usable.cache_clear()  # another process
    assert cache.kernel_folder().path == folder
    jit.tidy(other)
    assert folder.exists()
