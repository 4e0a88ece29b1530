"""The names that `import dlrm_hybrid` offers, without what they take to load."""

import ast
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import dlrm_hybrid


def test_names_are_loaded_when_they_are_asked_for() -> None:
    program = (
        "import sys, dlrm_hybrid; assert 'World' in dir(dlrm_hybrid); "
        "assert 'torch' not in sys.modules; from dlrm_hybrid import ModelSpec, World; "
        "sys.exit(World.__module__ != 'dlrm_hybrid.world.world')"
    )
    assert subprocess.run([sys.executable, "-c", program]).returncode == 0
    assert not hasattr(dlrm_hybrid, "Wrold")


def test_type_checkers_see_the_same_names() -> None:
    stub = ast.parse(Path(dlrm_hybrid.__file__).with_suffix(".pyi").read_text(encoding="utf-8"))
    found = {
        alias.name: getattr(import_module(node.module or ""), alias.name)
        for node in stub.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    assert {name: getattr(dlrm_hybrid, name) for name in dlrm_hybrid._NAMES} == found
