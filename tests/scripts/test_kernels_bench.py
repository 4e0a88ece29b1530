"""The benchmark of the kernels at its smallest; bytes do not depend on the machine."""

import torch
from harness import one_thread, table
from kernels import (
    BATCHES,
    SPARSITIES,
    WIRE_DENSITIES,
    accumulated,
    activation_rows,
    drawn,
    encode_rows_of,
    select_rows,
    threshold_rows,
    wire_rows,
)
from plain_dlrm import layer_gradients


def test_selections_are_compared_at_every_size_and_density() -> None:
    rows = select_rows(2, sizes=(4096, 8192))
    assert [(row["elements"], row["kept"]) for row in rows] == [
        (size, density) for size in (4096, 8192) for density in (0.1, 0.01, 0.001)
    ]
    assert [row["goal"] for row in rows] == [4.0, 3.0, None] * 2
    for row in rows:
        assert isinstance(passes := row["select / pass"], float)
        if isinstance(goal := row["goal"], float):
            assert row["reached"] == ("yes" if passes <= goal else "no")


def test_thresholds_let_through_what_they_should() -> None:
    rows = threshold_rows({"few": drawn(2000)["normal"]}, repeats=1)
    assert len(rows) == 4 * 3 + 1
    assert rows[-1]["values"] == "few"
    assert {row["k̂ / k"] for row in rows} == {1.0}
    opponents = [column for column in rows[0] if column.endswith(" / threshold")]
    assert opponents == [f"{name} / threshold" for name in ("topk", "kthvalue", "partition")]


def test_gradients_are_those_of_the_papers_layers() -> None:
    gradients = layer_gradients(4, 128)
    assert len(gradients) == 4
    assert sum(one.numel() for one in gradients[0].values()) == 508_753
    assert not torch.equal(gradients[0]["top.1.weight"], gradients[1]["top.1.weight"])
    last, total = accumulated(gradients).values()
    assert last.size == total.size == 187_904
    rows = encode_rows_of(gradients)
    assert [row["values"] for row in rows] == ["float32", "bfloat16"] * 4
    assert all(isinstance(sent := row["sent"], float) and 0.008 < sent < 0.1 for row in rows)


def test_bytes_of_sections_reach_their_goals() -> None:
    rows = wire_rows(repeats=1)
    assert [row["density"] for row in rows] == list(WIRE_DENSITIES)
    for row in rows:
        figures = {name: value for name, value in row.items() if isinstance(value, float)}
        assert len(figures) == len(row)
        assert all(value > 0 for value in figures.values())
        assert 1 < figures["bits / entropy"] <= 1.03
        assert figures["bytes, float32"] - figures["bytes, bfloat16"] < 2.01
        if figures["density"] == 0.01:
            assert figures["bytes, bfloat16"] <= 3.1


def test_activations_have_a_row_of_positive_figures_for_every_case() -> None:
    threads = torch.get_num_threads()
    with one_thread():
        rows = activation_rows(repeats=1)
    assert torch.get_num_threads() == threads
    assert [(row["rows"], row["sparsity"], row["input"]) for row in rows] == [
        (count, sparsity, kind)
        for count in BATCHES
        for sparsity in SPARSITIES
        for kind in ("Gaussian", "after ReLU")
    ]
    for row in rows:
        figures = [value for value in row.values() if isinstance(value, float)]
        assert len(figures) == 7
        assert all(value > 0 for value in figures)
    assert table(rows).count("\n") == 2 + len(rows)
