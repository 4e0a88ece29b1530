from typing import Any

import pytest

from dlrm_hybrid.model.spec import ModelSpec
from dlrm_hybrid.types import ConfigError

PAPER = ModelSpec(
    embedding_dim=16, bottom=(13, 512, 256, 64, 16), top=(512, 256, 128, 1), table_rows=(10,) * 26
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


def test_without_dense_columns_the_tables_meet_alone():
    spec = ModelSpec(embedding_dim=10, bottom=(), top=(400, 400, 400, 1), table_rows=(60_000,) * 22)
    assert (spec.num_vectors, spec.interaction_width, spec.num_dense) == (22, 231, 0)
    assert spec.layer_names == ("top.1", "top.2", "top.3", "top.4")
    # FuxiCTR counts 13,402,391 parameters in its DLRM for Avazu: what is left for the tables, after
    # batch norm's weights, is whole rows of 10.
    dense = sum(shape[0] * (shape[1:] or (1,))[0] for shape in spec.dense_shapes().values())
    assert (13_402_391 - dense - 3 * 2 * 400) / 10 == 1_298_599


@pytest.mark.parametrize(
    ("change", "key"),
    [
        ({"bottom": (13, 8)}, "model.bottom"),
        ({"bottom": (16,)}, "model.bottom"),
        ({"top": (8, 2)}, "model.top"),
        ({"top": ()}, "model.top"),
        (
            {"loss_weights": (1.0, 2.0)},
            r"model.top: \[8, 1\] must end in 2, a logit for each of loss",
        ),
        ({"loss_weights": (1.0,)}, r"loss_weights: \[1.0\]: of two labels or more; \(\) for one"),
        ({"loss_weights": (1.0, 0.0), "top": (2,)}, "loss_weights: .*: 0.0 must be above 0"),
        ({"loss_weights": (float("nan"), 1.0), "top": (2,)}, "nan must be above 0 and finite"),
        (
            {"loss_weights": 1.0, "frozen": True},
            "model.frozen = True: .*\nmodel.loss_weights = 1.0",
        ),
        ({"table_rows": ()}, "table"),
        ({"table_rows": (3, 0)}, "rows"),
        ({"bottom": ()}, "interaction.*no pair"),
        ({"table_rows": ("3",)}, r"model.table_rows = \('3',\): must be whole numbers"),
        ({"table_rows": "3"}, "model.table_rows = '3': must be whole numbers"),
        ({"table_rows": None, "top": (1.0,)}, "model.top = .*\nmodel.table_rows = None"),
        ({"bottom": (True, 16)}, "model.bottom = "),
        ({"embedding_dim": "16"}, "model.embedding_dim = '16': must be a whole number"),
        ({"embedding_dim": (16,)}, "model.embedding_dim = "),
    ],
)
def test_widths_that_do_not_fit_are_refused_by_key(change: dict[str, Any], key: str):
    fields = {"embedding_dim": 16, "bottom": (13, 16), "top": (8, 1), "table_rows": (3,)} | change
    with pytest.raises(ConfigError, match=key):
        ModelSpec(**fields)
