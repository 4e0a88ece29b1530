"""The benchmark of the compressors at its smallest."""

import pytest
from compressors import (
    DRAWS,
    RULES,
    SETTLING_STEPS,
    TRAINERS,
    drawn_rows,
    fragment_rows,
    layer_rows,
    rule_rows,
)
from harness import DENSITIES, Row
from plain_dlrm import layer_gradients

from dlrm_hybrid.compress.gradient.methods import methods


def test_every_rule_is_measured_at_every_density() -> None:
    rows = rule_rows(1, sizes=(5000,))
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


def check_methods(rows: list[Row], rounding: float) -> None:
    assert [(row["density"], row["method"]) for row in rows] == [
        (density, method) for density in DENSITIES for method in methods()
    ]
    for row in rows:
        if row["method"] in ("topk", "cltk"):
            assert row["k̂ / k"] == pytest.approx(1, rel=rounding)
        if row["method"] == "none":
            assert (row["relative error"], row["bytes per element sent"]) == (0, 4)
        else:
            error = row["relative error"]
            # Values that are drawn may be further off than nothing at all.
            highest = 1 if methods()[str(row["method"])].is_sparse else 3
            assert isinstance(error, float) and 0 < error <= highest


@pytest.mark.slow
def test_every_method_is_measured_at_every_density() -> None:
    check_methods(drawn_rows(20_000, repeats=1), rounding=1e-6)


@pytest.mark.slow
def test_every_method_is_measured_on_the_papers_layers() -> None:
    check_methods(layer_rows(layer_gradients(SETTLING_STEPS + 1, 128)), rounding=0.02)


def test_fragments_are_measured_for_every_number_of_trainers() -> None:
    rows = fragment_rows(layer_gradients(2, 128), repeats=1)
    assert [(row["density"], row["trainers"]) for row in rows] == [
        (density, trainers) for density in DENSITIES for trainers in TRAINERS
    ]
    assert [row["goal"] for row in rows] == [row["trainers"] for row in rows]
