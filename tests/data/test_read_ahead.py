"""How much of a file is read before its first rows are taken."""

from pathlib import Path

import numpy as np

from dlrm_hybrid.data.sources.files import open_source


def test_csv_is_read_ahead_by_pieces_of_a_block(tmp_path: Path) -> None:
    block_bytes, row = 1 << 19, "x" * 1000 + "\n"
    (tmp_path / "a.csv").write_text("c\n" + row * 12_000)
    seen = 0

    def note(piece: bytes) -> None:
        nonlocal seen
        seen += len(piece)

    source = open_source(tmp_path / "a.csv", ",", block_bytes, note)
    blocks = source.blocks(["c"])
    rows = len(next(blocks).row_N)
    # Arrow's queue has 32 pieces, and one each is being read, parsed and given
    assert rows * len(row) <= block_bytes
    assert seen <= block_bytes + 36 * block_bytes // 8 < 4_000_000
    numbers = [block.row_N for block in blocks]
    assert np.concatenate(numbers).tolist() == list(range(rows + 1, 12_001))
