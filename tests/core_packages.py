"""Processes that find no more packages than a user has who installs `dlrm-hybrid`, or its wheel."""

import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from functools import cache
from importlib import metadata
from pathlib import Path

ROOT = Path(__file__).parent.parent
CORE = ("torch", "numpy", "numba")
_NAME = re.compile(r"[A-Za-z0-9._-]+")
_ONLY = """
import sys
from importlib.machinery import BuiltinImporter, FrozenImporter, PathFinder

class Only(PathFinder):
    allowed = {"dlrm_hybrid", *sys.stdlib_module_names, *sys.argv.pop(1).split()}

    @classmethod
    def find_spec(cls, name, path=None, target=None):
        found = name.partition(".")[0] in cls.allowed
        return PathFinder.find_spec(name, path, target) if found else None

sys.meta_path[:] = [BuiltinImporter, FrozenImporter, Only]
"""


def run_alone(program: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run a program on this checkout that finds the packages of the core only."""
    allowed = " ".join(modules(required()))
    command = [sys.executable, "-c", _ONLY + program, allowed, *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True)


def build_wheel(folder: Path) -> Path:
    """The wheel of this checkout, in a folder without others."""
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    (wheel,) = folder.glob("*.whl")
    return wheel


def install(wheel: Path, folder: Path, distributions: dict[str, metadata.Distribution]) -> Path:
    """A new environment with a wheel and links to these installed distributions; its `bin`."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
    (packages,) = folder.glob("lib/python*/site-packages")
    for distribution in distributions.values():
        told = (distribution.read_text("top_level.txt") or "").split()  # what an old pip made
        names = {*told, *(path.parts[0] for path in distribution.files or ())}
        for name in names - {"..", "__pycache__"}:
            here, there = packages / name, Path(str(distribution.locate_file(name)))
            if there.exists() and not here.exists():
                here.symlink_to(there)
    pip = [sys.executable, "-m", "pip", "--python", str(folder / "bin/python"), "install"]
    options = ["--quiet", "--no-deps", "--no-index", "--disable-pip-version-check"]
    subprocess.run([*pip, *options, str(wheel)], check=True)
    return folder / "bin"


def required(names: Sequence[str] = CORE) -> dict[str, metadata.Distribution]:
    """Installed distributions that these need, themselves among them, by normal name.

    What they need for an extra, or on other machines, is not installed or does no harm.
    """
    found: dict[str, metadata.Distribution] = {}
    waiting = [*names]
    while waiting:
        name = normal(waiting.pop())
        if name in found:
            continue
        try:
            found[name] = metadata.distribution(name)
        except metadata.PackageNotFoundError:
            continue  # for another machine
        waiting += _requirements(found[name])
    return found


def modules(distributions: dict[str, metadata.Distribution]) -> set[str]:
    """The names that these distributions install for `import`."""
    return {
        module
        for module, names in _owners().items()
        if {normal(name) for name in names} & distributions.keys()
    }


def normal(requirement: str) -> str:
    """The normal form of the name at the head of a requirement."""
    name = _NAME.match(requirement)
    assert name is not None, requirement
    return re.sub(r"[-_.]+", "-", name[0]).lower()


_owners = cache(metadata.packages_distributions)


def _requirements(distribution: metadata.Distribution) -> Iterator[str]:
    for line in distribution.requires or ():
        if "extra ==" not in line:
            yield normal(line)
