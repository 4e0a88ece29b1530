"""Shared tables where every distinct id of a batch is asked for once."""

from pathlib import Path

import numpy as np
import pytest
from embedding_ranks import SPEC, batch
from embedding_runs import run

DISTINCT = {"kind": "table_wise", "deduplicate": True}
MODULE = "distinct_ranks"
NUM_TABLES, DIM = len(SPEC.table_rows), SPEC.embedding_dim
QUICK = {(2, "bfloat16", "adam"), (3, "float16", "rowwise_adagrad")}
WORLDS = [
    pytest.param(*world, marks=() if world in QUICK else pytest.mark.slow)
    for world in [
        (trainers, precision, optimizer)
        for trainers in (2, 3)
        for precision in ("float32", "float16", "bfloat16")
        for optimizer in ("sgd", "adagrad", "rowwise_adagrad", "adam", "rowwise_adam")
    ]
]


@pytest.mark.parametrize(("trainers", "precision", "optimizer"), WORLDS)
def test_trainers_equal_one_set_of_tables_bit_for_bit(
    tmp_path: Path, trainers: int, precision: str, optimizer: str
) -> None:
    given = {**DISTINCT, "precision": precision, "optimizer": optimizer}
    told = run(tmp_path, "equals_one_set_of_tables", trainers, module=MODULE, **given)
    assert [one["same"] for one in told] == [True] * trainers
    values = told[0]["values"]
    held = {"sgd": 1, "adam": 4, "rowwise_adam": 4}.get(optimizer, 2)
    assert len(values) == NUM_TABLES * held
    for name, (same, moved) in values.items():
        assert same, name
        least = {"weight": 1e-3, "exp_avg_sq": 1e-8}.get(name.rpartition(".")[2], 1e-4)
        assert moved >= least, name


LEVELS = {"row_error": 0.02, "gradient_error": 0.5, "lifespan": 16}


@pytest.mark.parametrize(
    ("trainers", "optimizer", "copies_rows"),
    [
        pytest.param(2, "sgd", 1000, marks=pytest.mark.slow),
        (3, "rowwise_adagrad", 24),  # the largest table has 200 rows
    ],
)
def test_levels_of_trainers_equal_those_of_one_process_bit_for_bit(
    tmp_path: Path, trainers: int, optimizer: str, copies_rows: int
) -> None:
    given = {**DISTINCT, "optimizer": optimizer, "levels": {**LEVELS, "copies_rows": copies_rows}}
    given["precision"] = "float32"
    told = run(tmp_path, "equals_one_set_of_tables", trainers, module=MODULE, **given)
    assert [one["same"] for one in told] == [True] * trainers
    for name, (same, moved) in told[0]["values"].items():
        assert same, name
        assert moved >= (1e-3 if name.endswith(".weight") else 1e-4), name


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_what_is_counted_is_what_the_group_is_given(tmp_path: Path, precision: str) -> None:
    rows_T = [50, 20, 0]
    given = {**DISTINCT, "precision": precision, "rows_T": rows_T}
    told = run(tmp_path, "counts_distinct", 3, module=MODULE, **given)
    size = 4 if precision == "float32" else 2
    ids_FB, _ = batch(0, sum(rows_T))
    parts_T = np.split(ids_FB.numpy(), np.cumsum(rows_T)[:-1], axis=1)
    distinct_TF = np.array([[np.unique(ids).size for ids in part] for part in parts_T])
    for one in told:
        me, rows = one["trainer"], rows_T[one["trainer"]]
        held_F = np.array(one["holders"]) == me
        others_T = np.arange(3) != me
        lengths, later, forward, backward = one["sent"]
        assert one["counted"] == sum(one["sent"])
        assert lengths == 4 * 2
        ids = later - 4 * 2  # behind the most ids of a table
        # No table of fewer than 2**8 rows needs more than 8 + 3 bits for an id, or 6 for a count.
        most_bits = (11 * distinct_TF[me] + 6)[~held_F].sum()
        assert 0 <= ids <= most_bits // 8 + 2
        assert forward == size * DIM * distinct_TF[others_T][:, held_F].sum()
        assert backward == size * DIM * distinct_TF[me, ~held_F].sum()
        # Without distinct ids, in float32.
        asked, answered = rows * (~held_F).sum(), (sum(rows_T) - rows) * held_F.sum()
        assert one["dense"] == 4 * asked + 4 * DIM * (asked + answered)


@pytest.mark.parametrize("room", ["of all", "of eight rows"])
def test_rows_that_do_not_change_travel_once(tmp_path: Path, room: str) -> None:
    most_bytes = {"of all": 2**20, "of eight rows": 1}[room]
    given = {**DISTINCT, "precision": "float32", "most_bytes": most_bytes}
    told = run(tmp_path, "keeps_rows", 2, module=MODULE, **given)
    assert len(told) == 4
    for one in told:
        assert one["same"]
        first, _, *again = one["sent"]
        assert (sum(again) < 0.1 * first) == (room == "of all")
    assert [one["moved"] for one in told].count(True) == 2  # each trainer after its step


@pytest.mark.parametrize("trainers", [pytest.param(2, marks=pytest.mark.slow), 3])
def test_distinct_batches_may_differ_and_be_empty(tmp_path: Path, trainers: int) -> None:
    told = run(tmp_path, "looks_up_uneven_batches", trainers, **DISTINCT)
    assert [one["batches"] for one in told] == [5] * trainers


def test_an_id_outside_its_table_is_not_sent(tmp_path: Path) -> None:
    told = run(tmp_path, "refuses_a_bad_id", 2, **DISTINCT)
    for trainer in (0, 1):
        messages = [one["message"] for one in told if one["trainer"] == trainer]
        assert messages == [
            f"id {bad_id} is out of bounds: embedding.4 has num_rows = 17"
            for bad_id in (-1, 17, 2**32)
        ]


def test_who_sends_no_ids_is_named(tmp_path: Path) -> None:
    told = run(tmp_path, "hears_no_ids", 2, module=MODULE, **DISTINCT)
    message = "trainer 1 sent invalid ids for the tables held here"
    assert [one["message"] for one in told] == [message] * 4


@pytest.mark.parametrize("before", ["lookup", "backward"])
def test_a_lost_trainer_is_named_to_who_asks(tmp_path: Path, before: str) -> None:
    told = run(tmp_path, "loses_a_trainer", 2, silent=1, before=before, **DISTINCT)
    assert told == [{"trainer": 0, "lost": 4}]  # its rank in the run


def test_a_trainer_may_hold_no_table(tmp_path: Path) -> None:
    told = run(tmp_path, "holds_nothing", 3, module=MODULE, **DISTINCT)
    assert [one["holders"] for one in told] == [2] * 3
    assert told[0]["difference"] <= 1e-6
