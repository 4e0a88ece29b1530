"""The benchmark of sparse sections at its smallest: bytes do not hang on the machine."""

from kernels_wire import DENSITIES, measure_wire


def test_bytes_reach_their_goals() -> None:
    rows = measure_wire(repeats=1)
    assert [row["density"] for row in rows] == list(DENSITIES)
    for row in rows:
        figures = {name: value for name, value in row.items() if isinstance(value, float)}
        assert len(figures) == len(row)
        assert all(value > 0 for value in figures.values())
        assert 1 < figures["bits / entropy"] <= 1.03
        assert figures["bytes, float32"] - figures["bytes, bfloat16"] < 2.01
        if figures["density"] == 0.01:
            assert figures["bytes, bfloat16"] <= 3.1
