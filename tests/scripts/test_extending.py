"""docs/extending.md does what it says: its files are written, and its commands run."""

import json
import runpy
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from pages import commands, files
from world_runs import summary

from dlrm_hybrid.cli.main import run

FILES, COMMANDS = files("extending.md"), commands("extending.md")


@pytest.fixture
def mine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder with the files of the page, as that of a user."""
    for name, text in FILES.items():
        (tmp_path / name).write_text(text)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr("dlrm_hybrid.config.outside._loaded", {})
    yield tmp_path
    for name in FILES:
        sys.modules.pop(Path(name).stem, None)


def test_its_commands_train_score_and_export(mine: Path, small_rows: list[str]) -> None:
    rows = [one for one in small_rows if not one.startswith("model=")]
    steps = ("train.steps=6", "telemetry.every=2", "parallel.world=in_process")
    assert len(COMMANDS) == 5
    for number, command in enumerate(COMMANDS):
        _, _, _, verb, *overrides = shlex.split(command)
        is_hybrid = "parallel=hybrid" in overrides
        more = (*rows, *steps[: 2 + is_hybrid], f"hydra.run.dir={mine / str(number)}")
        given = [*more, *overrides] if verb == "train" else overrides
        assert run(["dlrm_hybrid", verb, *given]) == 0, command
    assert json.loads((mine / "runs/mine/config.json").read_text())["model"]["hidden"] == 32
    sent = summary(mine / "1")["network"]["by_class"]["activation"]
    assert 0 < sent["bytes"] < 0.5 * sent["dense_equivalent_bytes"]
    assert (mine / "exported" / "model.pt2").is_file()
    late = json.loads((mine / "4" / "config.json").read_text())
    assert (late["schedule"]["late"], late["sync"]["name"]) == (2, "my_worlds:AsOldAsTrainers")


def test_its_program_learns_in_a_world_of_processes(
    mine: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    runpy.run_path(str(mine / "my_world.py"), run_name="__main__")
    assert capsys.readouterr().out == "True\n"
    assert len(FILES["my_models.py"].splitlines()) + len(FILES["my_world.py"].splitlines()) <= 60
    assert len(FILES["my_models.py"].splitlines()) <= 40
