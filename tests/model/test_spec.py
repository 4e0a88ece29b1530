import pytest

from dlrm_hybrid.model.spec import ModelSpec
from dlrm_hybrid.types import ConfigError

PAPER = ModelSpec(
    embedding_dim=16,
    bottom=(13, 512, 256, 64, 16),
    top=(512, 256, 128, 1),
    table_rows=(10,) * 26,
)


def test_the_paper_model_has_the_widths_and_parameters_of_the_paper():
    assert PAPER.interaction_width == 367
    shapes = PAPER.dense_shapes()
    assert shapes["top.1.weight"] == (512, 367)
    assert shapes["bottom.4.bias"] == (16,)
    assert sum(shape[0] * (shape[1:] or (1,))[0] for shape in shapes.values()) == 508_753


def test_layers_and_tables_count_from_one():
    assert PAPER.layer_names == (
        *(f"bottom.{i}" for i in range(1, 5)),
        *(f"top.{i}" for i in range(1, 5)),
    )
    assert PAPER.table_names[0] == "embedding.1"
    assert PAPER.table_names[-1] == "embedding.26"


@pytest.mark.parametrize(
    ("change", "key"),
    [
        ({"bottom": (13, 8)}, "model.bottom"),
        ({"bottom": (16,)}, "model.bottom"),
        ({"top": (8, 2)}, "model.top"),
        ({"top": ()}, "model.top"),
        ({"table_rows": ()}, "table"),
        ({"table_rows": (3, 0)}, "rows"),
    ],
)
def test_widths_that_do_not_fit_are_refused_by_key(change: dict[str, tuple[int, ...]], key: str):
    fields = {"bottom": (13, 16), "top": (8, 1), "table_rows": (3,)} | change
    with pytest.raises(ConfigError, match=key):
        ModelSpec(embedding_dim=16, **fields)
