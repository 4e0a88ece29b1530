"""The script that puts clocks into ranks names functions that exist."""

import importlib.util
from importlib import import_module
from operator import attrgetter
from pathlib import Path

SCRIPT = Path(__file__).parents[2] / "scripts" / "benchmarks" / "timed_rank.py"


def test_every_span_is_a_function() -> None:
    found = importlib.util.spec_from_file_location(SCRIPT.stem, SCRIPT)
    assert found is not None
    assert found.loader is not None
    script = importlib.util.module_from_spec(found)
    found.loader.exec_module(script)
    assert len(script.SPANS) > 10
    for _, module, name in script.SPANS:
        assert callable(attrgetter(name)(import_module(module))), f"{module}.{name}"
