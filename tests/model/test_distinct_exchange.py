"""Shared tables where every distinct id of a batch is asked for once."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from embedding_ranks import SPEC, batch
from embedding_runs import World

DISTINCT = {"kind": "table_wise", "deduplicate": True}
DIM = SPEC.embedding_dim


def distinct(trainers: int, entry: str, **given: Any) -> World:
    return World(trainers, entry, {**DISTINCT, "precision": "float32", **given})


WORLDS = {
    **{
        f"counts {precision}": distinct(
            3, "distinct_ranks:counts_distinct", precision=precision, rows_T=[50, 20, 0]
        )
        for precision in ("float32", "bfloat16")
    },
    **{
        f"room {room}": distinct(2, "distinct_ranks:keeps_rows", most_bytes=most_bytes)
        for room, most_bytes in (("of all", 2**20), ("of eight rows", 1))
    },
    "uneven": distinct(3, "looks_up_uneven_batches"),
    "bad id": distinct(2, "refuses_a_bad_id"),
    "no ids": distinct(2, "distinct_ranks:hears_no_ids"),
    "holds nothing": distinct(3, "distinct_ranks:holds_nothing"),
}
Told = Callable[[str], list[dict]]


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_what_is_counted_is_what_the_group_is_given(precision: str, told: Told) -> None:
    rows_T = [50, 20, 0]
    size = 4 if precision == "float32" else 2
    ids_FB, _ = batch(0, sum(rows_T))
    parts_T = np.split(ids_FB.numpy(), np.cumsum(rows_T)[:-1], axis=1)
    distinct_TF = np.array([[np.unique(ids).size for ids in part] for part in parts_T])
    for one in told(f"counts {precision}"):
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
def test_rows_that_do_not_change_travel_once(room: str, told: Told) -> None:
    found = told(f"room {room}")
    assert len(found) == 4
    for one in found:
        assert one["same"]
        first, _, *again = one["sent"]
        assert (sum(again) < 0.1 * first) == (room == "of all")
    assert [one["moved"] for one in found].count(True) == 2  # each trainer after its step


def test_distinct_batches_may_differ_and_be_empty(told: Told) -> None:
    assert [one["batches"] for one in told("uneven")] == [5] * 3


def test_an_id_outside_its_table_is_not_sent(told: Told) -> None:
    for trainer in (0, 1):
        messages = [one["message"] for one in told("bad id") if one["trainer"] == trainer]
        assert messages == [
            f"id {bad_id} is out of bounds: embedding.4 has num_rows = 17"
            for bad_id in (-1, 17, 2**32)
        ]


def test_who_sends_no_ids_is_named(told: Told) -> None:
    message = "trainer 1 sent invalid ids for the tables held here"
    assert [one["message"] for one in told("no ids")] == [message] * 4


def test_a_trainer_may_hold_no_table(told: Told) -> None:
    found = told("holds nothing")
    assert [one["holders"] for one in found] == [2] * 3
    assert found[0]["difference"] <= 1e-6
