from pathlib import Path

import numpy as np
import torch
from plain_dlrm import RowDataset, plain_loader
from random_rows import draw_rows, write_shards
from step import Case, StepBench, StepRow, criteo_bench, measure_step, step_page

from dlrm_hybrid.data.loader import sequential_batches
from dlrm_hybrid.data.shards import open_shards
from dlrm_hybrid.model.layers import Precision
from dlrm_hybrid.model.spec import ModelSpec
from dlrm_hybrid.telemetry.machine import describe

SPEC = ModelSpec(embedding_dim=4, bottom=(13, 8, 4), top=(8, 1), table_rows=tuple(range(1, 27)))


def test_a_small_run_gives_a_row_with_and_without_loading_for_every_case():
    bench = StepBench(
        spec=SPEC,
        cases=tuple(
            Case(batch_size=16, precision=precision, goal=1000.0) for precision in Precision
        ),
        repeats=3,
        turn_rows=64,
        rows=200,
    )
    threads = torch.get_num_threads()
    rows = measure_step(bench)
    assert torch.get_num_threads() == threads
    assert [(row.case.precision, row.loading) for row in rows] == [
        (precision, loading) for precision in Precision for loading in (True, False)
    ]
    for row in rows:
        assert len(row.ours_seconds) == len(row.plain_seconds) == len(row.ratios) == 3
        assert all(1e-7 < seconds < 0.1 for seconds in row.ours_seconds + row.plain_seconds)
    page = step_page(rows, describe(), "a command")
    assert page.count("\n|    16 |") == 4
    assert page.count(" 1,000 | no ") == 2


def test_the_ratio_is_plain_over_ours_turn_by_turn():
    row = StepRow(
        case=Case(batch_size=1, precision=Precision.FLOAT32, goal=None),
        loading=True,
        ours_seconds=(1.0, 2.0),
        plain_seconds=(3.0, 8.0),
    )
    assert row.ratios == (3.0, 4.0)


def test_both_loaders_give_the_same_rows(tmp_path: Path):
    rows = draw_rows(SPEC.table_rows, 21, seed=3)
    write_shards(tmp_path, rows, SPEC.table_rows)
    shards = open_shards(tmp_path, expected=None)
    (ours,) = sequential_batches(shards, range(20), 20)
    (plain,) = plain_loader(RowDataset(rows.counts_RI, rows.ids_RF, rows.label_R), 20)
    np.testing.assert_allclose(ours.dense_BI, plain.dense_BI.numpy(), rtol=0, atol=1e-5)
    np.testing.assert_array_equal(ours.ids_FB, plain.ids_FB.numpy())
    np.testing.assert_array_equal(ours.label_B, plain.label_B1.numpy()[:, 0])
    assert ours.dense_BI.std() > 0.1
    assert all(
        ids.min() >= 0 and ids.max() < size
        for ids, size in zip(rows.ids_RF.T, SPEC.table_rows, strict=True)
    )


def test_the_documented_benchmark_is_the_papers_model_with_the_projects_goals():
    bench = criteo_bench(repeats=7)
    assert bench.repeats == 7
    assert bench.spec.interaction_width == 367
    assert len(bench.spec.table_rows) == 26
    goals = {(case.batch_size, str(case.precision)): case.goal for case in bench.cases}
    assert goals == {
        (128, "float32"): 1.3,
        (128, "bfloat16"): 1.7,
        (2048, "float32"): None,
        (2048, "bfloat16"): 1.8,
    }
    assert all(bench.turn_rows % case.batch_size == 0 for case in bench.cases)
