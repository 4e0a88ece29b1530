"""What is installed with which extra, and what a wheel holds."""

import re
import subprocess
import sys
import tomllib
from email.parser import Parser
from pathlib import Path
from zipfile import ZipFile

import pytest
from core_packages import CORE, build_wheel, modules, normal, required, run_alone

import dlrm_hybrid
from dlrm_hybrid import limits
from dlrm_hybrid.doctor import VERSIONS

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
EXTRAS = PROJECT["optional-dependencies"]
CONSTRAINTS = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
COMMAND = "import sys; from dlrm_hybrid.__main__ import main; sys.exit(main())"


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_wheel(tmp_path_factory.mktemp("wheel"))


def test_the_core_is_torch_numpy_and_numba() -> None:
    assert {normal(one) for one in PROJECT["dependencies"]} == {*CORE}


def test_exact_versions_are_in_constraints_alone() -> None:
    everything = [*PROJECT["dependencies"], *(one for extra in EXTRAS.values() for one in extra)]
    assert not [one for one in everything if "==" in one]
    pins = dict(line.split("==") for line in CONSTRAINTS if "==" in line)
    assert {normal(name): version for name, version in VERSIONS.items()} == {
        name.removesuffix("-cpu"): version for name, version in pins.items()
    }


@pytest.mark.parametrize("build", ["", "+cu130"])
def test_pip_takes_any_build_of_the_torch_that_is_needed(build: str, tmp_path: Path) -> None:
    for version in (f"{VERSIONS['torch']}{build}", "2.13.9+cu999"):
        name, metadata = (
            f"torch-{version}",
            f"Metadata-Version: 2.1\nName: torch\nVersion: {version}\n",
        )
        with ZipFile(tmp_path / f"{name}-py3-none-any.whl", "w") as archive:
            archive.writestr(f"{name}.dist-info/METADATA", metadata)
            archive.writestr(f"{name}.dist-info/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
            archive.writestr(f"{name}.dist-info/RECORD", "")
    needed = [one for extra in EXTRAS.values() for one in extra if normal(one) == "torch"]
    options = ("--isolated", "--no-index", "--dry-run", "--ignore-installed", "--no-deps")
    command = [sys.executable, "-m", "pip", "install", *options, "--find-links", str(tmp_path)]
    command += [*needed, "-c", str(ROOT / "constraints.txt")]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert f"Would install torch-{VERSIONS['torch']}{build}\n" in done.stdout


def test_what_commands_look_for_is_what_the_extra_installs() -> None:
    names = {normal(one) for one in EXTRAS["train"]} - {*CORE}
    names = {"fbgemm-gpu-cpu" if name == "fbgemm-gpu" else name for name in names}  # a stand-in
    installed = {name: one for name, one in required([*names]).items() if name in names}
    looked_for = {name: modules({name: one}) & {*limits.TRAINER} for name, one in installed.items()}
    assert {name: len(found) for name, found in looked_for.items()} == dict.fromkeys(names, 1)
    assert set[str]().union(*looked_for.values()) == {*limits.TRAINER}


def test_a_command_without_the_trainer_says_how_to_get_it() -> None:
    done = run_alone(COMMAND, "train", "train.steps=1")
    assert done.stdout == ""
    assert done.stderr == (
        "dlrm_hybrid train: needs the extra dlrm-hybrid[train] "
        "(fbgemm_gpu, hydra, isal and 12 more not found); in a checkout: "
        "pip install ./packaging/fbgemm-gpu-cpu '.[train]' -c constraints.txt\n"
    )
    assert done.returncode == 5


def test_the_version_needs_no_trainer() -> None:
    done = run_alone(COMMAND, "--version")
    assert (done.stdout, done.returncode) == (f"dlrm_hybrid {dlrm_hybrid.__version__}\n", 0)


def test_one_that_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    assert limits.lacks_trainer("x") is None
    monkeypatch.setattr(limits, "TRAINER", ("numpy", "no_such_module"))
    assert limits.lacks_trainer("x") == (
        "x: needs the extra dlrm-hybrid[train] (no_such_module not found); in a checkout: "
        f"{limits.INSTALL_TRAINER}"
    )


def test_a_wheel_holds_licence_types_and_configuration(wheel: Path) -> None:
    with ZipFile(wheel) as archive:
        names = archive.namelist()
        (metadata,) = (name for name in names if name.endswith(".dist-info/METADATA"))
        told = Parser().parsestr(archive.read(metadata).decode())
    assert [name for name in names if name.endswith("licenses/LICENSE")]
    assert {"dlrm_hybrid/conf/config.yaml", "dlrm_hybrid/py.typed"} <= {*names}
    assert [name for name in names if not name.startswith(("dlrm_hybrid/", "dlrm_hybrid-"))] == []
    assert told["Version"] == dlrm_hybrid.__version__
    core = [one for one in told.get_all("Requires-Dist", []) if "extra ==" not in one]
    assert {normal(one) for one in core} == {*CORE}
    assert {*told.get_all("Provides-Extra", [])} == {*EXTRAS}


def test_the_changelog_knows_this_version() -> None:
    text = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    heads = re.findall(r"^## (\S+)", text, flags=re.MULTILINE)
    assert heads[0] in ("Unreleased", dlrm_hybrid.__version__)
    assert dlrm_hybrid.__version__ in heads
