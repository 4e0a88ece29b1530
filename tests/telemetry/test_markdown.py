from dlrm_hybrid.telemetry import markdown


def test_numbers_stand_to_the_right_and_no_cell_breaks_the_table() -> None:
    rows = [["a|b", "1"], ["two\nlines", "1,000"]]
    assert markdown.table(["what", "rows"], rows, [False, True]) == (
        "| what      |  rows |\n"
        "| --------- | ----: |\n"
        "| a\\|b      |     1 |\n"
        "| two lines | 1,000 |\n"
    )
