"""Limits that keep the code readable, held by counting."""

import ast
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "dlrm_hybrid"
MAX_FILE_LINES = 600
MAX_FUNCTION_LINES = 60
MAX_PARAMETERS = 8
MAX_FOLDER_FILES = 15

SOURCES = sorted(PACKAGE.rglob("*.py"))
TREES = {path: ast.parse(path.read_text(encoding="utf-8")) for path in SOURCES}
MODULES = {".".join(path.relative_to(ROOT).with_suffix("").parts): path for path in SOURCES}
# To become empty: files whose only importer is a sibling of a like name, and crowded folders.
CUT_OFF: set[str] = set()
CROWDED: set[str] = set()
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


def functions() -> list[tuple[Path, ast.FunctionDef]]:
    return [
        (path, node)
        for path, tree in TREES.items()
        for node in ast.walk(tree)
        if isinstance(node, FUNCTIONS)
    ]


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
    protocols = {
        node.name
        for tree in TREES.values()
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef) and any(name(base) == "Protocol" for base in node.bases)
    }
    ours = {
        node.name
        for tree in TREES.values()
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef)
    }
    errors = {node for node in ours if node.endswith("Error")}
    assert [
        f"{path}: {node.name}({name(base)})"
        for path, tree in TREES.items()
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef)
        for base in node.bases
        if name(base) in ours - protocols - errors
    ] == []


def imported(path: Path) -> set[Path]:
    """The files of this package that a file imports, at its head or inside a function."""
    names = {
        f"{node.module}.{alias.name}"
        for node in ast.walk(TREES[path])
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("dlrm_hybrid")
        for alias in node.names
    }
    return {
        MODULES[found]
        for one in names
        for found in (one, one.rpartition(".")[0])
        if found in MODULES
    }


def test_no_file_is_cut_off_another() -> None:
    """A file whose only importer is a sibling of a like name is a part of that sibling."""
    importers: dict[Path, set[Path]] = {path: set() for path in SOURCES}
    for path in SOURCES:
        for other in imported(path):
            importers[other].add(path)
    cut_off = {
        str(path.relative_to(PACKAGE))
        for path, found in importers.items()
        if len(found) == 1
        for only in found
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


def test_kernels_have_no_torch() -> None:
    program = (
        "import sys; from importlib import import_module; from dlrm_hybrid.kernels import ALL; "
        "[import_module(f'dlrm_hybrid.kernels.{file}') for file in ALL]; "
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", program], cwd=ROOT).returncode == 0


def test_the_supervisor_has_no_torch() -> None:
    program = "import sys, dlrm_hybrid.cli.verbs.train; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], cwd=ROOT).returncode == 0


@pytest.mark.parametrize(
    "arguments",
    [
        ["-c", "import dlrm_hybrid"],
        ["-m", "dlrm_hybrid", "--help"],
        ["-m", "dlrm_hybrid", "train", "--help"],
        ["-m", "dlrm_hybrid", "train", "--cfg", "job"],
        ["-m", "dlrm_hybrid", "train", "train.epochs=0"],
    ],
)
def test_no_large_library_until_training_starts(arguments: list[str]) -> None:
    done = subprocess.run(
        [sys.executable, "-X", "importtime", *arguments], capture_output=True, text=True, cwd=ROOT
    )
    modules = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines()}
    assert "dlrm_hybrid" in modules
    assert not modules & {"torch", "torchrec", "fbgemm_gpu", "numba", "numpy"}


def test_the_clock_on_the_wall_only_stamps() -> None:
    """It may be set while a run goes on: deadlines and durations go by `time.monotonic` and others.

    What asks for it writes the time of an event, or says when a series began.
    """
    asks = [
        (path, node)
        for path, tree in TREES.items()
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and ast.unparse(node) == "time.time"
    ]
    stamps = {
        id(inner.func)
        for tree in TREES.values()
        for node in ast.walk(tree)
        for inner in _stamps(node)
    }
    assert len(asks) > 5
    assert [f"{path}:{node.lineno}" for path, node in asks if id(node) not in stamps] == []
    for path, tree in TREES.items():
        for node in ast.walk(tree):
            assert not (isinstance(node, ast.ImportFrom) and node.module == "time"), path


def _stamps(node: ast.AST) -> list[ast.Call]:
    """Calls that give an event its time, or a series its beginning."""
    if isinstance(node, ast.Call) and name(node.func) == "Event":
        return [one for one in node.args if isinstance(one, ast.Call)]
    if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "since_1970":
        return [one for one in ast.walk(node.value) if isinstance(one, ast.Call)]
    return []
