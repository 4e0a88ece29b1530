from io import StringIO

from rich.console import Console

from dlrm_hybrid.cli.terminal import Terminal


def test_a_table_shows_every_character_however_narrow_the_terminal() -> None:
    file = StringIO()
    columns = ["run", "cuts", *(f"figure {number}" for number in range(12))]
    row = ["one", "[bottom.1,top.1]", *(f"{number}.1234" for number in range(12))]
    Terminal(Console(file=file, width=40, soft_wrap=True)).table("", columns, [row], num_texts=2)
    _, head, _, body, _ = file.getvalue().splitlines()
    assert [cell.strip() for cell in head.split("┃")[1:-1]] == columns
    assert [cell.strip() for cell in body.split("│")[1:-1]] == row
