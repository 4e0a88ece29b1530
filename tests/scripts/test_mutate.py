"""The script that plants faults: each has its place, and tests that are there."""

import sys
from importlib import util
from pathlib import Path

SCRIPT = Path(__file__).parents[2] / "scripts" / "mutate.py"


def test_every_fault_has_its_place() -> None:
    spec = util.spec_from_file_location("mutate", SCRIPT)
    assert spec is not None and spec.loader is not None
    mutate = util.module_from_spec(spec)
    sys.modules["mutate"] = mutate  # a dataclass looks its module up
    spec.loader.exec_module(mutate)
    faults = mutate.read_faults()
    assert [fault.what for fault in faults if not mutate.is_placed(fault)] == []
    assert len({fault.what for fault in faults}) == len(faults)
    assert all(fault.old != fault.new for fault in faults)
    paths = {word for fault in faults for word in fault.tests.split() if "/" in word}
    assert [path for path in paths if not (SCRIPT.parents[1] / path).exists()] == []
