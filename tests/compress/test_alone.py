"""The compressors need torch, numpy and numba, and nothing else that is installed here."""

import subprocess
import sys
from pathlib import Path

import core_packages
import pytest

ROOT = Path(__file__).parent.parent.parent
ONLY = """
import sys
from importlib.abc import MetaPathFinder

class Only(MetaPathFinder):
    allowed = {"dlrm_hybrid", *sys.stdlib_module_names, *sys.argv[1].split()}

    def find_spec(self, name, path, target=None):
        if name.partition(".")[0] not in self.allowed:
            raise ModuleNotFoundError(f"{name}: not of the core", name=name)

sys.meta_path.insert(0, Only())
"""
ALL_MODULES = """
import pkgutil
from importlib import import_module

for room in ("compress", "kernels", "wire"):
    folder = import_module(f"dlrm_hybrid.{room}").__path__
    for module in pkgutil.walk_packages(folder, f"dlrm_hybrid.{room}."):
        if module.name != "dlrm_hybrid.wire.frame":  # messages between ranks: xxhash
            import_module(module.name)
"""


def run_alone(program: str) -> subprocess.CompletedProcess[str]:
    allowed = " ".join(core_packages.modules(core_packages.required()))
    command = [sys.executable, "-c", ONLY + program, allowed]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True)


def test_the_compressors_import() -> None:
    done = run_alone(ALL_MODULES)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("module", ["pydantic", "xxhash", "dlrm_hybrid.config.schema"])
def test_others_would_be_seen(module: str) -> None:
    assert "not of the core" in run_alone(f"import {module}").stderr
