"""Shared tables of trainers are one table, however they are divided; every byte is counted."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from embedding_runs import World, rows, run

from dlrm_hybrid.checkpoint.commit import Preparing, Shard, commit
from dlrm_hybrid.checkpoint.folder import RetentionPolicy

NUM_TABLES, DIM = 7, 8
KINDS = ["table_wise", "row_wise", "column_wise"]
HELD = {"sgd": 1, "adam": 4, "rowwise_adam": 4}  # tensors of a table
OWN_WIDTHS, ODD_WIDTHS = [8, 4, 16, 8, 12, 4, 8], [3, 8, 5, 8, 10, 4, 8]
DISTINCT = {"deduplicate": True}
Told = Callable[[str], list[dict]]


def of(trainers: int, kind: str, optimizer: str, **given: Any) -> World:
    given = {"kind": kind, "optimizer": optimizer, **given}
    return World(trainers, "equals_one_table", given, given.pop("is_slow", False))


def slow(trainers: int, kind: str, optimizer: str, **given: Any) -> World:
    return of(trainers, kind, optimizer, is_slow=True, **given)


SHARDED = [
    of(2, "table_wise", "rowwise_adagrad"),
    of(3, "table_wise", "adam"),
    # The last trainer has no rows of the last of these tables, nor of one narrower than the next.
    of(3, "row_wise", "rowwise_adagrad", table_rows=[50, 17, 4]),
    of(3, "row_wise", "adagrad", dims=OWN_WIDTHS),
    of(2, "column_wise", "adam"),
    of(2, "column_wise", "adagrad", dim=12, weight_decay=0.01),
    of(2, "table_wise", "rowwise_adam", dim=3, **DISTINCT),
    of(3, "table_wise", "rowwise_adagrad", dims=OWN_WIDTHS),
    of(3, "table_wise", "adam", dims=ODD_WIDTHS, **DISTINCT),
    slow(2, "table_wise", "sgd"),
    slow(3, "table_wise", "adagrad"),
    slow(2, "table_wise", "rowwise_adam"),
    slow(3, "table_wise", "rowwise_adagrad"),
    slow(2, "row_wise", "adagrad"),
    slow(3, "row_wise", "adam"),
    slow(3, "column_wise", "adagrad"),
    slow(2, "auto", "sgd"),
    slow(3, "auto", "rowwise_adagrad"),
    slow(2, "auto", "rowwise_adam"),
    slow(2, "table_wise", "sgd", dim=10),
    slow(2, "row_wise", "rowwise_adagrad", dim=10),
    slow(2, "auto", "adam", dim=6, weight_decay=0.01),
    slow(3, "table_wise", "sgd", dims=OWN_WIDTHS, **DISTINCT),
    slow(3, "row_wise", "adam", dims=ODD_WIDTHS),
    slow(3, "column_wise", "adagrad", dims=[8, 12, 16, 8, 12, 24, 8]),
    slow(3, "auto", "adagrad", dims=OWN_WIDTHS),
]
# Errors of the forward pass and of updates. Gradients as small as 1e-6 must arrive as well.
ROUNDED = {("row_wise", "float16"): (1e-3, 1e-3), ("column_wise", "bfloat16"): (1e-2, 5e-3)}
ROUNDED |= {("table_wise", "float16"): (1e-3, 1e-3), ("table_wise", "bfloat16"): (1e-2, 5e-3)}
ROUNDED_WORLDS = {
    f"rounded {kind} {precision} {scale}": World(
        2,
        "equals_one_table",
        {"kind": kind, "precision": precision, "scale": scale},
        kind == "table_wise" or scale == 1e-3,
    )
    for kind, precision in ROUNDED
    for scale in (1e-3, 1e-6)
}
SMALL = {"kind": "table_wise", "precision": "float16", "scale": 1e-6}
ROUNDED_WORLDS["rounded distinct"] = World(2, "equals_one_table", SMALL | DISTINCT)
ROWS_T = {"row_wise": [4, 4, 4]}
COUNTED = {
    f"counts {kind} {precision}": World(
        3,
        "counts",
        {"kind": kind, "precision": precision, "rows_T": ROWS_T.get(kind, [5, 2, 4])},
        precision != "float16",
    )
    for kind in KINDS
    for precision in ("float16", "float32", "bfloat16")
}
UNEVEN = {
    f"uneven {kind} {trainers}": World(
        trainers, "looks_up_uneven_batches", {"kind": kind}, trainers == 2
    )
    for kind in KINDS
    for trainers in (2, 3)
}
BAD_ID = {"bad id": World(2, "refuses_a_bad_id", {"kind": "table_wise"})}
EQUAL = {f"{number}": world for number, world in enumerate(SHARDED)}
WORLDS = EQUAL | ROUNDED_WORLDS | COUNTED | UNEVEN | BAD_ID


@pytest.mark.parametrize("name", rows(EQUAL))
def test_any_sharding_equals_one_table(name: str, told: Told) -> None:
    """By tables bit for bit: nothing is added in another order."""
    world, found = WORLDS[name], told(name)
    kind, given = world.given["kind"], world.given
    is_exact = kind == "table_wise" and "deduplicate" not in given
    num_tables = len(given.get("table_rows", [0] * NUM_TABLES))
    near = 1e-6 if given.keys() <= {"kind", "optimizer"} else 2e-6
    for one in found:
        assert one["forward"] <= (0.0 if is_exact else 1e-6)
        assert one["shards"] == found[0]["shards"]
    assert len(found[-1]["values"]) == num_tables * HELD.get(given["optimizer"], 2)
    for difference, moved in found[-1]["values"].values():
        assert difference <= (0.0 if is_exact else near * max(1.0, moved))
        assert moved >= 1e-3
    shards = found[0]["shards"].values()
    if kind == "table_wise":
        tables_T = [0] * world.trainers
        for ((trainer, _, _),) in shards:
            tables_T[trainer] += 1
        assert "dims" in given or max(tables_T) - min(tables_T) <= 1
    elif kind != "auto":
        assert all(len(one) > 1 for one in shards)


@pytest.mark.parametrize("name", rows(ROUNDED_WORLDS))
def test_half_precision_costs_little(name: str, told: Told) -> None:
    given, found = WORLDS[name].given, told(name)
    forward, update = ROUNDED[given["kind"], given["precision"]]
    assert 0 < max(one["forward"] for one in found) <= forward
    for difference, moved in found[-1]["values"].values():
        assert 0 < difference <= update * moved


@pytest.mark.parametrize("name", rows(COUNTED))
def test_every_byte_that_leaves_a_trainer_is_counted_once(name: str, told: Told) -> None:
    kind, precision, rows_T = WORLDS[name].given.values()
    size = 4 if precision == "float32" else 2
    for one in told(name):
        me, own = one["trainer"], rows_T[one["trainer"]]
        others = [t for t in range(3) if t != me]
        if kind == "row_wise":
            ids = own * NUM_TABLES * 2
            forward = backward = own * NUM_TABLES * DIM * 2
        else:
            ids = own * sum(one["lookups_T"][t] for t in others)
            forward = one["columns_T"][me] * sum(rows_T[t] for t in others)
            backward = own * sum(one["columns_T"][t] for t in others)
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


@pytest.mark.parametrize("name", rows(UNEVEN))
def test_batches_may_differ_and_be_empty(name: str, told: Told) -> None:
    assert [one["batches"] for one in told(name)] == [5] * WORLDS[name].trainers


def test_an_id_outside_its_table_is_an_error(told: Told) -> None:
    for trainer in (0, 1):
        messages = [one["message"] for one in told("bad id") if one["trainer"] == trainer]
        assert messages == [
            f"id {bad_id} is out of bounds: embedding.4 has num_rows = 17"
            for bad_id in (-1, 17, 2**32)
        ]


@pytest.mark.parametrize("before", ["lookup", "backward"])
@pytest.mark.parametrize("deduplicate", [False, True])
def test_a_lost_trainer_is_named(tmp_path: Path, before: str, deduplicate: bool) -> None:
    given = {"kind": "table_wise", "before": before, "deduplicate": deduplicate}
    told = run(tmp_path, "loses_a_trainer", 2, silent=1, **given)
    assert told == [{"trainer": 0, "lost": 4}]  # its rank in the run


@pytest.mark.parametrize(
    ("optimizer", "before", "after", "exact"),
    [
        ("adagrad", ("row_wise", 2), ("table_wise", 3), True),
        ("rowwise_adam", ("table_wise", 2), ("row_wise", 3), False),
        *(
            pytest.param(*row, marks=pytest.mark.slow)
            for row in (
                ("sgd", ("column_wise", 2), ("table_wise", 3), True),
                ("adagrad", ("table_wise", 3), ("column_wise", 2), False),
                ("rowwise_adagrad", ("table_wise", 2), ("row_wise", 3), False),
                ("adam", ("row_wise", 3), ("table_wise", 2), True),
                ("adam", ("table_wise", 2), ("column_wise", 2), False),
            )
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
