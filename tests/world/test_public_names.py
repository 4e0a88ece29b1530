"""The names that `import dlrm_hybrid` offers, without what they take to load."""

import ast
import inspect
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

import dlrm_hybrid
from dlrm_hybrid import limits


def test_names_are_loaded_when_they_are_asked_for() -> None:
    program = (
        "import sys, dlrm_hybrid; assert 'World' in dir(dlrm_hybrid); "
        "sys.exit('torch' in sys.modules)"
    )
    assert dlrm_hybrid.World.__module__ == "dlrm_hybrid.world.world"
    assert subprocess.run([sys.executable, "-c", program]).returncode == 0
    assert not hasattr(dlrm_hybrid, "Wrold")


def test_the_core_alone_lists_what_it_has(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "TRAINER", ("torch", "no_such_module"))
    names = [name for name, _ in inspect.getmembers(dlrm_hybrid)]
    assert "__version__" in names and "World" not in names
    with pytest.raises(ImportError, match=r"dlrm_hybrid.World: needs .*\[train\] \(no_such_module"):
        _ = dlrm_hybrid.World


def test_type_checkers_see_the_same_names() -> None:
    stub = ast.parse(Path(dlrm_hybrid.__file__).with_suffix(".pyi").read_text(encoding="utf-8"))
    found = {
        alias.name: getattr(import_module(node.module or ""), alias.name)
        for node in stub.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    assert {name: getattr(dlrm_hybrid, name) for name in dlrm_hybrid._NAMES} == found
