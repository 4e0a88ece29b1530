"""Names of methods and estimators."""

from typing import Any

import pytest
from frame import estimator_of, method_of

DCT = {"name": "dct", "threshold": "histogram", "lifespan": 1000, "scope": "tensor"}
TERNARY = {"clip": 2.5, "sharing": True}


@pytest.mark.parametrize(
    ("gradient", "name"),
    [
        (DCT, "dct"),
        ({**DCT, "threshold": "sidco"}, "dct, sidco"),
        ({**DCT, "aggregation": "union"}, "dct, union"),
        ({**DCT, "aggregation": "leader"}, "dct, leader"),
        ({"name": "topk", "threshold": "histogram", "aggregation": "own"}, "topk"),
        ({"name": "terngrad", "terngrad": TERNARY}, "terngrad"),
        ({"name": "terngrad", "terngrad": {**TERNARY, "clip": None}}, "terngrad, not clipped"),
        ({"name": "terngrad", "terngrad": {**TERNARY, "sharing": False}}, "terngrad, own scales"),
    ],
)
def test_a_method_is_named_by_what_sets_it_apart(gradient: dict[str, Any], name: str) -> None:
    assert method_of({"gradient": gradient}) == name
    assert method_of({"gradient": gradient, "pull": {"sparsity": None}}) == name
    assert method_of({"gradient": gradient, "pull": {"sparsity": 0.99}}) == f"{name}, pulls of 1 %"


@pytest.mark.parametrize(
    ("gradient", "name"),
    [
        (DCT, "dct"),
        ({**DCT, "threshold": "dgc", "lifespan": 1}, "dgc"),
        ({**DCT, "scope": "stage"}, "dct, stage"),
        (
            {
                **DCT,
                "threshold": "sidco",
                "lifespan": 1,
                "sidco": {"distribution": "pareto"},
            },
            "sidco-P",
        ),
    ],
)
def test_an_estimator_is_the_rule_of_every_step(gradient: dict[str, Any], name: str) -> None:
    assert estimator_of({"gradient": gradient}) == name
