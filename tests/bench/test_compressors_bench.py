"""The benchmark of the compressors at its smallest."""

import pytest
import torch

from dlrm_hybrid.bench.compressors import (
    CompressorsBench,
    compressors_page,
    documented_bench,
    measure_compressors,
)
from dlrm_hybrid.bench.compressors_rules import DRAWS, RULES
from dlrm_hybrid.config.gradient_methods import METHODS
from dlrm_hybrid.telemetry.machine import describe


def test_every_rule_and_method_is_measured_at_every_density() -> None:
    threads = torch.get_num_threads()
    measured = measure_compressors(CompressorsBench(repeats=1, sizes=(20_000,)))
    assert torch.get_num_threads() == threads
    rules, drawn, layers = measured
    assert [(row["values"], row["density"], row["rule"]) for row in rules] == [
        (name, density, rule) for name in DRAWS for density in (0.1, 0.01, 0.001) for rule in RULES
    ]
    for rows in (drawn, layers):
        assert [(row["density"], row["method"]) for row in rows] == [
            (density, method) for density in (0.1, 0.01, 0.001) for method in METHODS
        ]
    for row in drawn:
        if row["method"] in ("topk", "cltk"):
            assert row["k̂ / k"] == pytest.approx(1)
        if row["method"] == "none":
            assert (row["relative error"], row["bytes per element sent"]) == (0, 4)
        else:
            assert isinstance(error := row["relative error"], float) and 0 < error <= 1
    page = compressors_page(measured, describe(), "a command")
    assert page.count("\n## ") == 2
    assert documented_bench(3).repeats == 3
