"""A table reads alike in Markdown, HTML and a terminal, and no cell breaks it."""

from io import StringIO

from rich.console import Console

from dlrm_hybrid.report.table import Table

TABLE = Table(["what", "rows"], [["a|b", "1"], ["two\nlines", "1,000"]])


def test_markdown_is_aligned_and_no_cell_breaks_it() -> None:
    assert TABLE.markdown() == (
        "| what      |  rows |\n"
        "| --------- | ----: |\n"
        "| a\\|b      |     1 |\n"
        "| two lines | 1,000 |\n"
    )


def test_the_last_alignment_holds_for_the_rest() -> None:
    rules = [Table("abc", [], align).markdown().splitlines()[1] for align in ("l", "lr", "rlr")]
    assert rules == ["| --- | --- | --- |", "| --- | --: | --: |", "| --: | --- | --: |"]


def test_html_is_escaped_and_a_status_that_is_not_complete_stands_out() -> None:
    html = Table(["status", "n"], [["complete", "<1>"], ["failed", "2"]], "lr").html()
    assert '<tr><td>complete</td><td class="number">&lt;1&gt;</td></tr>' in html
    assert '<tr><td class="bad">failed</td><td class="number">2</td></tr>' in html


def test_a_terminal_gets_no_control_characters() -> None:
    file = StringIO()
    Console(file=file, width=80).print(Table(["\x1b[2J"], [["[red]\x07"]]).rich())
    assert "[red]" in file.getvalue()
    assert not {"\x1b", "\x07"} & set(file.getvalue())
