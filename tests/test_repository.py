"""What git leaves out, and what pages must not lack."""

import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


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
