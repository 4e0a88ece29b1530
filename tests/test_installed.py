"""The wheel, installed beside what it requires and used from an empty folder."""

import os
import subprocess
import sys
import tomllib
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from core_packages import CORE, ROOT, build_wheel, install, normal, required

from dlrm_hybrid import limits

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
FINDS_NOTHING_ELSE = """
from importlib.util import find_spec
import dlrm_hybrid.compress
from dlrm_hybrid.limits import TRAINER
found = [name for name in TRAINER if find_spec(name) is not None]
print(dlrm_hybrid.__file__, found)
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_wheel(tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="module")
def core(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return install(wheel, tmp_path_factory.mktemp("core"), required(CORE))


@pytest.fixture(scope="module")
def trainer(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    names = [normal(one) for one in PROJECT["optional-dependencies"]["train"]]
    return install(wheel, tmp_path_factory.mktemp("trainer"), required([*CORE, *names]))


def run(command: Sequence[str | Path], folder: Path) -> subprocess.CompletedProcess[str]:
    environment = {key: one for key, one in os.environ.items() if key != "PYTHONPATH"}
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)


@pytest.mark.slow
def test_the_core_alone(core: Path, tmp_path: Path) -> None:
    done = run([core / "python", "-c", FINDS_NOTHING_ELSE], tmp_path)
    assert done.stdout.split() == [
        str(next(core.parent.glob("lib/python*/site-packages/dlrm_hybrid/__init__.py"))),
        "[]",
    ], done.stderr
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_the_core_alone_trains_with_every_method_on_two_ranks(core: Path, tmp_path: Path) -> None:
    script = tmp_path / "ddp.py"
    script.write_bytes((ROOT / "scripts" / "examples" / "ddp.py").read_bytes())
    done = run([core / "python", script, "--steps", "20", "--seeds", "1"], tmp_path)
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.splitlines()) == 2 + 13


@pytest.mark.slow
def test_a_command_of_the_core_alone_names_the_extra(core: Path, tmp_path: Path) -> None:
    done = run([core / "dlrm_hybrid", "train"], tmp_path)
    assert done.returncode == 5
    assert "needs the extra dlrm-hybrid[train]" in done.stderr
    assert done.stderr.endswith(f"in a checkout: {limits.INSTALL_TRAINER}\n")
    assert not list(tmp_path.iterdir())


def test_the_trainer_trains_in_an_empty_folder(trainer: Path, tmp_path: Path) -> None:
    packages = next(trainer.parent.glob("lib/python*/site-packages/dlrm_hybrid"))
    before = sorted(packages.rglob("*"))
    small = ("parallel.world=in_process", "model=dlrm_small")
    arguments = ["+experiment=dct_levels", *small, "data.rows=4000", "train.steps=3"]
    done = run([trainer / "dlrm_hybrid", "train", *arguments, "hydra.run.dir=mine"], tmp_path)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "mine" / "summary.json").exists()
    # Nothing is written beside the program, where others install it that is not allowed.
    assert sorted(packages.rglob("*")) == before


@pytest.mark.slow
def test_pip_finds_all_that_the_trainer_needs(wheel: Path, tmp_path: Path) -> None:
    """Two gigabytes of packages from the index, into an environment with nothing of this one's."""
    with TemporaryDirectory() as folder:
        subprocess.run([sys.executable, "-m", "venv", folder], check=True)
        pip = [Path(folder, "bin/python"), "-m", "pip", "install", "--quiet"]
        stand_in, pins = ROOT / "packaging/fbgemm-gpu-cpu", ROOT / "constraints.txt"
        assert run([*pip, stand_in, f"{wheel}[train]", "-c", pins], tmp_path).returncode == 0
        command = Path(folder, "bin/dlrm_hybrid")
        arguments = ["+experiment=dct_hybrid", "data.rows=4000", "train.steps=3"]
        assert run([command, "train", *arguments], tmp_path).returncode == 0
        checked = run([command, "doctor"], tmp_path)
    assert checked.returncode == 0, checked.stdout
    assert "ready to train" in checked.stdout
