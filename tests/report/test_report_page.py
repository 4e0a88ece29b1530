"""A report as a person gets it."""

import base64
import re
from collections.abc import Sequence
from html.parser import HTMLParser
from pathlib import Path
from xml.etree import ElementTree

import pytest
from made_runs import compressed, make_run, plain_events, progress, world_events

from dlrm_hybrid.report import tables
from dlrm_hybrid.report.build import build_report
from dlrm_hybrid.report.document import Document
from dlrm_hybrid.report.html import html
from dlrm_hybrid.report.runs import read_run
from dlrm_hybrid.report.show import show
from dlrm_hybrid.report.text import text, write_pictures

EVIL = '<script>alert("$x$")</script>&|'


def report(folders: Sequence[Path]) -> Document:
    return build_report([read_run(folder) for folder in folders], "made now")


@pytest.fixture(scope="module")
def four(tmp_path_factory: pytest.TempPathFactory) -> Document:
    """Of a world, a run of one process, one that diverged at once, one that goes on."""
    tmp_path = tmp_path_factory.mktemp("four")
    make_run(tmp_path / "a", ["+experiment=dct_hybrid"], world_events(0.4))
    make_run(tmp_path / "b", [], plain_events(0.5))
    make_run(tmp_path / "c", ["name=c", "optimizer.lr=1e30"], [], status="diverged")
    begun = [progress(10, 0.6), compressed(10, 30, 0.1)]
    make_run(tmp_path / "d", ["name=d"], begun, status=None)
    return report([tmp_path / name for name in "abcd"])


class Page(HTMLParser):
    """Collects tags that stay open, attributes and text outside of the style."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.tags: set[str] = set()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.attributes += attrs
        if tag not in ("meta", "img"):
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_the_page_is_whole_and_needs_nothing_beside_it(four: Document) -> None:
    page = Page()
    text = html(four)
    page.feed(text)
    assert page.open == []
    assert not page.tags & {"script", "link", "iframe", "object", "base"}
    sources = [value or "" for name, value in page.attributes if name in ("src", "href")]
    assert all(value.startswith("data:image/svg+xml;base64,") for value in sources)
    assert "http" not in re.sub(r'src="[^"]*"', "", text)
    assert len(sources) == 12
    for source in sources:
        picture = ElementTree.fromstring(base64.b64decode(source.partition(",")[2]))
        assert picture.tag.endswith("svg")


def test_what_stands_in_the_tables(four: Document) -> None:
    page = text(four, None)
    rows = {
        cells[1].strip(): [cell.strip() for cell in cells[2:-1]]
        for line in page.partition("## Bytes")[0].splitlines()
        if len(cells := line.split("|")) > 3
    }
    assert rows["run"][:5] == ["status", "steps", "training loss", "test log-loss", "AUC"]
    assert rows["dct_hybrid"][:5] == ["complete", "20", "0.4000", "0.4100", "0.7000"]
    assert rows["run"][6:8] == ["bytes/sample", "dense ÷ sent"]
    assert rows["dct_hybrid"][6:8] == ["10.0", "4.0×"]
    assert rows["default"][6:8] == ["–", "–"]
    assert rows["c"] == ["diverged", "0", *["–"] * (len(rows["run"]) - 2)]
    assert rows["d"][:4] == ["unfinished", "10", "0.6000", "–"]
    assert "network use" not in rows["run"]  # measured by no run
    assert "| optimizer.lr " in page
    assert "| train.seed " not in page


def test_every_text_is_escaped(tmp_path: Path) -> None:
    make_run(tmp_path / "a", [], world_events())
    make_run(tmp_path / EVIL.replace("/", ""), [], world_events())
    (tmp_path / "a" / "overrides.yaml").write_text('- "x=<script>|`"\n')
    document = report([tmp_path / "a", tmp_path / EVIL.replace("/", "")])
    page = html(document)
    assert "<script" not in page
    assert "&lt;script&gt;" in page
    widths = {line.count("|") - line.count("\\|") for line in text(document, None).splitlines()}
    assert widths == {0, *(len(table.columns) + 1 for s in document.sections if (table := s.table))}


def test_one_run_alone_has_no_differences(tmp_path: Path) -> None:
    make_run(tmp_path / "a", [], plain_events())
    document = report([tmp_path / "a"])
    assert document.title == "Run default"
    assert [section.heading for section in document.sections] == [
        "Comparison",
        "Loss",
        "Time",
        "Network and CPU",
        "Runs",
    ]


def test_the_same_runs_make_the_same_file(tmp_path: Path) -> None:
    make_run(tmp_path / "a", [], plain_events())
    assert html(report([tmp_path / "a"])) == html(report([tmp_path / "a"]))


def test_roles_are_stages_and_servers(tmp_path: Path) -> None:
    make_run(tmp_path / "a", [], world_events())
    summary = read_run(tmp_path / "a").summary
    assert tables.cpu_seconds_by_role(summary) == {"stage 0": 1.0, "stage 1": 2.0, "servers": 3.0}
    assert tables.bytes_by_class(summary)["gradient push"] == 10.0


def test_pictures_as_files_have_their_key_and_stand_in_the_text(
    four: Document, tmp_path: Path
) -> None:
    write_pictures(four, tmp_path)
    page = text(four, "../pictures")
    named = re.findall(r"!\[.*?\]\(\.\./pictures/(.*?)\)", page)
    assert sorted(named) == sorted(path.name for path in tmp_path.iterdir())
    assert len(named) == sum(len(section.pictures) for section in four.sections)
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in tmp_path.iterdir())
    assert max(path.stat().st_size for path in tmp_path.iterdir()) < 150_000
    picture = four.sections[1].pictures[0]
    with picture.alone() as figure:
        (key,) = figure.legends
        assert [name.get_text() for name in key.get_texts()][0] == four.runs[0]
    assert figure.legends == []


def test_a_notebook_shows_tables_and_pictures(four: Document) -> None:
    table, pictures = four.sections[0].table, four.sections[1].pictures
    shown = show("<heading>", table, pictures, None, pictures[0].figure)
    page = Page()
    page.feed(shown._repr_html_())
    assert page.open == []
    assert page.tags >= {"h4", "table", "figure", "img"}
    sources = [value or "" for name, value in page.attributes if name == "src"]
    assert len(sources) == len(pictures) + 1
    assert "not measured" in show(None, [])._repr_html_()
