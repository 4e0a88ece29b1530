"""Without the host's vector instructions every kernel gives the same bits."""

import json
import os
import subprocess
import sys
from pathlib import Path

import portable_rows


def test_a_processor_without_extensions_gives_the_same_bits(tmp_path: Path) -> None:
    generic = {"NUMBA_CPU_NAME": "generic", "NUMBA_CPU_FEATURES": ""}
    done = subprocess.run(
        [sys.executable, portable_rows.__file__],
        env={**os.environ, **generic, "NUMBA_CACHE_DIR": str(tmp_path)},
        capture_output=True,
        check=True,
        timeout=300,
    )
    assert json.loads(done.stdout) == {"processor": "generic", **portable_rows.digests()}
