"""The benchmark of the compressors at its smallest."""

import pytest
import torch
from compressors import (
    CompressorsBench,
    compressors_page,
    documented_bench,
    measure_compressors,
)
from compressors_fragments import TRAINERS, measure_fragments
from compressors_methods import SETTLING, Drawn, measure_methods
from compressors_rules import DRAWS, RULES, measure_rules
from kernels_encode import dlrm_gradients
from table import Row

from dlrm_hybrid.compress.gradient.methods import methods
from dlrm_hybrid.telemetry.machine import describe

DENSITIES = (0.1, 0.01, 0.001)


def test_every_rule_is_measured_at_every_density() -> None:
    rows = measure_rules((5000,), repeats=1)
    assert [(row["values"], row["density"], row["rule"]) for row in rows] == [
        (name, density, rule) for name in DRAWS for density in DENSITIES for rule in RULES
    ]
    for row in rows:
        quality = row["k̂ / k"]
        assert isinstance(quality, float)
        # A tenth of the values or a little less is not zero, and no zero counts.
        lowest = 0.9 if row["values"] == "9 in 10 zero" and row["density"] == 0.1 else 1
        if row["rule"] in ("exact", "histogram"):
            assert lowest <= quality <= 1
        if row["rule"] == "dgc":
            assert 0.8 * lowest <= quality <= 1.3
        for library in ("topk", "kthvalue", "partition"):
            speed = row[f"{library} / rule"]
            assert isinstance(speed, float) and speed > 0
    assert {row["goal"] for row in rows} == {None}


def check_methods(rows: list[Row]) -> None:
    assert [(row["density"], row["method"]) for row in rows] == [
        (density, method) for density in DENSITIES for method in methods()
    ]
    for row in rows:
        if row["method"] in ("topk", "cltk"):
            assert row["k̂ / k"] == pytest.approx(1)
        if row["method"] == "none":
            assert (row["relative error"], row["bytes per element sent"]) == (0, 4)
        else:
            error = row["relative error"]
            # Values that are drawn may be further off than nothing at all.
            highest = 1 if methods()[str(row["method"])].is_sparse else 3
            assert isinstance(error, float) and 0 < error <= highest


@pytest.mark.slow
def test_every_method_is_measured_at_every_density() -> None:
    check_methods(measure_methods(Drawn(20_000, SETTLING + 1), repeats=1))


def test_fragments_are_measured_for_every_number_of_trainers() -> None:
    rows = measure_fragments(dlrm_gradients(2), repeats=1)
    assert [(row["density"], row["trainers"]) for row in rows] == [
        (density, trainers) for density in DENSITIES for trainers in TRAINERS
    ]
    assert [row["goal"] for row in rows] == [row["trainers"] for row in rows]


@pytest.mark.slow
def test_the_page_has_rules_methods_and_the_papers_layers() -> None:
    threads = torch.get_num_threads()
    measured = measure_compressors(CompressorsBench(repeats=1, sizes=(20_000,)))
    assert torch.get_num_threads() == threads
    check_methods(measured[1])
    page = compressors_page(measured, describe(), "a command")
    assert page.count("\n## ") == 3
    assert documented_bench(3).repeats == 3
