"""Made-up input: a little of it each time, and a fuzzer that notices what it is there for."""

import subprocess
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from dlrm_hybrid.wire.frame import FrameError

SCRIPTS = Path(__file__).parents[2] / "scripts" / "faults"


def fuzzed(*options: str) -> dict[str, list[str]]:
    """The lines of the table by input, when nothing was wrong."""
    command = [sys.executable, SCRIPTS / "fuzz.py", *options]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in done.stdout.splitlines()]
    return {row[0]: row[1:] for row in rows[2:]}


def test_a_little_made_up_input() -> None:
    found = fuzzed("--rows", "2000", "--frames", "1500", "--configurations", "4", "--seed", "3")
    assert {kind: (row[0], row[-1]) for kind, row in found.items()} == dict.fromkeys(
        ("rows", "frames", "configurations"), ("3", "0")
    )
    taken = {kind: int(row[2].replace(",", "")) for kind, row in found.items()}
    assert 250 < taken["rows"] < 1_750
    assert 25 < taken["frames"] < 750


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        ("--rows", "100000", "--frames", "100000", "--seed", "4"),
        ("--configurations", "200", "--commands", "20", "--seed", "5"),
    ],
)
def test_more_made_up_input(options: tuple[str, ...]) -> None:
    assert [row[-1] for row in fuzzed(*options).values()] == ["0", "0"]


@pytest.fixture
def modules(monkeypatch: pytest.MonkeyPatch) -> dict[str, ModuleType]:
    from importlib import import_module

    monkeypatch.syspath_prepend(str(SCRIPTS))
    return {name: import_module(name) for name in ("fuzz_rows", "fuzz_frames", "fuzz_config")}


def test_rows_that_are_wrongly_taken_are_noticed(
    modules: dict[str, ModuleType], monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = modules["fuzz_rows"]
    parse = rows.parse

    def lenient(text: np.ndarray, max_bad_rows: int) -> object:
        return parse(np.where(text == ord("g"), ord("f"), text).astype(np.uint8), max_bad_rows)

    monkeypatch.setattr(rows, "parse", lenient)
    told = rows.fuzz(2_000, 1)
    assert any("other rows are refused" in fault for fault in told.faults)


def test_damage_that_is_not_noticed_is(
    modules: dict[str, ModuleType], monkeypatch: pytest.MonkeyPatch
) -> None:
    frames = modules["fuzz_frames"]
    decode, originals = frames.decode, frames.genuine()

    def careless(buffer: bytes) -> object:
        try:
            return decode(buffer)
        except FrameError:
            return originals[0]

    monkeypatch.setattr(frames, "decode", careless)
    told = frames.fuzz(200, 1)
    assert any("damage was not noticed" in fault for fault in told.faults)


def test_a_traceback_and_an_unnamed_key_are_noticed(
    modules: dict[str, ModuleType], monkeypatch: pytest.MonkeyPatch
) -> None:
    configurations = modules["fuzz_config"]
    known = configurations.known_keys()
    good = "configuration: 1 fault\n  train.seed = -1: must be greater than or equal to 0"
    assert configurations.unnamed(good, ["train.seed=-1"], known) == []
    for bad in ("Traceback", "configuration: 1 fault\n  oh no", f"{good}\x1b", good[:22]):
        assert configurations.unnamed(bad, ["train.seed=-1"], known), bad

    def broken(overrides: list[str]) -> None:
        raise KeyError(overrides[0])

    monkeypatch.setattr(configurations, "buildable", broken)
    told = configurations.fuzz(3, 1)
    assert (told.tried, told.accepted, len(told.faults)) == (3, 0, 3)
