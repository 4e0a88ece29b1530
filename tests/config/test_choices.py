"""Every experiment with every choice of every group: they compose, or a sentence says why not."""

import re
from typing import Any

import pytest
from omegaconf import OmegaConf

from dlrm_hybrid.config import compose
from dlrm_hybrid.config.experiments import OwnExperiments, drop_unfit
from dlrm_hybrid.config.identity import flat, with_value
from dlrm_hybrid.config.keys import EXPERIMENT, all_groups, default_choices
from dlrm_hybrid.config.model import with_input_width, with_world_size, without_unread
from dlrm_hybrid.config.options import option
from dlrm_hybrid.config.validate import all_faults
from dlrm_hybrid.types import ConfigError

GROUPS = {group: names for group, names in all_groups().items() if group != EXPERIMENT}
CHOICES = [(group, name) for group, names in GROUPS.items() for name in names]
# What is said of a value, not of two choices that exclude each other.
OF_A_VALUE = ("only applies to", "no effect", "cannot be composed", "Could not", "unknown key")
# What a sentence says of two choices that exclude each other: what to choose instead.
INSTEAD = r"needs? .|use .|add .|set .|must |choose from ."


def faults(*overrides: str) -> list[str]:
    try:
        compose.job_of(overrides, trains=False)
    except ConfigError as error:
        return [line.strip() for line in str(error).splitlines()[1:]]
    return []


@pytest.mark.parametrize("experiment", all_groups()[EXPERIMENT])
def test_an_experiment_goes_with_any_choice_or_says_what_does_not(experiment: str) -> None:
    """As Hydra would compose them, from one composition: an option below, the experiment above."""
    chosen = f"+experiment={experiment}"
    values = dict(compose.choice_of([chosen]).values)
    if values["parallel"]["name"] == "hybrid":  # as it was before it followed from `embedding`
        values = with_value(values, "parallel.table_servers", None)
    set_there, config = OwnExperiments().keys_set([chosen]), OmegaConf.create(values)
    for group, name in CHOICES:
        section: dict[str, Any] = option(group, name)
        for key, value in flat({group: values[group]}).items():
            if key in set_there:
                section = with_value(section, key.partition(".")[2], value)
        config[group] = {**section, "name": name}
        dropped = drop_unfit(config, [chosen, f"{group}={name}"])
        composed: Any = OmegaConf.to_container(config)
        settled, unread = without_unread(with_world_size(composed))
        settled, wide = with_input_width(settled)
        told = [*unread, *wide, *all_faults(settled)]
        assert not [line for line in told for words in OF_A_VALUE if words in line], (group, name)
        assert all(re.search(INSTEAD, line) for line in told), told
        if values[group]["name"] == name and group in default_choices():
            assert not dropped
        if dropped:  # from other groups, too
            config = OmegaConf.create(values)
        config[group] = values[group]


@pytest.mark.parametrize(
    ("overrides", "left_out"),
    [
        (
            "+experiment=dct_levels parallel.cuts=[] activation=none",
            ["activation.sparsity = [0.0, 0.5]", "activation.bits = 4"],
        ),
        ("+experiment=dct_hybrid embedding=served", ["embedding.deduplicate = true"]),
        ("parallel=hybrid embedding=served", []),
        ("+experiment=dct_levels gradient=topk", []),
        ("+experiment=dct_levels gradient=none", ["gradient.precision = 'levels'"]),
        (
            "+experiment=dct_levels parallel=single gradient=none activation=none",
            [
                *("gradient.precision", "parallel.cuts", "activation.sparsity", "activation.bits"),
                *("pull.precision", "embedding.deduplicate", "embedding.levels"),
            ],
        ),
        ("+experiment=paper_table3 activation=none", ["activation.sparsity = 0.9"]),
        (
            "+experiment=mlperf_v2 model=dlrm_small data=synthetic",
            ["model.embedding_dim", "model.bottom", "model.top", "model.cross"],
        ),
        (
            "+experiment=bars_criteo_x1 data=synthetic",
            ["data.schema", "data.prepared = 'data/prepared/bars_criteo_x1'"],
        ),
    ],
)
def test_a_typed_choice_beats_what_an_experiment_set_for_another(
    overrides: str, left_out: list[str]
) -> None:
    job = compose.job_of(overrides.split(), trains=False)
    told = [line for line in job.dropped if line.endswith("left out of the experiment")]
    assert len(told) == len(job.dropped) == len(left_out)
    assert all(any(line.startswith(key) for line in told) for key in left_out), told


def test_what_is_typed_itself_is_refused_not_left_out() -> None:
    assert faults("+experiment=dct_levels", "gradient=none", "gradient.precision=levels") == [
        "gradient.precision = 'levels': has no effect with gradient=none; only applies to "
        "gradient=cltk, dct, deft, dgc, gaussian, hard, randomk, redsync, sidco or topk"
    ]


@pytest.mark.slow
@pytest.mark.parametrize("experiment", all_groups()[EXPERIMENT])
def test_what_hydra_composes_of_them_is_the_same(experiment: str) -> None:
    for group, name in CHOICES:
        told = faults(f"+experiment={experiment}", f"{group}={name}")
        assert not [line for line in told for words in OF_A_VALUE if words in line], (group, name)
