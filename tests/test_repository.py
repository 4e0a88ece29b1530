"""What git leaves out, and what pages must not lack."""

import re
import subprocess
from importlib import import_module
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGES = (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")))
FOLDERS = "dlrm_hybrid|scripts|conf|tests|notebooks|docs|packaging"


@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="not a checkout of git")
def test_git_leaves_out_rows_and_results() -> None:
    ignored = [
        *(f"{folder}train{end}" for folder in ("", "x/") for end in (".txt", ".txt.gz")),
        *("train_1.txt.zst", "day_0.gz", "data/x/train.tsv", "data/y"),
        *("report.html", "report.md", "runs/a/b", "keys.json"),
    ]
    kept = ["data/README.md", "docs/report.md", "tests/data/x.py"]
    command = ["git", "-C", str(ROOT), "check-ignore", "--no-index", *ignored, *kept]
    told = subprocess.run(command, check=False, capture_output=True, text=True).stdout
    assert told.splitlines() == ignored


def prose(page: Path) -> str:
    """A page without its blocks of code."""
    return re.sub(r"^```.*?^```$", "code", page.read_text("utf-8"), flags=re.DOTALL | re.MULTILINE)


def places(page: Path) -> set[str]:
    """What links to headings of a page end in."""
    headings = re.findall(r"^#+ (.+)$", prose(page), flags=re.MULTILINE)
    bare = (re.sub(r"[^\w\s-]", "", one.lower()).strip() for one in headings)
    return {re.sub(r"[-\s]+", "-", one) for one in bare}


def test_pages_have_no_gap_where_a_table_was() -> None:
    """A table that a script should have put there was once replaced by blank lines."""
    gaps = {page: re.findall(r"(.*)\n\n\n", prose(page)) for page in PAGES[1:]}
    assert {page: found for page, found in gaps.items() if found} == {}


def test_pages_name_files_and_modules_that_exist() -> None:
    lacking: list[str] = []
    for page in PAGES:
        text = page.read_text("utf-8")
        files = set(re.findall(rf"(?<![\w/.-])((?:{FOLDERS})/[\w./*-]*\w)", text))
        names = set(re.findall(r"\bdlrm_hybrid(?:\.[A-Za-z_]\w*)+", text))
        lacking += [f"{page.name}: {one}" for one in files if not any(ROOT.glob(one))]
        lacking += [f"{page.name}: {one}" for one in names if not exists(one)]
    assert sorted(lacking) == []


def test_links_lead_to_a_file_and_a_place_of_it() -> None:
    """As in a checkout; the site is built and looked at by `make test-all`."""
    dead: list[str] = []
    checked = 0
    for page in PAGES:
        for target, place in re.findall(r"\]\(([^)\s#:]*)(?:#([^)\s]+))?\)", prose(page)):
            there = page.parent / target if target else page
            is_dead = not there.exists()
            if place and there.suffix == ".md" and not place.startswith("dlrm_hybrid"):
                is_dead = is_dead or place not in places(there)
            checked += 1
            dead += [f"{page.name}: {target}#{place}"] if is_dead else []
    assert dead == []
    assert checked > 100


def exists(name: str) -> bool:
    """Whether a dotted name is a module, or something in one."""
    try:
        import_module(name)
    except ImportError:
        module, _, attribute = name.rpartition(".")
        return bool(module) and hasattr(import_module(module), attribute)
    return True
