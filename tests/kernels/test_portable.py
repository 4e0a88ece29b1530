"""Without the host's vector instructions every kernel gives the same bits."""

import json
import os
import subprocess
import sys

import portable_rows
import pytest
from patience import HANG_SECONDS


@pytest.mark.slow
def test_a_processor_without_extensions_gives_the_same_bits() -> None:
    """Its kernels, too, are kept with the others: they take a minute or two to compile, once."""
    generic = {"NUMBA_CPU_NAME": "generic", "NUMBA_CPU_FEATURES": ""}
    done = subprocess.run(
        [sys.executable, portable_rows.__file__],
        env={**os.environ, **generic},
        capture_output=True,
        check=True,
        timeout=HANG_SECONDS,
    )
    assert json.loads(done.stdout) == {"processor": "generic", **portable_rows.digests()}
