"""A method of gradients has its row, its builder and its configuration; a rule its own."""

import re
from collections.abc import Mapping

import numpy as np
import pytest
import torch
from agreeing import encoded
from gradient_rows import SPECS, decoded, residual_of
from method_rows import METHOD_ROWS, MethodRow, configured
from torch import Tensor

from dlrm_hybrid.compress.gradient.collective import Op
from dlrm_hybrid.compress.gradient.compressor import Compressor
from dlrm_hybrid.compress.gradient.methods import methods, rules
from dlrm_hybrid.config.compose import values_of
from dlrm_hybrid.config.keys import conf_folder
from dlrm_hybrid.config.model import spec_of
from dlrm_hybrid.config.validate import validate
from dlrm_hybrid.model.spec import DataShape
from dlrm_hybrid.run.assembly import world as build_world


def test_every_method_has_its_law_row() -> None:
    assert {row.method for row in METHOD_ROWS} == {*methods()}


def test_every_method_and_every_rule_has_its_line_in_the_documentation() -> None:
    page = conf_folder().parent / "docs" / "compressors.md"
    listed_methods, listed_rules = (
        set(re.findall(rf"^\| `{key}=(\w+)`", page.read_text(encoding="utf-8"), re.M))
        for key in ("gradient", "gradient.threshold")
    )
    assert listed_methods == set(methods())
    assert listed_rules == set(rules())


def compressors(*overrides: str) -> list[Compressor]:
    """Those of all workers of a world of two stages, in the order of their ranks."""
    world = ("parallel=hybrid", "parallel.cuts=[bottom.2]", "model=dlrm_small")
    config = validate(values_of([*world, *overrides]))
    spec = spec_of(config.model, DataShape(table_rows=(10,) * 26))
    plan = build_world.layout(config, spec, steps=10, attempt=0)
    made = [
        build_world.compression(plan, rank).gradients
        for rank in range(2 * config.parallel.trainers)
    ]
    return [one for one in made if one is not None]


def filled(compressor: Compressor, value: float) -> Mapping[str, Tensor]:
    return {spec.name: torch.full(spec.shape, value) for spec in compressor.layout.specs}


def test_the_usual_hard_magnitude_is_that_of_the_whole_model_in_every_stage() -> None:
    """1 / (2 √k), k = N - ⌊0.9 N⌋ elements of the model: the same for tensors of any size."""
    stages = compressors("gradient=hard", "gradient.density=0.1", "parallel.trainers=1")
    counts = [sum(spec.count for spec in one.layout.specs) for one in stages]
    total = sum(counts)
    magnitude = 1 / (2 * np.sqrt(total - total * 9 // 10))
    assert len(set(counts)) == 2, "stages of equal size would not tell"
    for one in stages:
        # A tensor of one element is always sent, like everything that is sent whole.
        names = [spec.name for spec in one.layout.specs if spec.count > 1]
        for step, (value, leaves) in enumerate(((0.999, 0), (0.002, 1))):
            sections = encoded(one, filled(one, value * magnitude), step)
            sent = np.concatenate([decoded(sections[name]) for name in names])
            assert np.count_nonzero(sent) == leaves * sent.size


@pytest.mark.parametrize("row", METHOD_ROWS, ids=lambda row: row.name)
def test_servers_know_the_rounds_of_every_method(row: MethodRow) -> None:
    assert row.make(SPECS).rounds == tuple(map(Op, configured(row).gradient.rounds()))


@pytest.mark.parametrize("trainers", [1, 4])
def test_the_bound_of_the_norm_is_shared_by_trainers(trainers: int) -> None:
    """Norms of T independent gradients add up like √T, so each is cut at the bound over √T."""
    options = ("gradient=dgc", "gradient.clip_norm=2", f"parallel.trainers={trainers}")
    for one in compressors(*options):
        sections = encoded(one, filled(one, 3.0), 0)
        joined = [
            decoded(sections[spec.name]) + residual_of(one, spec) for spec in one.layout.specs
        ]
        norm = np.linalg.norm(np.concatenate(joined).astype(np.float64))
        assert norm == pytest.approx(2 / np.sqrt(trainers), rel=1e-5)
