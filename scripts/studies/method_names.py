"""What methods of compressing gradients are called in tables and pictures: pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

WHOLE, OWN, STAGE = "none", "own", "stage"
OWN_RULE = "histogram"  # of gradient=dct
SIDCO_LETTERS = {"exponential": "E", "gamma": "GP", "pareto": "P"}


def method_of(config: Mapping[str, Any]) -> str:
    """The choice of `gradient`, and what makes more of it than its name says.

    That is another rule than `dct` comes with, `union` where all trainers send what any of them
    has selected, `leader` where one of them selects for all, and with `terngrad` that nothing is
    clipped or no scale shared.
    """
    gradient = config["gradient"]
    words: list[str] = [gradient["name"]]
    if words == ["dct"] and gradient["threshold"] != OWN_RULE:
        words.append(gradient["threshold"])
    aggregation = gradient.get("aggregation") or OWN  # older runs have no such key
    if aggregation != OWN:
        words.append(aggregation)
    ternary = gradient.get("terngrad")
    if ternary and ternary["clip"] is None:
        words.append("not clipped")
    if ternary and not ternary["sharing"]:
        words.append("own scales")
    return ", ".join(words)


def estimator_of(config: Mapping[str, Any]) -> str:
    """What finds thresholds: a method, or the rule of `dct` where it finds one in every step."""
    gradient = config["gradient"]
    name: str = gradient["name"]
    if name == "dct" and gradient["lifespan"] == 1:
        name = gradient["threshold"]
    if name == "sidco":
        name += f"-{SIDCO_LETTERS[gradient['sidco']['distribution']]}"
    return f"{name}, {STAGE}" if gradient["scope"] == STAGE else name
