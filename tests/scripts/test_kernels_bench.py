"""The benchmark of the kernels at its smallest."""

import torch
from kernels import (
    KernelsBench,
    documented_bench,
    kernels_page,
    measure_kernels,
)
from kernels_encode import accumulated, dlrm_gradients, measure_encode
from kernels_gradient import drawn, measure_select, measure_threshold

from dlrm_hybrid.telemetry.machine import describe


def test_selections_are_compared_at_every_size_and_density() -> None:
    rows = measure_select((4096, 8192), repeats=2)
    assert [(row["elements"], row["kept"]) for row in rows] == [
        (size, density) for size in (4096, 8192) for density in (0.1, 0.01, 0.001)
    ]
    assert [row["goal"] for row in rows] == [4.0, 3.0, None] * 2
    for row in rows:
        assert isinstance(passes := row["select / pass"], float)
        if isinstance(goal := row["goal"], float):
            assert row["reached"] == ("yes" if passes <= goal else "no")


def test_thresholds_let_through_what_they_should() -> None:
    rows = measure_threshold({"few": drawn(2000)["normal"]}, repeats=1)
    assert len(rows) == 4 * 3 + 1
    assert rows[-1]["values"] == "few"
    assert {row["k̂ / k"] for row in rows} == {1.0}
    opponents = [column for column in rows[0] if column.endswith(" / threshold")]
    assert opponents == [f"{name} / threshold" for name in ("topk", "kthvalue", "partition")]


def test_gradients_are_those_of_the_papers_layers() -> None:
    gradients = dlrm_gradients(4)
    assert len(gradients) == 4
    assert sum(one.numel() for one in gradients[0].values()) == 508_753
    assert not torch.equal(gradients[0]["top.1.weight"], gradients[1]["top.1.weight"])
    last, total = accumulated(gradients).values()
    assert last.size == total.size == 187_904
    rows = measure_encode(gradients)
    assert [row["values"] for row in rows] == ["float32", "bfloat16"] * 4
    assert all(isinstance(sent := row["sent"], float) and 0.008 < sent < 0.1 for row in rows)


def test_the_page_has_a_table_for_every_group() -> None:
    threads = torch.get_num_threads()
    groups = measure_kernels(KernelsBench(repeats=1, steps=2, select_sizes=(4096,)))
    assert torch.get_num_threads() == threads
    page = kernels_page(groups, describe(), "a command")
    assert page.count("\n| ---") + page.count("\n| --:") == len(groups)
    assert all(f"\n## {group.heading}\n" in page for group in groups[1:])
    assert documented_bench(7).repeats == 7
