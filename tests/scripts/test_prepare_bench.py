import os
import re
import subprocess
import sys
from dataclasses import replace

import numpy as np
import prepare
import pytest

from dlrm_hybrid.config.compose import values_of
from dlrm_hybrid.config.validate import validate
from dlrm_hybrid.data import profile, synthetic
from dlrm_hybrid.data.folder import PrepareOptions
from dlrm_hybrid.data.manifest import Semantics
from dlrm_hybrid.data.schemas.reading import builtin
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
        schema=builtin("criteo_kaggle"),
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
    config = validate(values_of(["data.shuffle_block_rows=4096", "data.shuffle_read_rows=512"]))
    page = prepare.page(config, 12_000, 1, tmp_path, machine.describe(), "the command")
    assert re.findall(r"^#+ .*", page, re.M) == ["# Preparing raw rows", "## Memory", "## Loader"]
    assert "45,840,617 (extrapolated)" in page
    first, memory, loader = (
        [[cell.strip() for cell in line.split("|")[1:-1]] for line in part.splitlines()[2:]]
        for part in re.findall(r"(?:^\|.*\n)+", page, re.M)
    )
    assert [row[:2] for row in first] == [
        [rows, processes] for rows in ("6,000", "12,000") for processes in ("1", "2")
    ]
    ids = [int(row[1].replace(",", "")) for row in memory[:2]]
    assert 26 < ids[0] < ids[1]
    assert all(float(peak) > 10 for row in memory[:2] for peak in row[2:])
    assert len(loader) == 6


def test_a_failed_prepare_is_raised_here(tmp_path):
    raw = tmp_path / "train.txt"
    raw.write_text("not a row\n")
    with pytest.raises(DataError, match="train.txt:1"):
        prepare.run_prepare(raw, tmp_path / "shards", OPTIONS)


def test_threads_make_the_same_ids_and_their_time_counts(tmp_path):
    raw = tmp_path / "train.txt"
    synthetic.generate(raw, 2000, 0, profile.builtin("criteo_kaggle"), lambda done: None)
    alone, _ = prepare.run_prepare(raw, tmp_path / "one", OPTIONS)
    shared, _ = prepare.run_prepare(raw, tmp_path / "two", replace(OPTIONS, processes=2))
    assert shared.ids == alone.ids
    assert min(alone.cpu_seconds, shared.cpu_seconds) > 0.01


def test_memory_counts_the_whole_tree_and_shared_pages_once():
    held = np.ones(8 << 20)  # 64 MiB
    code = (
        "import subprocess, sys; held = b'1' * (32 << 20); "
        "child = subprocess.Popen([sys.executable, '-c', "
        "\"held = b'1' * (48 << 20); print('ready', flush=True); input()\"]); child.wait()"
    )
    before = prepare.tree_memory(os.getpid()).peak_bytes
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdout.readline() == b"ready\n"
        alone = prepare.tree_memory(process.pid)
        after = prepare.tree_memory(os.getpid()).peak_bytes
        process.stdin.close()
    assert before > held.nbytes
    assert 80 << 20 < alone.peak_bytes < 150 << 20
    assert 70 << 20 < after - before < 150 << 20
    assert alone.kind == ("PSS" if sys.platform == "linux" else "RSS")
    assert prepare.tree_memory(process.pid).peak_bytes == 0


def test_extrapolation_continues_the_last_line():
    assert prepare.extrapolate([(1, 100.0), (10, 5.0), (20, 7.0)], 120) == pytest.approx(27)


def test_a_full_size_needs_no_extrapolation():
    cases = [(rows, n) for rows in (10_000_000, 20_000_000, prepare.KAGGLE_ROWS) for n in (1, 2)]
    runs = {case: [prepare.PrepareRun(seconds=1, cpu_seconds=1, ids=27)] for case in cases}
    rows = prepare.memory_rows(runs, {case: prepare.Memory(case[1] * 10**9) for case in cases})
    assert [row["rows"] for row in rows] == ["10,000,000", "20,000,000", "45,840,617"]
    assert rows[-1]["peak MB, 2 threads"] == 2000
