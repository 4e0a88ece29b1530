"""Limits that keep the code readable, held by counting."""

import ast
import subprocess
import sys
from collections import Counter, defaultdict
from functools import cache
from pathlib import Path
from typing import TypeVar

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "dlrm_hybrid"
MAX_FILE_LINES = 600
MAX_FUNCTION_LINES = 60
MAX_PARAMETERS = 8
MAX_FOLDER_FILES = 15

SOURCES = sorted(PACKAGE.rglob("*.py"))
MODULES = {".".join(path.relative_to(ROOT).with_suffix("").parts): path for path in SOURCES}
# To become empty: files whose only importer is a sibling of a like name, and crowded folders.
CUT_OFF: set[str] = set()
CROWDED: set[str] = set()
Node = TypeVar("Node", bound=ast.AST)
RECORDS = (
    *("record.py", "config/choices.py", "config/outside.py", "config/schema.py"),
    *("compress/activation/methods.py", "model/optimizer.py", "model/spec.py", "model/tables.py"),
    "parallel/schedule.py",
)


@cache
def nodes_of(path: Path) -> dict[type, list]:
    nodes = defaultdict(list)
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        nodes[type(node)].append(node)
    return nodes


def found(*kinds: type[Node]) -> list[tuple[Path, Node]]:
    return [(path, node) for path in SOURCES for kind in kinds for node in nodes_of(path)[kind]]


def functions() -> list[tuple[Path, ast.FunctionDef | ast.AsyncFunctionDef]]:
    return found(ast.FunctionDef, ast.AsyncFunctionDef)


def test_files_are_short() -> None:
    lengths = {path: len(path.read_text(encoding="utf-8").splitlines()) for path in SOURCES}
    assert {path: count for path, count in lengths.items() if count > MAX_FILE_LINES} == {}


def test_functions_are_short() -> None:
    assert [
        f"{path}: {node.name}"
        for path, node in functions()
        if (node.end_lineno or 0) - node.lineno + 1 > MAX_FUNCTION_LINES
    ] == []


def test_functions_take_few_parameters() -> None:
    # A numba kernel cannot take a dataclass: its arrays come one by one.
    assert [
        f"{path}: {node.name}"
        for path, node in functions()
        if "kernels" not in path.parts
        and len([*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs])
        - (bool(node.args.args) and node.args.args[0].arg in ("self", "cls"))
        > MAX_PARAMETERS
    ] == []


def test_no_class_inherits_from_one_of_this_package() -> None:
    classes = found(ast.ClassDef)
    protocols = {
        node.name for _, node in classes if any(name(base) == "Protocol" for base in node.bases)
    }
    ours = {node.name for _, node in classes}
    errors = {node for node in ours if node.endswith("Error")}
    # Choices of a section of the configuration: fields that several have stand in a common record.
    records = {
        node.name for path, node in classes if path.relative_to(PACKAGE).as_posix() in RECORDS
    }
    assert [
        f"{path}: {node.name}({name(base)})"
        for path, node in classes
        for base in node.bases
        if name(base) in ours - protocols - errors - records
    ] == []


def imported(path: Path) -> set[Path]:
    """The files of this package that a file imports, at its head or inside a function."""
    names = {
        f"{node.module}.{alias.name}"
        for node in nodes_of(path)[ast.ImportFrom]
        if (node.module or "").startswith("dlrm_hybrid")
        for alias in node.names
    }
    return {
        MODULES[module]
        for one in names
        for module in (one, one.rpartition(".")[0])
        if module in MODULES
    }


def test_no_file_is_cut_off_another() -> None:
    """A file whose only importer is a sibling of a like name is a part of that sibling."""
    importers: dict[Path, set[Path]] = {path: set() for path in SOURCES}
    for path in SOURCES:
        for other in imported(path):
            importers[other].add(path)
    cut_off = {
        str(path.relative_to(PACKAGE))
        for path, those in importers.items()
        if len(those) == 1
        for only in those
        if only.parent == path.parent and {*only.stem.split("_")} & {*path.stem.split("_")}
    }
    assert cut_off <= CUT_OFF


def test_folders_are_small() -> None:
    counts = Counter(str(path.parent.relative_to(PACKAGE)) for path in SOURCES)
    crowded = {folder for folder, count in counts.items() if count > MAX_FOLDER_FILES}
    assert crowded <= CROWDED


def name(node: ast.expr) -> str:
    if isinstance(node, ast.Subscript):
        return name(node.value)
    return node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", "")


IMPORTS = """
import contextlib, io, sys
from importlib import import_module
from dlrm_hybrid.cli.main import run

def has_none_of(*names):
    assert not sys.modules.keys() & {*names}, sys.modules.keys() & {*names}

for words in ("--help", "train --help", "train --cfg job", "train train.epochs=0"):
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        code = run(["dlrm_hybrid", *words.split()])
    assert code == (2 if "=" in words else 0), (words, code)
has_none_of("torch", "torchrec", "fbgemm_gpu", "numba", "numpy")
from dlrm_hybrid.kernels import ALL
for module in (*(f"kernels.{file}" for file in ALL), "cli.verbs.train", "cli.verbs.plan"):
    import_module(f"dlrm_hybrid.{module}")
has_none_of("torch", "torchrec", "fbgemm_gpu")
"""


def test_no_large_library_until_training_starts_and_no_torch_in_kernels_and_supervisors() -> None:
    done = subprocess.run([sys.executable, "-c", IMPORTS], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr


def test_the_clock_on_the_wall_only_stamps() -> None:
    """It may be set while a run goes on: deadlines and durations go by `time.monotonic` and others.

    What asks for it writes the time of an event, or says when a series began.
    """
    asks = [
        (path, node)
        for path, node in found(ast.Attribute)
        if node.attr == "time" and name(node.value) == "time"
    ]
    stamps = {id(one.func) for _, node in found(ast.Call, ast.Assign) for one in _stamps(node)}
    assert len(asks) > 5
    assert [f"{path}:{node.lineno}" for path, node in asks if id(node) not in stamps] == []
    assert [path for path, node in found(ast.ImportFrom) if node.module == "time"] == []


def _stamps(node: ast.AST) -> list[ast.Call]:
    """Calls that give an event its time, or a series its beginning."""
    if isinstance(node, ast.Call) and name(node.func) == "Event":
        return [one for one in node.args if isinstance(one, ast.Call)]
    if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "since_1970":
        return [one for one in ast.walk(node.value) if isinstance(one, ast.Call)]
    return []
