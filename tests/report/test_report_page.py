"""A report as a person gets it."""

import base64
import re
from collections.abc import Sequence
from dataclasses import replace
from html.parser import HTMLParser
from itertools import combinations, pairwise
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest
from made_runs import async_events, compressed, make_run, plain_events, progress, world_events
from matplotlib.axis import Axis
from matplotlib.figure import Figure
from matplotlib.image import imread
from pandas import Series
from show import show

from dlrm_hybrid.report import drawing, tables
from dlrm_hybrid.report.drawing import save, tick, ticks
from dlrm_hybrid.report.figures import AxesText, Line, Lines, Picture, Points, Range
from dlrm_hybrid.report.page import Document, build_report, html, markdown, write_pictures
from dlrm_hybrid.report.runs import read_run

EVIL = '<script>alert("$x$")</script>&|'


def report(folders: Sequence[Path]) -> Document:
    return build_report([read_run(folder) for folder in folders], "made now")


@pytest.fixture(scope="module")
def four(tmp_path_factory: pytest.TempPathFactory) -> Document:
    """Of a world, a run of one process, one that diverged at once, one that goes on."""
    tmp_path = tmp_path_factory.mktemp("four")
    make_run(tmp_path / "a", ["+experiment=dct_hybrid"], world_events(0.4))
    make_run(tmp_path / "b", [], plain_events(0.5))
    make_run(tmp_path / "c", ["name=c", "optimizer.lr=1e18"], [], status="diverged")
    begun = [progress(10, 0.6), compressed(10, 30, 0.1)]
    make_run(tmp_path / "d", ["name=d"], begun, status=None)
    return report([tmp_path / name for name in "abcd"])


@pytest.fixture(scope="module")
def page_of_four(four: Document) -> str:
    return html(four)


@pytest.fixture(scope="module")
def png_files(four: Document, tmp_path_factory: pytest.TempPathFactory) -> Path:
    files = tmp_path_factory.mktemp("pictures") / "*.png"
    write_pictures(four, files)
    return files


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


def test_the_page_is_full_and_needs_nothing_beside_it(page_of_four: str) -> None:
    page = Page()
    page.feed(page_of_four)
    assert page.open == []
    assert not page.tags & {"script", "link", "iframe", "object", "base"}
    sources = [value or "" for name, value in page.attributes if name in ("src", "href")]
    assert all(value.startswith("data:image/svg+xml;base64,") for value in sources)
    assert "http" not in re.sub(r'src="[^"]*"', "", page_of_four)
    assert len(sources) == 12
    for source in sources:
        picture = ElementTree.fromstring(base64.b64decode(source.partition(",")[2]))
        assert picture.tag.endswith("svg")


def test_what_stands_in_the_tables(four: Document) -> None:
    page = markdown(four, None)
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


def test_what_was_trained_stands_above_all(four: Document, page_of_four: str) -> None:
    for page in (page_of_four, markdown(four, None)):
        head = page.partition("Comparison")[0]
        assert "Data: synthetic, " in head
        assert "or one process" in head
        assert "20 steps of 64 samples" in head
        assert "7 processes (2 trainers × 3 stages + 1 server)" in head


def picture_of(document: Document, title: str) -> Picture:
    pictures = [one for section in document.sections for one in section.pictures]
    return next(one for one in pictures if one.title == title)


def drawn(content: Lines | Points) -> Figure:
    return drawing.figure(Picture("any", content, "", has_runs=False))


def line(*values: float, index: Sequence[float], **shapes: Any) -> Line:
    return Line(label="one", number=0, curve=Series(values, index=list(index)), **shapes)


def tick_labels(axis: Axis) -> dict[str, float]:
    axis.figure.draw_without_rendering()
    return {
        label.get_text(): place
        for label, place in zip(axis.get_ticklabels(), axis.get_ticklocs(), strict=True)
    }


def test_bytes_have_units_and_losses_all_their_digits(tmp_path: Path) -> None:
    for name, loss in (("a", 0.5307), ("b", 0.5436)):
        make_run(tmp_path / name, [f"name={name}"], world_events(loss))
    document = report([tmp_path / "a", tmp_path / "b"])
    (axes,) = drawing.figure(picture_of(document, "Loss over bytes sent in training")).axes
    assert all(re.fullmatch(r"[\d.]+ k?B", label) for label in tick_labels(axes.xaxis))
    (axes,) = drawing.figure(picture_of(document, "Quality and bytes")).axes
    assert all(label.endswith("B") for label in tick_labels(axes.xaxis))
    for label, place in tick_labels(axes.yaxis).items():
        assert float(label) == pytest.approx(place, abs=1e-9)


@pytest.mark.parametrize(
    ("value", "plain", "with_unit"),
    [
        *((123, "123", "123 B"), (1.2e8, "120M", "120 MB"), (2.5e9, "2.5G", "2.5 GB")),
        *((0, "0", "0 B"), (1.2e-5, "1.2·10⁻⁵", "1.2·10⁻⁵ B")),
    ],
)
def test_numbers_at_ticks(value: float, plain: str, with_unit: str) -> None:
    assert tick(value) == plain
    assert ticks("B")(value, 0) == with_unit


def test_points_have_their_names_beside_them_and_no_two_meet(tmp_path: Path) -> None:
    for number in range(6):
        name = f"a_rather_long_name_{number}"
        make_run(tmp_path / name, [f"name={name}"], world_events(0.5 + 1e-4 * (number % 3)))
    document = report(sorted(tmp_path.iterdir()))
    figure = drawing.figure(picture_of(document, "Quality and bytes"))
    figure.draw_without_rendering()
    boxes = [one.get_window_extent() for one in figure.axes[0].texts]
    assert {one.get_text() for one in figure.axes[0].texts} == set(document.runs)
    assert all(box.x0 >= 0 and box.x1 <= figure.bbox.x1 for box in boxes)
    for one, other in combinations(boxes, 2):
        assert not one.overlaps(other)


@pytest.mark.parametrize("num_bytes", [20.0, 123_456.0, 1_234_567_890.0])
def test_ticks_around_a_single_point_do_not_meet(num_bytes: float) -> None:
    text = AxesText("bytes", "log-loss", "B")
    figure = drawn(Lines([line(0.5, index=[num_bytes])], text, Range.LOSSES, x_positive=True))
    figure.draw_without_rendering()
    (axes,) = figure.axes
    low, high = axes.get_xlim()
    labels = [one for one in axes.get_xticklabels() if low <= one.get_position()[0] <= high]
    boxes = [one.get_window_extent() for one in labels]
    assert len(boxes) > 1
    assert all(one.x1 + 4 < other.x0 for one, other in pairwise(boxes))


def test_steps_are_whole_numbers_also_around_a_single_point() -> None:
    text = AxesText("training steps", "log-loss", x_is_whole=True)
    one, many = (
        Lines([line(*[0.5] * len(steps), index=steps)], text, Range.LOSSES)
        for steps in ([2], range(20, 700, 20))
    )
    labels = tick_labels(drawn(one).axes[0].xaxis)
    assert all(float(label) == place == round(place) for label, place in labels.items())
    assert 2 in labels.values()
    labels = tick_labels(drawn(many).axes[0].xaxis)
    assert {place % 100 for place in labels.values()} == {0}


def test_outliers_do_not_hide_a_line() -> None:
    dots = Series([0.6], index=[40])
    losses = line(0.7, 900.0, 0.6, 0.5, 0.5, index=range(0, 50, 10), dots=dots)
    (axes,) = drawn(Lines([losses], AxesText("steps", "loss"), Range.LOSSES)).axes
    assert 0.7 < axes.get_ylim()[1] < 1.0


def test_a_key_of_long_names_stays_in_its_picture(tmp_path: Path) -> None:
    for name in ("one", "another"):
        make_run(tmp_path / name, [f"name={name}_with_a_very_long_tail_to_it"], world_events())
    picture = report([tmp_path / "one", tmp_path / "another"]).sections[1].pictures[0]
    figure = drawing.figure(picture, is_alone=True)
    figure.draw_without_rendering()
    assert figure.legends[0].get_window_extent().x1 <= figure.bbox.x1


def test_the_page_follows_a_dark_screen(page_of_four: str) -> None:
    css = page_of_four.partition("<style>")[2].partition("</style>")[0]
    assert "@media (prefers-color-scheme: dark)" in css
    definitions, _, rules = css.partition("* { box-sizing")
    assert not re.search(r":[^;]*#[0-9a-f]{3}", rules), "a colour that is the same in the dark"
    names = set(re.findall(r"var\((--\w+)\)", rules))
    assert names
    assert all(definitions.count(f"{name}:") == 2 for name in names)


def test_pictures_as_files_are_readable_on_light_and_dark_pages(png_files: Path) -> None:
    for path in png_files.parent.iterdir():
        pixels = imread(path)
        colours, alpha = pixels[..., :3], pixels[..., 3:]
        assert (alpha[[0, -1], [0, -1]] == 0).all(), path
        for page in (1.0, 0.05):  # text, and what is drawn, stands out of either
            seen = colours * alpha + page * (1 - alpha)
            assert np.count_nonzero(abs(seen - page).max(axis=-1) > 0.3) > 1_000, path


@pytest.mark.parametrize(("ending", "head"), [("svg", b"<?xml"), ("pdf", b"%PDF")])
def test_pictures_are_of_the_format_that_their_name_ends_in(
    ending: str, head: bytes, four: Document, tmp_path: Path
) -> None:
    files = tmp_path / f"*.{ending}"
    some = replace(four, sections=[one for one in four.sections if one.heading == "Loss"])
    write_pictures(some, files)
    found = sorted(tmp_path.iterdir())
    assert found and all(path.read_bytes().startswith(head) for path in found)
    assert f"[Loss over training steps]({tmp_path}/loss_over_training_steps.{ending})" in markdown(
        some, files
    )


def test_it_says_so_where_no_bytes_were_counted(four: Document, tmp_path: Path) -> None:
    make_run(tmp_path / "a", [], plain_events())
    one, other = (markdown(them, Path("*.png")) for them in (report([tmp_path / "a"]), four))
    assert "No picture over bytes" in one and "No picture over bytes" not in other


def test_every_text_is_escaped(tmp_path: Path) -> None:
    make_run(tmp_path / "a", [], world_events())
    make_run(tmp_path / EVIL.replace("/", ""), [], world_events())
    (tmp_path / "a" / "overrides.yaml").write_text('- "x=<script>|`"\n')
    document = report([tmp_path / "a", tmp_path / EVIL.replace("/", "")])
    page = html(document)
    assert "<script" not in page
    assert "&lt;script&gt;" in page
    widths = {line.count("|") - line.count("\\|") for line in markdown(document, None).splitlines()}
    assert widths == {0, *(len(table.columns) + 1 for s in document.sections if (table := s.table))}


def test_the_same_runs_make_the_same_file(tmp_path: Path) -> None:
    make_run(tmp_path / "a", [], plain_events())
    made = (report([tmp_path / "a"]) for _ in range(2))
    assert len({html(replace(one, sections=one.sections[:2])) for one in made}) == 1


def test_staleness_is_told_of_runs_that_have_it(tmp_path: Path) -> None:
    make_run(tmp_path / "a", [], async_events())
    make_run(tmp_path / "b", ["name=b"], world_events())
    runs = [read_run(tmp_path / name) for name in "ab"]
    assert tables.staleness(runs[1:], ["b"]) is None
    table = tables.staleness(runs, ["a", "b"])
    assert table is not None
    means = "0.667 to 4.00"
    assert table.rows == [("a", "4", "1.50", "1", "4", "4", means, "10 to 30")]
    begun = [event for event in async_events() if "rank" not in event.kind]
    make_run(tmp_path / "c", ["name=c"], begun, status=None)
    table = tables.staleness([read_run(tmp_path / "c")], ["c"])
    assert table is not None and table.rows == [("c", *["–"] * 6, "10 to 30")]
    assert "Staleness" in [section.heading for section in report([tmp_path / "a"]).sections]


def test_pictures_as_files_have_their_key_and_stand_in_the_text(
    four: Document, png_files: Path
) -> None:
    files = [*png_files.parent.iterdir()]
    page = markdown(four, Path("../pictures/*.png"))
    named = re.findall(r"!\[.*?\]\(\.\./pictures/(.*?)\)", page)
    assert sorted(named) == sorted(path.name for path in files)
    assert len(named) == sum(len(section.pictures) for section in four.sections)
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in files)
    assert max(path.stat().st_size for path in files) < 150_000
    picture = four.sections[1].pictures[0]
    (key,) = drawing.figure(picture, is_alone=True).legends
    assert [name.get_text() for name in key.get_texts()][0] == four.runs[0]
    assert drawing.figure(picture).legends == []


def test_a_notebook_shows_tables_and_pictures(four: Document) -> None:
    table, pictures = four.sections[0].table, four.sections[1].pictures
    shown = show("<heading>", table, pictures, None, drawing.figure(pictures[0]))
    page = Page()
    page.feed(shown._repr_html_())
    assert page.open == []
    assert page.tags >= {"h4", "table", "figure", "img"}
    sources = [value or "" for name, value in page.attributes if name == "src"]
    assert len(sources) == len(pictures) + 1
    assert "not measured" in show(None, [])._repr_html_()


def test_no_axis_is_cut_off_where_ticks_need_another_digit(tmp_path: Path) -> None:
    places = [(37_619.2, 0.54015), (863.7, 0.5278)]
    text = AxesText("bytes/sample", "test log-loss", "B")
    figure = drawn(Points(places, ["one", "other"], [0, 1], text))
    save(figure, tmp_path / "points.png")  # lays it out
    (axes,) = figure.axes
    assert axes.yaxis.label.get_window_extent().x0 >= 0
