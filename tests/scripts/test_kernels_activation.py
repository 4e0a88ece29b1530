"""The benchmark of the activation kernels at its smallest."""

import torch
from kernels_activation import ROWS, SPARSITIES, measure_activation
from table import table


def test_every_case_has_a_row_of_positive_figures() -> None:
    threads = torch.get_num_threads()
    rows = measure_activation(repeats=1)
    assert torch.get_num_threads() == threads
    assert [(row["rows"], row["sparsity"], row["input"]) for row in rows] == [
        (count, sparsity, kind)
        for count in ROWS
        for sparsity in SPARSITIES
        for kind in ("Gaussian", "after ReLU")
    ]
    for row in rows:
        figures = [value for value in row.values() if isinstance(value, float)]
        assert len(figures) == 7
        assert all(value > 0 for value in figures)
    assert table(rows).count("\n") == 2 + len(rows)
