"""The benchmark of paged tables measures rows in files, and its limits hold."""

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import paged_tables
import pytest
from paged_tables import MIB, Case, control_group, drawn, measured

from dlrm_hybrid.data.profile import WEIGHT_ONE, Staircase

TINY = Case(
    limit_mib=None,
    storage="mmap",
    readers=2,
    is_scattered=False,
    share=0.001,
    warm_up=1,
    batches=3,
)
EAT = "import sys; held = bytearray(int(sys.argv[1])); print(len(held))"


@pytest.mark.parametrize("case", [TINY, replace(TINY, storage="memory", is_scattered=True)])
def test_a_case_is_measured(case: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(paged_tables.build, "RAW_FOLDER", tmp_path)
    monkeypatch.setattr(paged_tables.row_storage, "READERS", 8)
    found = measured(case)
    assert found["samples_per_second"] > 0
    assert found["table_bytes"] > 1 * MIB
    assert found["cached"] > 0.9
    assert not list(tmp_path.iterdir())


def test_scattered_ids_are_the_same_in_another_order() -> None:
    column = Staircase(
        missing=WEIGHT_ONE // 4, missing_with=0, starts=(0, 2), stop=9, weights=(2**31, 2**31)
    )
    ordered, scattered = (
        np.bincount(drawn(column, 13, 4000, is_scattered, np.random.default_rng(0)), minlength=13)
        for is_scattered in (False, True)
    )
    assert ordered[9] == pytest.approx(1000, rel=0.2)
    assert ordered[0] == pytest.approx(750, rel=0.2)
    assert sorted(ordered) == sorted(scattered)
    assert list(ordered) != list(scattered)


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to make a control group")
def test_a_control_group_has_its_limit() -> None:
    def eat(mib: int, limit_mib: int) -> int:
        try:
            with control_group(limit_mib) as enter:
                command = [sys.executable, "-c", EAT, str(mib * MIB)]
                return subprocess.run(command, preexec_fn=enter, check=False).returncode
        except OSError as error:
            pytest.skip(f"cannot make a control group with a limit: {error}")

    assert eat(100, 300) == 0
    assert eat(300, 100) != 0
