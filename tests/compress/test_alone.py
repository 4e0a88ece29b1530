"""The compressors need torch, numpy and numba, and nothing else that is installed here."""

import pytest
from core_packages import run_alone

ALL_MODULES = """
import pkgutil
from importlib import import_module

OTHERS = (
    "dlrm_hybrid.wire.frame",  # messages between ranks: xxhash
    "dlrm_hybrid.kernels.device",  # where there is CUDA: Triton, as torch brings it
    "dlrm_hybrid.compress.device.launches",
)
for room in ("compress", "kernels", "wire"):
    folder = import_module(f"dlrm_hybrid.{room}").__path__
    for module in pkgutil.walk_packages(folder, f"dlrm_hybrid.{room}."):
        if module.name not in OTHERS:
            import_module(module.name)
"""


def test_the_compressors_import() -> None:
    done = run_alone(ALL_MODULES)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("module", ["pydantic", "xxhash", "dlrm_hybrid.config.compose"])
def test_others_would_be_seen(module: str) -> None:
    assert "ModuleNotFoundError: No module named" in run_alone(f"import {module}").stderr


def test_records_and_the_hook_load_no_numba() -> None:
    """It takes half a second, which is for the first step."""
    program = "from dlrm_hybrid.compress import Dct, SparseBoundary, ddp_hook; Dct(density=0.01)"
    done = run_alone(
        f"import sys; {program}; print('torch' in sys.modules, 'numba' in sys.modules)"
    )
    assert done.stdout == "True False\n", done.stderr
