import shutil
from pathlib import Path
from typing import NoReturn

import pytest
from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
    SplitTableBatchedEmbeddingBagsCodegen,
)

from dlrm_hybrid import doctor
from dlrm_hybrid.cli.main import run
from dlrm_hybrid.comm.zmq.curve import read_key_file
from dlrm_hybrid.doctor import Level, check_rows, run_checks


def test_a_wrong_version_is_named_and_ends_with_5(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)  # without rows that somebody has prepared where tests are run
    monkeypatch.setattr(doctor, "VERSIONS", {**doctor.VERSIONS, "torch": "1.0.0"})
    assert run(["dlrm_hybrid", "doctor"]) == 5
    report = capsys.readouterr().out
    assert "FAIL  packages" in report
    assert "1.0.0 is needed" in report
    assert "not ready to train: 1 of these failed" in report


def test_a_build_of_fbgemm_that_torch_cannot_load_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    builds = {"torch": "2.13.0+cpu", "torchrec": "1.8.0", "fbgemm-gpu": "1.8.0"}
    monkeypatch.setattr(doctor.metadata, "version", builds.__getitem__)
    checks = run_checks(Path.cwd(), lambda: (Level.OK, ""))
    level, detail = next((level, detail) for name, level, detail in checks if name == "packages")
    assert level is Level.FAIL
    assert "fbgemm-gpu 1.8.0 is built for CUDA, torch is not: " in detail
    assert "pip uninstall fbgemm-gpu and pip install ./packaging/fbgemm-gpu-cpu" in detail


def test_a_broken_probe_is_a_finding_and_the_others_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_device(*_: object) -> NoReturn:
        raise OSError("no such device")

    monkeypatch.setattr(doctor, "_vectors", no_device)
    monkeypatch.setattr(SplitTableBatchedEmbeddingBagsCodegen, "forward", no_device)
    checks = run_checks(Path.cwd(), lambda: check_rows(Path("nothing"), print))
    found = {name: finding for name, *finding in checks}
    broken = [Level.FAIL, "OSError: no such device"]
    assert found["vector instructions"] == found["fbgemm"] == broken
    assert found["memory"][0] is not Level.FAIL
    assert len(found) == 13
    assert "times the speed of float32" in found["bfloat16"][1]
    assert "compiled for" in found["kernels"][1]


def test_kernels_that_cannot_be_kept_are_not_said_to_be(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("NUMBA_CACHE_DIR", "/proc/nobody")  # where root cannot make a folder either
    monkeypatch.setattr("tempfile.tempdir", "/proc/nobody")
    assert run(["dlrm_hybrid", "doctor", "doctor.action=compile"]) == 5
    told = capsys.readouterr()
    head, *reasons = told.err.splitlines()
    assert head == "no usable folder for the kernel cache; set NUMBA_CACHE_DIR to one"
    assert len(reasons) == 2
    assert all("/proc/nobody/" in line and "cannot be used (" in line for line in reasons)
    assert told.out == ""


def test_damaged_rows_are_a_finding(small_rows: list[str], tmp_path: Path) -> None:
    prepared = Path(next(text for text in small_rows if "prepared" in text).partition("=")[2])
    rows = Path(shutil.copytree(prepared, tmp_path / "rows"))
    assert check_rows(rows, print)[0] is Level.OK
    with (rows / "dense.npy").open("r+b") as file:
        file.seek(1000)
        file.write(b"\xff")
    level, detail = check_rows(rows, print)
    assert level is Level.FAIL
    assert "dense.npy: rows 0 to 6,999 (counted from 0): checksum differs" in detail


def test_keys_are_made_once_and_for_this_user_only(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "keys.json"
    argv = ["dlrm_hybrid", "doctor", "doctor.action=keys", f"doctor.output={path}"]
    assert run(argv) == 0
    said = capsys.readouterr().out
    assert f"network.keys={path}" in said
    keys = read_key_file(path)
    assert path.stat().st_mode & 0o777 == 0o600
    assert keys.secret.decode() not in said
    assert run(argv) == 5
    assert "keys are never replaced" in capsys.readouterr().err
    assert read_key_file(path) == keys
