import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from embedding_runs import run

from dlrm_hybrid.checkpoint.commit import Preparing, Shard, commit
from dlrm_hybrid.checkpoint.folder import RetentionPolicy

NUM_TABLES, DIM = 7, 8
KINDS = ["table_wise", "row_wise", "column_wise"]


def slow(*rows: tuple) -> list[object]:
    """For `make test-all`."""
    return [pytest.param(*row, marks=pytest.mark.slow) for row in rows]


PRECISIONS = ["float16", *slow(("float32",), ("bfloat16",))]


def assert_equal_to_one_table(told: list, exact: bool) -> None:
    for answer in told:
        assert answer["forward"] <= (0.0 if exact else 1e-6)
    for difference, moved in told[-1]["values"].values():
        assert difference <= (0.0 if exact else 2e-6 * max(1.0, moved))
        assert moved >= 1e-3


@pytest.mark.parametrize(
    ("trainers", "optimizer"),
    [
        (2, "rowwise_adagrad"),
        (3, "adam"),
        *slow((2, "sgd"), (3, "adagrad"), (2, "rowwise_adam"), (3, "rowwise_adagrad")),
    ],
)
def test_table_wise_equals_one_table_bit_for_bit(tmp_path: Path, trainers: int, optimizer: str):
    told = run(tmp_path, "equals_one_table", trainers, kind="table_wise", optimizer=optimizer)
    for one in told:
        assert one["forward"] == 0.0
        assert one["shards"] == told[0]["shards"]
    held = {"sgd": 1, "adam": 4, "rowwise_adam": 4}.get(optimizer, 2)
    assert len(told[-1]["values"]) == NUM_TABLES * held
    for difference, moved in told[-1]["values"].values():
        assert difference == 0.0
        assert moved >= 1e-3
    tables_T = [0] * trainers
    for shards in told[0]["shards"].values():
        ((trainer, _, _),) = shards
        tables_T[trainer] += 1
    assert max(tables_T) - min(tables_T) <= 1


@pytest.mark.parametrize(
    ("kind", "optimizer", "trainers"),
    [
        ("row_wise", "rowwise_adagrad", 3),
        ("column_wise", "adam", 2),
        *slow(("row_wise", "adagrad", 2), ("row_wise", "adam", 3), ("column_wise", "adagrad", 3)),
        *slow(("auto", "sgd", 2), ("auto", "rowwise_adagrad", 3), ("auto", "rowwise_adam", 2)),
    ],
)
def test_other_shardings_equal_one_table(tmp_path: Path, kind: str, optimizer: str, trainers: int):
    told = run(tmp_path, "equals_one_table", trainers, kind=kind, optimizer=optimizer)
    for one in told:
        assert one["forward"] <= 1e-6
    for difference, moved in told[-1]["values"].values():
        assert difference <= 1e-6 * max(1.0, moved)
        assert moved >= 1e-3
    if kind != "auto":
        assert all(len(shards) > 1 for shards in told[0]["shards"].values())


@pytest.mark.parametrize(
    ("kind", "optimizer", "given"),
    [
        ("column_wise", "adagrad", {"dim": 12, "weight_decay": 0.01}),
        ("table_wise", "rowwise_adam", {"dim": 3, "deduplicate": True}),
        *slow(
            ("table_wise", "sgd", {"dim": 10}),
            ("row_wise", "rowwise_adagrad", {"dim": 10}),
            ("auto", "adam", {"dim": 6, "weight_decay": 0.01}),
        ),
    ],
)
def test_widths_and_decay_that_fbgemm_does_not_know(
    tmp_path: Path, kind: str, optimizer: str, given: dict
):
    told = run(tmp_path, "equals_one_table", 2, kind=kind, optimizer=optimizer, **given)
    assert_equal_to_one_table(told, exact=kind == "table_wise" and not given.get("deduplicate"))


OWN_WIDTHS = [8, 4, 16, 8, 12, 4, 8]


@pytest.mark.parametrize(
    ("kind", "optimizer", "given"),
    [
        ("table_wise", "rowwise_adagrad", {}),
        ("table_wise", "adam", {"deduplicate": True, "dims": [3, 8, 5, 8, 10, 4, 8]}),
        *slow(
            ("table_wise", "sgd", {"deduplicate": True}),
            ("row_wise", "adagrad", {}),
            ("row_wise", "adam", {"dims": [3, 8, 5, 8, 10, 4, 8]}),
            ("column_wise", "adagrad", {"dims": [8, 12, 16, 8, 12, 24, 8]}),
            ("auto", "adagrad", {}),
        ),
    ],
)
def test_tables_of_several_widths_equal_one_process(
    tmp_path: Path, kind: str, optimizer: str, given: dict
):
    given = {"dims": OWN_WIDTHS, **given}
    told = run(tmp_path, "equals_one_table", 3, kind=kind, optimizer=optimizer, **given)
    assert_equal_to_one_table(told, exact=kind == "table_wise" and not given.get("deduplicate"))


# Gradients as small as 1e-6 must arrive as well as others.
@pytest.mark.parametrize("scale", [pytest.param(1e-3, marks=pytest.mark.slow), 1e-6])
@pytest.mark.parametrize(
    ("kind", "precision", "forward", "update"),
    [
        ("row_wise", "float16", 1e-3, 1e-3),
        ("column_wise", "bfloat16", 1e-2, 5e-3),
        *slow(("table_wise", "float16", 1e-3, 1e-3), ("table_wise", "bfloat16", 1e-2, 5e-3)),
    ],
)
def test_half_precision_costs_little(
    tmp_path: Path, kind: str, precision: str, forward: float, update: float, scale: float
):
    told = run(tmp_path, "equals_one_table", 2, kind=kind, precision=precision, scale=scale)
    assert 0 < max(one["forward"] for one in told) <= forward
    for difference, moved in told[-1]["values"].values():
        assert 0 < difference <= update * moved


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("kind", KINDS)
def test_every_byte_that_leaves_a_trainer_is_counted_once(
    tmp_path: Path, kind: str, precision: str
):
    rows_T = [5, 2, 4] if kind != "row_wise" else [4, 4, 4]
    told = run(tmp_path, "counts", 3, kind=kind, precision=precision, rows_T=rows_T)
    size = 4 if precision == "float32" else 2
    for one in told:
        me, rows = one["trainer"], rows_T[one["trainer"]]
        others = [t for t in range(3) if t != me]
        if kind == "row_wise":
            ids = rows * NUM_TABLES * 2
            forward = backward = rows * NUM_TABLES * DIM * 2
        else:
            ids = rows * sum(one["lookups_T"][t] for t in others)
            forward = one["columns_T"][me] * sum(rows_T[t] for t in others)
            backward = rows * sum(one["columns_T"][t] for t in others)
        assert one["told"] == [
            [4 * ids + size * forward, 4 * ids + 4 * forward],
            [4 * ids + size * (forward + backward), 4 * (ids + forward + backward)],
        ]


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_the_interface_carries_what_is_counted(tmp_path: Path, kind: str):
    """In a network namespace of its own, where nothing else is sent."""
    alone = ["unshare", "--user", "--map-root-user", "--net"]
    if subprocess.run([*alone, "true"], check=False, capture_output=True).returncode:
        pytest.skip("this machine makes no network namespaces")
    program = [sys.executable, str(Path(__file__).with_name("embedding_ranks.py"))]
    printed = subprocess.run(
        [*alone, *program, str(tmp_path), kind, "float16"],
        check=True,
        capture_output=True,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])},
    ).stdout
    told = json.loads(printed)
    counted = sum(one["counted"] for one in told)
    for one in told:  # headers and answers of TCP, preambles of gloo
        assert counted < one["seen"] < 1.05 * counted


@pytest.mark.parametrize("trainers", [pytest.param(2, marks=pytest.mark.slow), 3])
@pytest.mark.parametrize("kind", KINDS)
def test_batches_may_differ_and_be_empty(tmp_path: Path, kind: str, trainers: int):
    told = run(tmp_path, "looks_up_uneven_batches", trainers, kind=kind)
    assert [one["batches"] for one in told] == [5] * trainers


def test_an_id_outside_its_table_is_an_error(tmp_path: Path):
    told = run(tmp_path, "refuses_a_bad_id", 2, kind="table_wise")
    for trainer in (0, 1):
        messages = [one["message"] for one in told if one["trainer"] == trainer]
        assert messages == [
            f"id {bad_id} is out of bounds: embedding.4 has num_rows = 17"
            for bad_id in (-1, 17, 2**32)
        ]


@pytest.mark.parametrize("before", ["lookup", "backward"])
def test_a_lost_trainer_is_named(tmp_path: Path, before: str):
    told = run(tmp_path, "loses_a_trainer", 2, silent=1, kind="table_wise", before=before)
    assert told == [{"trainer": 0, "lost": 4}]  # its rank in the run


@pytest.mark.parametrize(
    ("optimizer", "before", "after", "exact"),
    [
        ("adagrad", ("row_wise", 2), ("table_wise", 3), True),
        ("rowwise_adam", ("table_wise", 2), ("row_wise", 3), False),
        *slow(
            ("sgd", ("column_wise", 2), ("table_wise", 3), True),
            ("adagrad", ("table_wise", 3), ("column_wise", 2), False),
            ("rowwise_adagrad", ("table_wise", 2), ("row_wise", 3), False),
            ("adam", ("row_wise", 3), ("table_wise", 2), True),
            ("adam", ("table_wise", 2), ("column_wise", 2), False),
        ),
    ],
)
def test_a_checkpoint_has_no_layout(
    tmp_path: Path, optimizer: str, before: tuple[str, int], after: tuple[str, int], exact: bool
):
    root = tmp_path / "checkpoints"
    given = {"optimizer": optimizer, "checkpoints": str(root)}
    kind, trainers = before
    left = run(tmp_path, "leaves_a_checkpoint", trainers, kind=kind, **given)
    names = {number: f"worker-{number}" for number in range(trainers)}
    preparing = Preparing(step=5, owed=names, shards={})
    for one in left:
        preparing = preparing.took(one["trainer"], Shard(**one["shard"]))
    commit(root, 0, preparing, {}, RetentionPolicy(newest=1, best=False))
    kind, trainers = after
    told = run(tmp_path, "resumes_from_a_checkpoint", trainers, kind=kind, **given)
    assert told[0]["difference"] <= (0.0 if exact else 1e-5)
    assert told[0]["moved"] >= 1e-4
