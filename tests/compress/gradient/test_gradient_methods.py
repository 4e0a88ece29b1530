"""A method of gradients has its row, its builder and its configuration; a rule its own."""

import re
from typing import get_args

import pytest
from method_rows import METHOD_ROWS

from dlrm_hybrid.config import build_coordination, build_gradient
from dlrm_hybrid.config.build_threshold import THRESHOLDS
from dlrm_hybrid.config.compose import conf_folder, values_of
from dlrm_hybrid.config.compression_schema import MethodName, RuleName
from dlrm_hybrid.config.gradient_methods import METHODS, RULE_SECTIONS, sections_read


def test_no_method_and_no_rule_misses_one_of_its_parts() -> None:
    configured = {path.stem for path in (conf_folder() / "gradient").glob("*.yaml")}
    assert set(METHODS) == set(get_args(MethodName)) == configured
    assert {*build_gradient.METHODS, *build_coordination.COMPRESSORS} == configured
    assert {row.method for row in METHOD_ROWS} == configured
    assert set(RULE_SECTIONS) == set(get_args(RuleName)) == set(THRESHOLDS)


def test_every_method_and_every_rule_has_its_line_in_the_documentation() -> None:
    page = conf_folder().parent / "docs" / "compressors.md"
    methods, rules = (
        set(re.findall(rf"^\| `{key}=(\w+)`", page.read_text(encoding="utf-8"), re.M))
        for key in ("gradient", "gradient.threshold")
    )
    assert methods == set(METHODS)
    assert rules == set(RULE_SECTIONS)


@pytest.mark.parametrize("name", METHODS)
def test_every_choice_holds_and_keeps_only_what_it_reads(name: str) -> None:
    gradient = values_of(["parallel=hybrid", f"gradient={name}"])["gradient"]
    assert gradient["name"] == name
    held = {key for key, value in gradient.items() if isinstance(value, dict)}
    assert held == set(sections_read(name, gradient["threshold"]))


@pytest.mark.parametrize("rule", RULE_SECTIONS)
def test_every_rule_finds_thresholds_that_live_long(rule: str) -> None:
    overrides = ["parallel=hybrid", "gradient=dct", f"gradient.threshold={rule}"]
    gradient = values_of(overrides)["gradient"]
    assert all(gradient[section] is not None for section in RULE_SECTIONS[rule])
