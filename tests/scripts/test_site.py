"""The documentation as a site: it is built without a warning, and all its links lead somewhere."""

from __future__ import annotations

import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from types import ModuleType
from urllib.parse import unquote, urlsplit

import pytest

import dlrm_hybrid
import dlrm_hybrid.compress

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.slow  # links between pages are read by test_repository.py


class Page(HTMLParser):
    """What a page links to, and what it can be linked to by."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.links: list[str] = []
        self.ids: set[str] = set()
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        named = dict(attrs)
        self.ids |= {value for key in ("id", "name") if (value := named.get(key))}
        self.links += [value for key in ("href", "src") if (value := named.get(key))]


def build(checkout: Path, site: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "-d", str(site)]
    return subprocess.run(command, cwd=checkout, capture_output=True, text=True, check=False)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    built = build(ROOT, folder)
    assert built.returncode == 0, built.stderr
    return folder


def test_every_link_leads_to_a_page_and_a_place_of_it(site: Path) -> None:
    pages = {path: Page(path.read_text("utf-8")) for path in site.rglob("*.html")}
    dead: list[str] = []
    checked = 0
    for path, page in pages.items():
        if path.name == "404.html":  # its links begin at the root of a host
            continue
        for link in page.links:
            target = urlsplit(link)
            if target.scheme or target.netloc:
                continue
            found = (path.parent / unquote(target.path)).resolve() if target.path else path
            found = found / "index.html" if found.is_dir() else found
            is_there = found.is_file()
            if is_there and target.fragment and found in pages:
                is_there = target.fragment in pages[found].ids
            checked += 1
            dead += [] if is_there else [f"{path.relative_to(site)}: {link}"]
    assert not dead
    assert checked > 1000


@pytest.mark.parametrize("package", [dlrm_hybrid, dlrm_hybrid.compress])
def test_every_public_name_is_on_a_page(site: Path, package: ModuleType) -> None:
    ids = {
        one for path in (site / "api").rglob("*.html") for one in Page(path.read_text("utf-8")).ids
    }
    names = [name for name in package.__all__]
    assert names
    assert [name for name in names if f"{package.__name__}.{name}" not in ids] == []


def test_nothing_is_loaded_from_another_host(site: Path) -> None:
    for path in site.rglob("*.html"):
        text = path.read_text("utf-8")
        assert '<script src="http' not in text, path
        assert 'rel="stylesheet" href="http' not in text, path
