"""How much of a file is read before its first rows are taken."""

from pathlib import Path

import numpy as np

from dlrm_hybrid.data.schema import Dialect
from dlrm_hybrid.data.sources.files import open_source


def test_csv_is_read_by_one_block_at_a_time(tmp_path: Path) -> None:
    block_bytes, row = 1 << 19, "x" * 1000 + "\n"
    (tmp_path / "a.csv").write_text("c\n" + row * 12_000)
    seen = 0

    def note(piece: bytes) -> None:
        nonlocal seen
        seen += len(piece)

    source = open_source(tmp_path / "a.csv", Dialect(), block_bytes, note)
    blocks = source.blocks(["c"])
    rows = len(next(blocks).row_N)
    assert rows * len(row) <= seen <= block_bytes + (1 << 17)  # the last piece is read whole
    numbers = [block.row_N for block in blocks]
    assert np.concatenate(numbers).tolist() == list(range(rows + 1, 12_001))
