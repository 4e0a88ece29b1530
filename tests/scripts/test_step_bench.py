"""The benchmark of a step at its smallest."""

from pathlib import Path

import numpy as np
from plain_dlrm import PAPER_SPEC, draw_rows, plain_loader, write_shards
from step import CASES, PAPER_SIZES, Case, Sizes, measure_products, measure_steps

from dlrm_hybrid.data.loader import sequential_batches
from dlrm_hybrid.data.shards import open_shards
from dlrm_hybrid.model.layers.products import Precision
from dlrm_hybrid.model.spec import ModelSpec

SPEC = ModelSpec(embedding_dim=4, bottom=(13, 8, 4), top=(8, 1), table_rows=tuple(range(1, 27)))


def middle(cell: object) -> float:
    return float(str(cell).partition(" ")[0].replace(",", ""))


def test_a_small_run_gives_a_row_with_and_without_loading_for_every_case() -> None:
    cases = [Case(batch_size=16, precision=precision, goal=1000.0) for precision in Precision]
    rows = measure_steps(3, cases, Sizes(spec=SPEC, turn_rows=64, rows=200))
    assert [(row["precision"], row["loading"]) for row in rows] == [
        (str(precision), loading) for precision in Precision for loading in ("yes", "no")
    ]
    for row in rows:
        ours, plain = (
            middle(row[f"{who}, µs per sample"]) for who in ("this model", "plain DLRM float32")
        )
        assert 0.1 < ours < 1e5 and 0.1 < plain < 1e5
        assert middle(row["ratio"]) > 0
        assert (row["goal"], row["reached"]) == (
            (1000.0, "no") if row["loading"] == "yes" else (None, None)
        )


def test_products_are_measured_in_both_types() -> None:
    rows = measure_products(1)
    assert [(row["batch"], row["precision"]) for row in rows] == [
        (batch, name) for batch in (128, 2048) for name in ("float32", "bfloat16")
    ]
    assert all(middle(row["products, µs per sample"]) > 1 for row in rows)


def test_both_loaders_give_the_same_rows(tmp_path: Path) -> None:
    rows = draw_rows(SPEC.table_rows, 21, seed=3)
    write_shards(tmp_path, rows, SPEC.table_rows)
    shards = open_shards(tmp_path, expected=None)
    (ours,) = sequential_batches(shards, range(20), 20)
    (plain,) = plain_loader(rows, 20)
    np.testing.assert_allclose(ours.dense_BI, plain.dense_BI.numpy(), rtol=0, atol=1e-5)
    np.testing.assert_array_equal(ours.bags.values, plain.ids_FB.numpy())
    np.testing.assert_array_equal(ours.label_B, plain.label_B1.numpy()[:, 0])
    assert ours.dense_BI.std() > 0.1
    assert all(
        ids.min() >= 0 and ids.max() < size
        for ids, size in zip(rows.ids_RF.T, SPEC.table_rows, strict=True)
    )


def test_the_documented_benchmark_is_the_papers_model_with_the_projects_goals() -> None:
    assert PAPER_SPEC.interaction_width == 367
    assert len(PAPER_SPEC.table_rows) == 26
    goals = {(case.batch_size, str(case.precision)): case.goal for case in CASES}
    assert goals == {
        (128, "float32"): 1.3,
        (128, "bfloat16"): 1.7,
        (2048, "float32"): None,
        (2048, "bfloat16"): 1.8,
    }
    assert all(PAPER_SIZES.turn_rows % case.batch_size == 0 for case in CASES)
