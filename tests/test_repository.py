"""What git leaves out, and what pages must not lack."""

import re
import subprocess
from importlib import import_module
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGES = (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")))
FOLDERS = "dlrm_hybrid|scripts|conf|tests|notebooks|docs|packaging"


def is_ignored(name: str) -> bool:
    command = ["git", "-C", str(ROOT), "check-ignore", "--quiet", "--no-index", name]
    return subprocess.run(command, check=False).returncode == 0


@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="not a checkout of git")
@pytest.mark.parametrize(
    ("name", "ignored"),
    [
        *((f"{folder}train{end}", True) for folder in ("", "x/") for end in (".txt", ".txt.gz")),
        *((name, True) for name in ("train_1.txt.zst", "day_0.gz", "data/x/train.tsv", "data/y")),
        *((name, True) for name in ("report.html", "report.md", "runs/a/b", "keys.json")),
        *((name, False) for name in ("data/README.md", "docs/report.md", "tests/data/x.py")),
    ],
)
def test_git_leaves_out_rows_and_results(name: str, ignored: bool) -> None:
    assert is_ignored(name) == ignored


@pytest.mark.parametrize("page", sorted((ROOT / "docs").rglob("*.md")), ids=lambda one: one.name)
def test_pages_have_no_gap_where_a_table_was(page: Path) -> None:
    """A table that a script should have put there was once replaced by blank lines."""
    text = re.sub(r"^```.*?^```$", "code", page.read_text("utf-8"), flags=re.DOTALL | re.MULTILINE)
    before_gaps = re.findall(r"(.*)\n\n\n", text)
    assert before_gaps == []


@pytest.mark.parametrize("page", PAGES, ids=lambda one: one.name)
def test_pages_name_files_and_modules_that_exist(page: Path) -> None:
    text = page.read_text("utf-8")
    files = re.findall(rf"(?<![\w/.-])((?:{FOLDERS})/[\w./*-]*\w)", text)
    assert [one for one in files if not any(ROOT.glob(one))] == []
    names = set(re.findall(r"\bdlrm_hybrid(?:\.[A-Za-z_]\w*)+", text))
    assert [one for one in sorted(names) if not exists(one)] == []


def exists(name: str) -> bool:
    """Whether a dotted name is a module, or something in one."""
    try:
        import_module(name)
    except ImportError:
        module, _, attribute = name.rpartition(".")
        return bool(module) and hasattr(import_module(module), attribute)
    return True
