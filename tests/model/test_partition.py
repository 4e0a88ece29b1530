from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dlrm_hybrid.model.spec import ModelSpec, Partition, microbatch_rows
from dlrm_hybrid.types import ConfigError

PAPER = ModelSpec(
    embedding_dim=16, bottom=(13, 512, 256, 64, 16), top=(512, 256, 128, 1), table_rows=(10,) * 26
)
PAPER_CUTS = ("bottom.1", "bottom.2", "bottom.3", "bottom.4", "top.1", "top.2", "top.3")


def _spec(bottom: int, top: int) -> ModelSpec:
    """So many layers, every width another."""
    return ModelSpec(
        embedding_dim=100 + bottom,
        bottom=tuple(100 + layer for layer in range(bottom + 1)),
        top=(*(200 + layer for layer in range(1, top)), 1),
        table_rows=(3, 4),
    )


def _check(spec: ModelSpec, cuts: tuple[str, ...]) -> None:
    partition = Partition.of(spec, cuts)
    stages = partition.stages
    assert len(stages) == len(cuts) + 1
    assert [part.index for part in stages] == list(range(len(stages)))
    assert [part.is_first for part in stages] == [True, *(False for _ in cuts)]
    assert [part.is_last for part in stages] == [*(False for _ in cuts), True]
    names = [name for part in stages for name in part.parameter_names]
    assert names == list(spec.dense_shapes())
    assert list(partition.stage_of) == names
    assert all(stages[stage].parameter_names.count(n) for n, stage in partition.stage_of.items())
    assert all(part.layer_names for part in stages)
    assert tuple(part.layer_names[-1] for part in stages[:-1]) == partition.cuts
    assert sorted(partition.cuts) == sorted(cuts)
    (interaction,) = [part for part in stages if part.has_interaction]
    assert partition.interaction_stage == interaction.index
    assert "top.1" in interaction.layer_names
    shapes = spec.dense_shapes()
    for part in stages:
        assert shapes[f"{part.layer_names[-1]}.bias"] == (part.output_width,)
        if part.layer_names[0] != "top.1":
            assert shapes[f"{part.layer_names[0]}.weight"][1] == part.input_width
    for before, behind in pairwise(stages):
        assert before.output_width == behind.input_width


@given(st.data())
def test_any_model_with_cuts_in_any_order(data: st.DataObject):
    spec = _spec(data.draw(st.integers(1, 6)), data.draw(st.integers(1, 6)))
    possible = spec.layer_names[:-1]
    assert len(possible) == len(spec.layer_names) - 1
    cuts = data.draw(st.lists(st.sampled_from(possible), unique=True))
    _check(spec, tuple(cuts))
    assert Partition.of(spec, cuts) == Partition.of(spec, cuts[::-1])


@pytest.mark.parametrize(
    "cut", ["top.4", "top.0", "bottom.5", "bottom.0", "middle.1", "", "top.01"]
)
def test_a_cut_that_does_not_exist_is_refused_with_those_that_do(cut: str):
    with pytest.raises(ConfigError) as refused:
        Partition.of(PAPER, ("bottom.2", cut))
    (line,) = str(refused.value).splitlines()
    assert line.startswith(f"parallel.cuts: {cut!r} ")
    assert line.endswith(", ".join(PAPER_CUTS))


def test_all_faults_are_reported_at_once():
    with pytest.raises(ConfigError) as refused:
        Partition.of(PAPER, ("top.2", "top.9", "top.2", "bottom.7"))
    lines = str(refused.value).splitlines()
    assert [line.split()[1] for line in lines] == ["'top.2'", "'top.9'", "'top.2'", "'bottom.7'"]


def test_microbatches_have_equal_rows_or_are_refused():
    assert microbatch_rows(128, 4) == 32
    assert microbatch_rows(7, 1) == 7
    with pytest.raises(ConfigError, match=r"train\.batch_size=130 .* schedule\.microbatches=4$"):
        microbatch_rows(130, 4)
