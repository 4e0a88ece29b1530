"""Batches of programs: what they may be made of, and what is said of those that are wrong."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torchrec import KeyedJaggedTensor

from dlrm_hybrid.bags import Bags, lengths_of
from dlrm_hybrid.model.spec import ModelSpec
from dlrm_hybrid.types import DataError
from dlrm_hybrid.world.batches import KEYS, Columns, batch_of, tensors_of_batch

SPEC = ModelSpec(embedding_dim=2, bottom=(3, 2), top=(1,), table_rows=(5, 7))
COLUMNS = Columns(SPEC, batch_size=4)
DENSE, IDS = np.zeros((4, 3), np.float64), np.array([[0, 6], [4, 0], [1, 1], [2, 5]], np.int32)
LABEL = [0, 1, 1, 0]


def test_tensors_of_batch_any_library_become_the_same_batch() -> None:
    expected = COLUMNS.batch((DENSE, IDS, LABEL), "batch")
    assert expected.dense_BI.dtype == np.float32
    assert expected.bags.values.tolist() == IDS.T.tolist()
    tensors = [torch.tensor(one) for one in (DENSE, IDS, LABEL)]
    mapping = {"label": tensors[2][:, None].bool(), "ids": IDS.tolist(), "dense": DENSE.tolist()}
    for given_batch in (tensors, mapping, expected):
        found = COLUMNS.batch(given_batch, "batch")
        for one, other in zip(
            tensors_of_batch(found).items(), tensors_of_batch(expected).items(), strict=True
        ):
            assert one[0] == other[0]
            assert one[1].numpy().tobytes() == other[1].numpy().tobytes()


def test_a_mapping_may_have_weights() -> None:
    given = dict(zip(KEYS, (DENSE, IDS, LABEL), strict=True))
    found = COLUMNS.of_trainers({**given, "weight": [0, 1, 2.5, 3]}, 1, 0)[0]
    again = batch_of(tensors_of_batch(found), len(IDS.T))
    for batch in (found, again, COLUMNS.batch(found, "batch")):
        assert batch.weight_B is not None
        assert batch.weight_B.tolist() == [0, 1, 2.5, 3]
    assert COLUMNS.batch({**given, "weight": None}, "batch").weight_B is None
    for weight, message in (
        ([0, 1, -2, 3], "weight of row 2 is -2, must be finite and at least 0"),
        ([0, 1, 2, np.nan], "weight of row 3 is nan"),
        ([0, 1], r"weight has shape \(2,\), must be \(4,\)"),
        ("much", "weight is of .*, must be numbers"),
    ):
        with pytest.raises(DataError, match=f"step 7, trainer 0: {message}"):
            COLUMNS.of_trainers([{**given, "weight": weight}], 1, 7)


def test_a_batch_is_a_copy() -> None:
    dense = np.zeros((4, 3), np.float32)
    batch = COLUMNS.batch((dense, IDS, LABEL), "batch")
    dense[:] = 1  # as a loader does that uses its memory again
    assert not batch.dense_BI.any()


LISTS = (DENSE.tolist(), IDS.tolist(), LABEL)
ONES: list[Any] = [
    *((DENSE, IDS, label) for label in (LABEL, tuple(LABEL), [[one] for one in LABEL])),
    (DENSE, IDS, [torch.tensor(one) for one in LABEL]),
    (DENSE, IDS, list(np.array(LABEL, np.float32))),
    LISTS,
]


@pytest.mark.parametrize("one", ONES, ids=range(len(ONES)))
def test_lists_of_python_are_batches_too(one: Any) -> None:
    found = COLUMNS.of_trainers(one, 1, 0)
    assert [batch.label_B.tolist() for batch in found] == [LABEL]
    for batches in ([one] * 3, (one, one, one), [one, one, dict(zip(KEYS, one, strict=True))]):
        found = COLUMNS.of_trainers(batches, 3, 0)
        assert [batch.label_B.tolist() for batch in found] == [LABEL] * 3
        assert all(batch.dense_BI.shape == (4, 3) for batch in found)


@pytest.mark.parametrize("wrong", [5, 0.5, True, np.float32(1), "abc", object()])
def test_what_is_no_batch_is_refused(wrong: Any) -> None:
    with pytest.raises(DataError, match=f"step 7.*{type(wrong).__name__}; a batch is"):
        COLUMNS.of_trainers(wrong, 3, 7)


class Keyed:
    """As TorchRec's KeyedJaggedTensor."""

    def __init__(self, keys: list[str], values: list[int], lengths: list[int]) -> None:
        self._keys, self._values, self._lengths = keys, values, lengths

    def keys(self) -> list[str]:
        return self._keys

    def values(self) -> torch.Tensor:
        return torch.tensor(self._values, dtype=torch.int64)

    def lengths(self) -> torch.Tensor:
        return torch.tensor(self._lengths)


def test_bags_of_any_size_come_from_keyed_jagged_tensors() -> None:
    ids = Keyed(["a", "b"], [0, 4, 3, 6, 6], [2, 0, 1, 0, 0, 1, 0, 1])
    batch = COLUMNS.batch((DENSE, ids, LABEL), "batch")
    assert lengths_of(batch.bags).tolist() == [[2, 0, 1, 0], [0, 1, 0, 1]]
    with pytest.raises(DataError, match="id 6 of row 2 in embedding.1, which has 5 rows"):
        wrong = Keyed(["a", "b"], [0, 4, 6, 6, 6], [2, 0, 1, 0, 0, 1, 0, 1])
        COLUMNS.batch((DENSE, wrong, LABEL), "batch")
    with pytest.raises(DataError, match="4 ids"):
        COLUMNS.batch((DENSE, Keyed(["a", "b"], [0, 0, 0, 0], [1] * 8), LABEL), "batch")
    with pytest.raises(DataError, match="4 rows × 1 tables, must be 4 × 2"):
        COLUMNS.batch((DENSE, Keyed(["a"], [0, 0, 0, 0], [1] * 4), LABEL), "batch")
    with pytest.raises(DataError, match="offsets"):
        wrong_bags = Bags(np.arange(3), np.array([0, 2, 1, 1, 1, 1, 1, 1, 3]), 2)
        COLUMNS.batch((DENSE, wrong_bags, LABEL), "batch")
    with pytest.raises(DataError, match="averaged = 2, must be a table from 0 to 1"):
        COLUMNS.batch((DENSE, replace(batch.bags, averaged=(0, 2)), LABEL), "batch")


def test_keyed_jagged_tensors_have_the_tables_keys_and_perhaps_weights() -> None:
    one, two = SPEC.table_names
    with pytest.raises(DataError, match=f"keys {two}, {one}, must .*: {one}, {two}"):
        COLUMNS.batch((DENSE, Keyed([two, one], [0] * 8, [1] * 8), LABEL), "batch")
    COLUMNS.batch((DENSE, Keyed([one, two], [0] * 8, [1] * 8), LABEL), "batch")
    weights, lengths = torch.full((8,), 0.5), torch.ones(8, dtype=torch.int32)
    values = torch.zeros(8, dtype=torch.int64)
    weighted = KeyedJaggedTensor([one, two], values, weights=weights, lengths=lengths)
    batch = COLUMNS.batch((DENSE, weighted, LABEL), "batch")
    assert batch.bags.weights.tolist() == [0.5] * 8
    whole = COLUMNS.batch((DENSE, batch.bags, LABEL), "batch")
    assert whole.bags.weights.tolist() == [0.5] * 8
    weights[3] = torch.nan
    with pytest.raises(DataError, match="batch: weight 3 of the ids is nan"):
        COLUMNS.batch((DENSE, weighted, LABEL), "batch")
    with pytest.raises(DataError, match=r"batch: ids: weights \(7,\) of bags of 8 ids"):
        short = replace(batch.bags, weights=batch.bags.weights[:7])
        COLUMNS.batch((DENSE, short, LABEL), "batch")
    with pytest.raises(DataError, match="batch: ids: "):
        COLUMNS.batch((DENSE, Keyed(["a", "b"], [0] * 7, [1] * 7), LABEL), "batch")


@given(lengths=st.lists(st.integers(0, 3), min_size=8, max_size=8), seed=st.integers(0, 2**32 - 1))
def test_a_batch_arrives_as_it_was_sent(lengths: list[int], seed: int) -> None:
    draw = np.random.default_rng(seed)
    values = [*draw.integers(0, 5, sum(lengths[:4])), *draw.integers(0, 7, sum(lengths[4:]))]
    sent = COLUMNS.batch((DENSE, Keyed(["a", "b"], values, lengths), LABEL), "batch")
    weights = draw.random(len(values), np.float32)
    sent = replace(sent, bags=replace(sent.bags, averaged=(1,), weights=weights))
    found = batch_of(tensors_of_batch(sent), 2)
    assert found.bags.averaged == (1,)
    assert found.bags.weights.tolist() == weights.tolist()
    assert found.bags.values.tolist() == sent.bags.values.tolist()
    assert lengths_of(found.bags).tolist() == lengths_of(sent.bags).tolist()
    assert found.label_B.tolist() == LABEL


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"dense": DENSE[:, :2]}, r"dense has shape \(4, 2\), must be \(4, 3\)"),
        ({"ids": IDS[:, :1]}, "4 rows × 1 tables, must be 4 × 2"),
        ({"ids": IDS.astype(np.float32)}, "ids is of float32, must be integers"),
        ({"label": [0, 1, 2, 0]}, "label of row 2"),
        ({"dense": np.full_like(DENSE, np.nan)}, "dense column 0 of row 0 is nan"),
        ({"label": None}, "label is of object, must be numbers"),
    ],
)
def test_what_no_columns_are_is_refused(changes: dict[str, Any], message: str) -> None:
    given = {**dict(zip(KEYS, (DENSE, IDS, LABEL), strict=True)), **changes}
    with pytest.raises(DataError, match=message):
        COLUMNS.batch(given, "batch")


@given(row=st.integers(0, 3), table=st.integers(0, 1), beyond=st.integers(0, 2**40))
def test_an_id_without_a_row_is_named(row: int, table: int, beyond: int) -> None:
    ids = IDS.astype(np.int64)
    for wrong in (SPEC.table_rows[table] + beyond, -1 - beyond):
        ids[row, table] = wrong
        text = f"id {wrong} of row {row} in embedding.{table + 1}"
        with pytest.raises(DataError, match=text):
            COLUMNS.batch((DENSE, ids, LABEL), "batch")
