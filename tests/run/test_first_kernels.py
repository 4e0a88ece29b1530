"""The kernels that are compiled beside the ranks' imports are those that a run calls."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from dlrm_hybrid.kernels import first_kernels

KEPT = re.compile(r"/\w+\.(\w+)-([\w.]+)\.py\d+\.\d+\.nbc'")  # kernel and file


@pytest.mark.parametrize(
    ("world", "has_stages"),
    [
        (("+experiment=dct_levels", "parallel.cuts=[top.3]", "activation.sparsity=0.5"), True),
        (("+experiment=dp_levels",), False),
    ],
)
def test_a_run_with_levels_calls_those_that_are_compiled_first(
    world: tuple[str, ...], has_stages: bool, tmp_path: Path
) -> None:
    command = ("-m", "dlrm_hybrid", "train", "hydra.run.dir=mine", "model=dlrm_small")
    short = ("data.rows=4000", "train.steps=3", "train.evaluate_every=0")
    subprocess.run(
        [sys.executable, *command, *world, *short],
        cwd=tmp_path,
        env={**os.environ, "NUMBA_DEBUG_CACHE": "1"},
        stdout=subprocess.DEVNULL,
        check=True,
    )
    logs = [path.read_text("utf-8") for path in (tmp_path / "mine" / "log").glob("*.log")]
    called = {f"{file}.{kernel}" for log in logs for kernel, file in KEPT.findall(log)}
    assert called == set(first_kernels(True, has_stages))
