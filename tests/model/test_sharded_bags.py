"""Shared tables take bags of any size, however they are divided among trainers."""

from pathlib import Path

import numpy as np
import pytest
from bag_draws import drawn_bags
from embedding_ranks import SPEC
from embedding_runs import run

from dlrm_hybrid.bags import lengths_of

MODULE = "bag_ranks"
NUM_TABLES, DIM = len(SPEC.table_rows), SPEC.embedding_dim
TABLE, ROW, COLUMN = ({"kind": kind} for kind in ("table_wise", "row_wise", "column_wise"))
DISTINCT = {**TABLE, "deduplicate": True}
WORLDS = [
    (3, "adagrad", ROW),
    (2, "sgd", COLUMN),
    (2, "adagrad", DISTINCT),
    pytest.param(2, "sgd", TABLE, marks=pytest.mark.slow),
    pytest.param(2, "adam", ROW, marks=pytest.mark.slow),
    pytest.param(3, "adagrad", TABLE, marks=pytest.mark.slow),
    pytest.param(2, "sgd", ROW, marks=pytest.mark.slow),
    pytest.param(3, "adagrad", COLUMN, marks=pytest.mark.slow),
    pytest.param(3, "sgd", DISTINCT, marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("trainers", "optimizer", "given"), WORLDS)
def test_bags_of_one_id_learn_the_bits_of_ids(
    tmp_path: Path, trainers: int, optimizer: str, given: dict
) -> None:
    given = {**given, "optimizer": optimizer}
    told = run(tmp_path, "learns_the_bits_of_ids", trainers, module=MODULE, **given)
    assert [(one["same"], one["moved"]) for one in told] == [(True, True)] * trainers


WEIGHTED = {"weighted": True}
SLOW = pytest.mark.slow


@pytest.mark.parametrize(
    ("trainers", "optimizer", "given"),
    [
        *WORLDS,
        (2, "sgd", {**TABLE, **WEIGHTED}),
        (3, "adam", {**ROW, **WEIGHTED}),
        pytest.param(2, "adagrad", {**COLUMN, **WEIGHTED}, marks=SLOW),
        pytest.param(3, "sgd", {**DISTINCT, **WEIGHTED}, marks=SLOW),
    ],
)
def test_trainers_learn_from_bags_what_torch_learns(
    tmp_path: Path, trainers: int, optimizer: str, given: dict
) -> None:
    given = {**given, "optimizer": optimizer}
    told = run(tmp_path, "learns_what_torch_learns", trainers, module=MODULE, **given)
    assert 0 < len(told[0]["apart"]) == NUM_TABLES
    assert told[0]["forward"] <= 1e-6
    *others, last = told[0]["moved"]
    for name, apart in told[0]["apart"].items():
        assert apart <= 1e-6, name
    assert all(told[0]["moved"][name] >= 1e-2 for name in others)
    assert told[0]["moved"][last] == 0  # its bags are empty


@pytest.mark.parametrize("given", [TABLE, {**TABLE, "weighted": True}, DISTINCT])
def test_bytes_of_bags_are_counted(tmp_path: Path, given: dict) -> None:
    rows_T = [50, 20, 0]
    told = run(tmp_path, "counts", 3, module=MODULE, rows_T=rows_T, **given)
    lengths_T = [
        lengths_of(drawn_bags([7, trainer], SPEC.table_rows, rows))
        for trainer, rows in enumerate(rows_T)
    ]
    for one in told:
        me = one["trainer"]
        held_F = np.array([holder for (holder,) in one["holders"]]) == me
        ids, bags = lengths_T[me][~held_F].sum(), lengths_T[me][~held_F].size
        others = sum(rows_T) - rows_T[me]
        # Lengths and ids with their weights, and pooled rows of what others look up here.
        numbers = bags + ids * (1 + ("weighted" in given))
        forward = 4 * numbers + 4 * DIM * others * held_F.sum()
        assert one["forward"][1] == forward
        assert one["backward"][1] == 4 * DIM * bags
        if "deduplicate" not in given:
            assert one["forward"][0] == forward
            assert one["backward"][0] == 4 * DIM * bags
        else:
            assert 0 <= one["backward"][0] <= 4 * DIM * ids


def test_lengths_that_are_none_are_named(tmp_path: Path) -> None:
    told = run(tmp_path, "hears_no_lengths", 2, module=MODULE, **TABLE)
    assert [one["message"] for one in told] == ["trainer 1 sent bags of fewer ids than none"] * 2
