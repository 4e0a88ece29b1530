"""Without the host's vector instructions every kernel gives the same bits."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from patience import HANG_SECONDS

TESTS = Path(__file__).parents[1]
# What is held against plain torch, numpy or Python there and here, most of it bit for bit.
ROOMS = (
    "kernels",
    "wire",
    "compress/gradient/test_gradient_laws.py",
    "compress/test_row_levels.py",
)


@pytest.mark.slow
def test_a_processor_without_extensions_gives_the_same_bits() -> None:
    """Its kernels, too, are kept with the others: they take a minute or two to compile, once."""
    generic = {"NUMBA_CPU_NAME": "generic", "NUMBA_CPU_FEATURES": ""}
    rooms = [str(TESTS / room) for room in ROOMS]
    options = ["-m", "not slow", "-p", "no:cacheprovider", "--hypothesis-profile=quick"]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *rooms, *options],
        env={**os.environ, **generic},
        capture_output=True,
        text=True,
        timeout=HANG_SECONDS,
    )
    assert done.returncode == 0, done.stdout[-4000:]
