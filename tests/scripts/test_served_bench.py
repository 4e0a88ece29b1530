"""What is said of table servers is measured by scripts that run, and what rows let expect holds."""

from collections.abc import Callable, Sequence
from itertools import product
from pathlib import Path

import pytest
import served
import table_server

from dlrm_hybrid.config.compose import values_of
from dlrm_hybrid.config.validate import validate
from dlrm_hybrid.data.shards import open_shards
from dlrm_hybrid.model.embeddings import EmbeddingOptimizer
from dlrm_hybrid.report.runs import read_run
from dlrm_hybrid.run.assembly import build

IN_PROCESS = ("parallel=hybrid", "parallel.world=in_process", "parallel.cuts=[]")


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_bytes_of_served_tables_are_what_the_rows_let_expect(
    train: Callable[..., tuple[int, Path]], precision: str
) -> None:
    words = (*IN_PROCESS, *served.SERVED, f"embedding.comm_precision={precision}")
    code, folder = train("served", *words, "train.steps=40")
    assert code == 0
    row = served.bytes_row(("served", 64), read_run(folder))
    counted, expected = (float(str(row[key])) for key in ("bytes per sample", "formula"))
    # What is counted has headers, and leaves out the first steps.
    assert expected < counted < 1.03 * expected


def test_sharded_tables_send_what_the_other_trainers_own(small_rows: Sequence[str]) -> None:
    sizes: dict[str, float] = {}
    for name, trainers in product(("sharded", "served"), (2, 3)):
        world = (*IN_PROCESS, *served.BYTES_WORLDS[name], f"parallel.trainers={trainers}")
        config = validate(values_of((*small_rows, *world)))
        sizes[f"{name}, {trainers}"] = served.expected_bytes(config, 20)[1]
    assert sizes["served, 3"] == pytest.approx(sizes["served, 2"], rel=0.02)
    assert sizes["sharded, 3"] / sizes["sharded, 2"] == pytest.approx(4 / 3, rel=0.02)
    assert 2 < sizes["served, 2"] / sizes["sharded, 2"] < 2.2  # ids travel twice


def test_a_table_server_is_given_every_batch_with_every_optimizer(
    small_rows: Sequence[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(table_server, "BATCH_ROWS", 512)
    shards = open_shards(build.prepared_folder(validate(values_of(small_rows))), None)
    rows = list(table_server.measure_rows(shards, [128], 2))
    assert [row["optimizer"] for row in rows] == list(EmbeddingOptimizer)
    assert {row["distinct ids"] for row in rows} == {rows[0]["distinct ids"]}
    assert all(float(str(row["embedding rows/s"])) > 0 for row in rows)
