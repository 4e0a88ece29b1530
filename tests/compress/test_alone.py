"""The compressors need torch, numpy and numba, and nothing else that is installed here."""

import pytest
from core_packages import run_alone

PROGRAM = """
import pkgutil
import sys
from importlib import import_module, reload
from dlrm_hybrid.compress import Dct, SparseBoundary, ddp_hook

Dct(density=0.01)
boundary = SparseBoundary(0.1)
assert "torch" in sys.modules
assert "numba" not in sys.modules, "it takes half a second, which is for the first step"
import torch
boundary(torch.ones(1, 3))
assert "numba" in sys.modules
again = reload(sys.modules[SparseBoundary.__module__])
again.SparseBoundary(0.1)(torch.ones(1, 3))

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


def test_the_compressors_are_imported_and_load_numba_only_when_a_row_is_selected() -> None:
    done = run_alone(PROGRAM)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("module", ["pydantic", "xxhash", "dlrm_hybrid.config.compose"])
def test_others_would_be_seen(module: str) -> None:
    assert "ModuleNotFoundError: No module named" in run_alone(f"import {module}").stderr
