"""Shared tables take bags of any size, however they are divided among trainers."""

from collections.abc import Callable

import numpy as np
import pytest
from bag_draws import drawn_bags
from embedding_ranks import SPEC
from embedding_runs import World, rows

from dlrm_hybrid.bags import lengths_of

NUM_TABLES, DIM = len(SPEC.table_rows), SPEC.embedding_dim
ROWS_T = [50, 20, 0]
TABLE, ROW, COLUMN = ({"kind": kind} for kind in ("table_wise", "row_wise", "column_wise"))
DISTINCT, WEIGHTED = {**TABLE, "deduplicate": True}, {"weighted": True}
SHARDED = [
    (3, "adagrad", ROW, False),
    (2, "sgd", COLUMN, False),
    (2, "adagrad", DISTINCT, False),
    (2, "sgd", TABLE, True),
    (2, "adam", ROW, True),
    (3, "adagrad", TABLE, True),
    (2, "sgd", ROW, True),
    (3, "adagrad", COLUMN, True),
    (3, "sgd", DISTINCT, True),
]
WEIGHTS = [
    (2, "sgd", {**TABLE, **WEIGHTED}, False),
    (3, "adam", {**ROW, **WEIGHTED}, False),
    (2, "adagrad", {**COLUMN, **WEIGHTED}, True),
    (3, "sgd", {**DISTINCT, **WEIGHTED}, True),
]


def worlds(entry: str, sharded: list[tuple[int, str, dict, bool]]) -> dict[str, World]:
    return {
        f"{entry} {number}": World(
            trainers, f"bag_ranks:{entry}", {**given, "optimizer": optimizer}, is_slow
        )
        for number, (trainers, optimizer, given, is_slow) in enumerate(sharded)
    }


OF_IDS = worlds("learns_the_bits_of_ids", SHARDED)
OF_TORCH = worlds("learns_what_torch_learns", SHARDED + WEIGHTS)
COUNTED = {
    f"counts {number}": World(3, "bag_ranks:counts", {"rows_T": ROWS_T, **given})
    for number, given in enumerate((TABLE, {**TABLE, **WEIGHTED}, DISTINCT))
}
NO_LENGTHS = {"no lengths": World(2, "bag_ranks:hears_no_lengths", TABLE)}
WORLDS = OF_IDS | OF_TORCH | COUNTED | NO_LENGTHS
Told = Callable[[str], list[dict]]


@pytest.mark.parametrize("name", rows(OF_IDS))
def test_bags_of_one_id_learn_the_bits_of_ids(name: str, told: Told) -> None:
    found = [(one["same"], one["moved"]) for one in told(name)]
    assert found == [(True, True)] * WORLDS[name].trainers


@pytest.mark.parametrize("name", rows(OF_TORCH))
def test_trainers_learn_from_bags_what_torch_learns(name: str, told: Told) -> None:
    first = told(name)[0]
    assert 0 < len(first["apart"]) == NUM_TABLES
    assert first["forward"] <= 1e-6
    *others, last = first["moved"]
    for table, apart in first["apart"].items():
        assert apart <= 1e-6, table
    assert all(first["moved"][table] >= 1e-2 for table in others)
    assert first["moved"][last] == 0  # its bags are empty


@pytest.mark.parametrize("name", COUNTED)
def test_bytes_of_bags_are_counted(name: str, told: Told) -> None:
    given, rows_T = WORLDS[name].given, ROWS_T
    lengths_T = [
        lengths_of(drawn_bags([7, trainer], SPEC.table_rows, rows))
        for trainer, rows in enumerate(rows_T)
    ]
    for one in told(name):
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


def test_lengths_that_are_none_are_named(told: Told) -> None:
    message = "trainer 1 sent bags of fewer ids than none"
    assert [one["message"] for one in told("no lengths")] == [message] * 2
