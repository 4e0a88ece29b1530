import os
import re
import subprocess
import sys
from dataclasses import replace

import numpy as np
import prepare
import prepare_run
import pytest

from dlrm_hybrid.data import profile, synthetic
from dlrm_hybrid.data.folder import PrepareOptions
from dlrm_hybrid.data.manifest import Semantics
from dlrm_hybrid.telemetry import machine
from dlrm_hybrid.types import DataError

OPTIONS = PrepareOptions(
    semantics=Semantics(
        days=7,
        day_split="equal_rows",
        vocabulary="all_days",
        min_count=0,
        max_ind_range=0,
        on_bad_row="error",
    ),
    max_bad_rows=0,
    processes=1,
    block_bytes=1 << 20,
    overwrite=False,
    advice="",
)


@pytest.mark.slow
def test_all_figures_are_measured_and_stand_on_one_page(tmp_path, monkeypatch):
    monkeypatch.setattr(prepare, "LOADER_ROWS", 20_000)
    monkeypatch.setattr(prepare, "PARTS", (2, 1))
    bench = prepare.PrepareBench(
        rows=12_000,
        repeats=1,
        options=OPTIONS,
        profile=profile.builtin("criteo_kaggle"),
        loader=prepare.LoaderSizes(block_rows=4096, read_rows=512),
        folder=tmp_path / "made",
    )
    notes = []
    measured = prepare.measure_prepare(bench, notes.append)
    assert not list((tmp_path / "made").iterdir())
    assert "prepare 6,000 rows with 2 process(es)" in notes
    assert [(run.rows, run.processes) for run in measured.runs] == [
        (rows, processes) for rows in (6000, 12_000) for processes in (1, 2)
    ]
    assert all(run.seconds > 0 and run.cpu_seconds > 0 and run.ids > 26 for run in measured.runs)
    assert measured.runs[0].ids < measured.runs[-1].ids
    assert all(seen.peak_bytes > 10e6 for seen in measured.memory)
    assert len(measured.loader) == 6
    assert all(0 < run.seconds[0] < 1e-3 for run in measured.loader)
    page = prepare.prepare_page(measured, machine.describe(), "the command")
    assert re.findall(r"^#+ .*", page, re.M) == ["# Preparing raw rows", "## Memory", "## Loader"]
    assert "45,840,617 (extrapolated)" in page


def test_a_failed_prepare_is_raised_here(tmp_path):
    raw = tmp_path / "train.txt"
    raw.write_text("not a row\n")
    with pytest.raises(DataError, match="train.txt:1"):
        prepare_run.run_prepare(raw, tmp_path / "shards", OPTIONS)


def test_time_of_workers_counts(tmp_path):
    raw = tmp_path / "train.txt"
    synthetic.generate(raw, 2000, 0, profile.builtin("criteo_kaggle"), lambda done: None)
    alone = prepare_run.run_prepare(raw, tmp_path / "one", OPTIONS)
    shared = prepare_run.run_prepare(raw, tmp_path / "two", replace(OPTIONS, processes=2))
    # Two workers import numpy and numba: far more than the work itself takes.
    assert shared.cpu_seconds > alone.cpu_seconds + 0.3
    assert shared.ids == alone.ids


def test_memory_counts_the_whole_tree_and_shared_pages_once():
    held = np.ones(8 << 20)  # 64 MiB
    code = (
        "import subprocess, sys; held = b'1' * (32 << 20); "
        "child = subprocess.Popen([sys.executable, '-c', "
        "\"held = b'1' * (48 << 20); print('ready', flush=True); input()\"]); child.wait()"
    )
    _, before = prepare_run.tree_memory(os.getpid())
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdout.readline() == b"ready\n"
        kind, alone = prepare_run.tree_memory(process.pid)
        _, after = prepare_run.tree_memory(os.getpid())
        process.stdin.close()
    assert before > held.nbytes
    assert 80 << 20 < alone < 150 << 20
    assert 70 << 20 < after - before < 150 << 20
    assert kind == ("PSS" if sys.platform == "linux" else "RSS")
    assert prepare_run.tree_memory(process.pid)[1] == 0


def test_extrapolation_continues_the_last_line():
    assert prepare.extrapolate([(1, 100.0), (10, 5.0), (20, 7.0)], 120) == pytest.approx(27)


def test_a_full_size_needs_no_extrapolation():
    sizes = (10_000_000, 20_000_000, prepare.KAGGLE_ROWS)
    measured = prepare.PrepareMeasured(
        runs=tuple(
            prepare_run.PrepareRun(rows=rows, processes=n, seconds=1, cpu_seconds=1, ids=27)
            for rows in sizes
            for n in (1, 2)
        ),
        memory=tuple(
            prepare_run.Memory(rows=rows, processes=n, kind="PSS", peak_bytes=n * 10**9)
            for rows in sizes
            for n in (1, 2)
        ),
        loader=(prepare.LoaderRun(batch_size=128, shuffle=True, seconds=(1e-7,)),),
    )
    page = prepare.prepare_page(measured, machine.describe(), "the command")
    assert "(extrapolated)" not in page
    assert "2,000 |\n" in page
