"""The kernels that are compiled beside the ranks' imports are those that a run calls."""

import os
import re
import subprocess
import sys
from pathlib import Path

from dlrm_hybrid.kernels import OF_LEVELS

KEPT = re.compile(r"/\w+\.(\w+)-([\w.]+)\.py\d+\.\d+\.nbc'")  # kernel and file


def test_a_run_with_levels_calls_those_that_are_compiled_first(tmp_path: Path) -> None:
    small = ("parallel.cuts=[top.3]", "activation.sparsity=0.5", "model=dlrm_small")
    command = ("-m", "dlrm_hybrid", "train", "+experiment=dct_levels", "hydra.run.dir=mine")
    short = ("data.rows=4000", "train.steps=3", "train.evaluate_every=0")
    subprocess.run(
        [sys.executable, *command, *small, *short],
        cwd=tmp_path,
        env={**os.environ, "NUMBA_DEBUG_CACHE": "1"},
        stdout=subprocess.DEVNULL,
        check=True,
    )
    logs = [path.read_text("utf-8") for path in (tmp_path / "mine" / "log").glob("*.log")]
    called = {f"{file}.{kernel}" for log in logs for kernel, file in KEPT.findall(log)}
    assert called == set(OF_LEVELS)
