"""Weights of the ids in lists: from files to batches, faults with their place, one meaning."""

from __future__ import annotations

import csv
import json
import math
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from table_rows import run_prepare, semantics

from dlrm_hybrid.data.loader import START, Batch, Loader, sequential_batches
from dlrm_hybrid.data.schema import Schema
from dlrm_hybrid.data.schemas import reading
from dlrm_hybrid.data.shards import Shards, open_shards, verify
from dlrm_hybrid.data.sources.files import Block
from dlrm_hybrid.data.sources.values import read_values
from dlrm_hybrid.saved.inputs import ModelInputs
from dlrm_hybrid.types import DataError

ROWS, MOST = 300, 3
SCHEMA = """
label: y
dense: [{name: number}]
categorical:
  - {name: shop, kind: integer}
  - {name: tags, kind: integer, max_length: 3, truncate: last, separator: "|", weights: much}
split: {by: fraction, validation: 0.2, test: 0.2, seed: 3}
"""
Lists = tuple[list[Any], list[Any]]


def schema(separator: str = "|") -> Schema:
    return reading.loads(SCHEMA.replace('"|"', f'"{separator}"'), "mine.yaml")


def drawn() -> list[Lists]:
    """Of each row its tags, some of them missing, and their weights."""
    draw = np.random.default_rng(0)
    found: list[Lists] = []
    for _ in range(ROWS):
        tags = draw.integers(0, 200, draw.integers(0, 6)).tolist()
        much = draw.normal(size=len(tags)).astype(np.float32).tolist()
        # The text of a list of one missing value is that of an empty list.
        found.append(([None if one % 9 == 0 and len(tags) > 1 else one for one in tags], much))
    return found


def columns(lists: list[Lists]) -> dict[str, Any]:
    draw = np.random.default_rng(1)
    return {
        "y": draw.integers(0, 2, len(lists)).tolist(),
        "number": list(range(len(lists))),
        "shop": draw.integers(0, 9, len(lists)).tolist(),
        "tags": [tags for tags, _ in lists],
        "much": [much for _, much in lists],
    }


def write_parquet(path: Path, lists: list[Lists]) -> None:
    pq.write_table(pa.table(columns(lists)), path)


def bars(values: list[Any]) -> str:
    return "|".join("" if one is None else str(one) for one in values)


def write_csv(path: Path, lists: list[Lists], write: Any = bars) -> None:
    table = columns(lists)
    table |= {name: [write(one) for one in table[name]] for name in ("tags", "much")}
    with path.open("w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows([list(table), *zip(*table.values(), strict=True)])


def prepared(folder: Path, lists: list[Lists], **options: Any) -> Shards:
    write_parquet(folder / "rows.parquet", lists)
    run_prepare([folder / "rows.parquet"], folder / "out", schema(), **options)
    return open_shards(folder / "out", semantics(schema(), options.get("on_bad_row", "error")))


def kept(row: Lists) -> list[tuple[Any, Any]]:
    pairs = list(zip(*row, strict=True))[-MOST:]
    return [(tag, much) for tag, much in pairs if tag is not None]


def assert_weights(batch: Batch, shards: Shards, lists: list[Lists]) -> int:
    """Each id has the weight of its place, known or not; how many are not."""
    (_, vocabulary), unknown = shards.preprocessing.vocabularies(), 0
    bags = batch.bags
    assert bags.offsets is not None and bags.weights.dtype == np.float32
    assert (bags.weights[: bags.rows] == 1).all()  # of the shops
    for place, number in enumerate(batch.dense_BI[:, 0].astype(int).tolist(), bags.rows):
        own = slice(bags.offsets[place], bags.offsets[place + 1])
        wanted = kept(lists[number])
        assert bags.weights[own].tolist() == [much for _, much in wanted]
        for found, (tag, _) in zip(bags.values[own].tolist(), wanted, strict=True):
            assert found == 0 or vocabulary.keys[found - 1] == tag
            unknown += found == 0
    return unknown


def test_each_id_keeps_its_weight_in_batches_of_any_order(tmp_path: Path) -> None:
    lists = drawn()
    shards, unknown = prepared(tmp_path, lists), 0
    verify(shards, lambda done: None)
    loader = Loader(
        shards, batch_size=7, seed=5, shuffle=True, shuffle_block_rows=50, shuffle_read_rows=10
    )
    for batch in sequential_batches(shards, range(ROWS), 41):
        unknown += assert_weights(batch, shards, lists)
    state = START
    for _ in range(2 * loader.steps_per_epoch):
        batch, state = loader.read(state)
        assert_weights(batch, shards, lists)
        assert_weights(batch.part(slice(1, 3)), shards, lists)
    assert unknown > 9


def test_all_sources_have_the_same_weights_and_arrays_without_are_as_they_were(
    tmp_path: Path,
) -> None:
    lists = drawn()
    shards = prepared(tmp_path, lists)
    write_csv(tmp_path / "bars.csv", lists)
    write_csv(tmp_path / "json.csv", lists, json.dumps)
    run_prepare([tmp_path / "bars.csv"], tmp_path / "bars", schema())
    run_prepare([tmp_path / "json.csv"], tmp_path / "json", schema("json"))
    bare = reading.loads(SCHEMA.replace(", weights: much", "") + "ignore: [much]", "mine.yaml")
    plain = run_prepare([tmp_path / "rows.parquet"], tmp_path / "plain", bare)
    assert run_prepare([tmp_path / "rows.parquet"], tmp_path / "out", schema()) == shards.manifest
    own = {one.file for one in shards.manifest.arrays} - {one.file for one in plain.arrays}
    assert own == {"ids.2.weights.npy"} and not (tmp_path / "plain" / "ids.2.weights.npy").exists()
    for file in [one.file for one in shards.manifest.arrays]:
        wanted = (tmp_path / "out" / file).read_bytes()
        for folder in ("bars", "json", *["plain"] * (file not in own)):
            assert (tmp_path / folder / file).read_bytes() == wanted, (folder, file)
    assert np.load(tmp_path / "out" / "ids.2.weights.npy").dtype == np.float32
    assert bare.beside_repr == [] and schema().beside_repr == [None, None, None, "1: much"]
    assert schema().other_meaning(bare) and plain.meaning != shards.manifest.meaning
    assert repr(bare) == repr(schema()).replace("ignore=()", "ignore=('much',)")


BAD = [
    ([1, 2], [0.5], r"1 weights for 2 values of 'tags'"),
    ([1], [0.5, 2.0], r"2 weights for 1 values of 'tags'"),
    ([], [0.5], r"1 weights for 0 values of 'tags'"),
    ([1, 2], [0.5, math.inf], r"inf is no finite weight"),
    ([1, 2], [1e39, 1.0], r"1e\+39 is no finite weight"),
    ([1, 2, 3, 4], [1.0, 1.0, None, 1.0], r"a weight is empty"),
]


@pytest.mark.parametrize(("tags", "much", "reason"), BAD)
def test_a_bad_weight_is_a_bad_row(tags: Any, much: Any, reason: str, tmp_path: Path) -> None:
    lists = drawn()
    lists[6] = tags, much
    with pytest.raises(DataError, match=rf"rows.parquet: row 7: column 'much': {reason}"):
        prepared(tmp_path, lists)
    shards = prepared(tmp_path, lists, on_bad_row="skip")
    assert (shards.manifest.rows, shards.manifest.bad_rows) == (ROWS - 1, 1)
    for batch in sequential_batches(shards, range(ROWS - 1), 50):
        assert_weights(batch, shards, lists)


def test_text_that_is_no_weight_is_named_with_its_row(tmp_path: Path) -> None:
    lists = drawn()
    lists[4] = [1, 2], [0.5, "much"]
    write_csv(tmp_path / "rows.csv", lists)
    with pytest.raises(DataError, match=r"rows.csv: row 5: column 'much': 'much' is not a number"):
        run_prepare([tmp_path / "rows.csv"], tmp_path / "out", schema())


def test_damaged_weights_are_named(tmp_path: Path) -> None:
    lists = drawn()
    shards = prepared(tmp_path, lists)
    manifest = json.loads((tmp_path / "out" / "manifest.json").read_text())
    (stored,) = [one for one in manifest["arrays"] if one["file"] == "ids.2.weights.npy"]
    stored["shape"][0] += 1
    (tmp_path / "out" / "manifest.json").write_text(json.dumps(manifest))
    count = shards.manifest.array("ids.2.values.npy").rows
    with pytest.raises(DataError, match=f"{count + 1} weights for {count} ids in ids.2.weights"):
        open_shards(tmp_path / "out", None)
    assert shards.rows.lists[0].weights_N is not None
    weights_N = shards.rows.lists[0].weights_N.copy()
    weights_N[-1] = np.nan
    lists_of = (shards.rows.lists[0]._replace(weights_N=weights_N),)
    damaged = Shards(shards.folder, shards.manifest, shards.rows._replace(lists=lists_of))
    with pytest.raises(DataError, match=r"ids.2.values.npy: row .* or a weight that is not finite"):
        list(sequential_batches(damaged, range(ROWS), 41))


ABOUT: dict[str, Any] = {
    "data": {"max_ind_range": None, "schema": asdict(schema())},
    "inputs": {
        "dense": {"columns": [{"name": "number"}]},
        "ids": {"columns": [{"name": "shop", "first_id": 0, "vocabulary": "1.npy"}]},
        "ids_2": {"columns": [{"name": "tags", "first_id": 0, "vocabulary": "2.npy"}]},
        "weights_2": {"columns": [{"name": "much"}]},
    },
}


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> ModelInputs:
    folder = tmp_path_factory.mktemp("exported")
    (folder / "model.json").write_text(json.dumps(ABOUT))
    np.save(folder / "1.npy", np.arange(3))
    np.save(folder / "2.npy", np.arange(9))
    return ModelInputs(folder)


def outcome_of_columns(tags: Any, much: Any) -> Any:
    arrays = [pa.array([0]), pa.array([0.0]), pa.array([1]), tags, much]
    batch = pa.record_batch(arrays, ["y", "number", "shop", "tags", "much"])
    values, bad = read_values(Block(batch, np.ones(1, np.int64), ()), schema(), "a", labels=True)
    if bad:
        return "refused", bad[0].column, bad[0].reason
    coded = values.categories[1]
    assert coded.weight_M is not None
    return [coded.keys[one] for one in coded.index_M.tolist()], coded.weight_M.tolist()


def outcome_of_json(inputs: ModelInputs, tags: Any, much: Any) -> Any:
    try:
        found = inputs([{"number": 0, "shop": 1, "tags": tags, "much": much}])
    except DataError as error:
        _, column, reason = str(error).removeprefix("row 1: ").split(" ", 2)
        return "refused", column.strip("':"), reason
    is_id = found["ids_2"] >= 0
    assert not found["weights_2"][~is_id].any()
    return found["ids_2"][is_id].tolist(), found["weights_2"][is_id].tolist()


weights = st.none() | st.sampled_from([0.5, -2.0, 0.0, math.inf, 1e39, 3e38])


@given(
    tags=st.lists(st.none() | st.integers(0, 8), max_size=5),
    much=st.lists(weights, min_size=6, max_size=6),
    more=st.sampled_from([0, 0, 0, 1, -1]),
)
@example(tags=[], much=[0.5] * 6, more=1)
@example(tags=[None], much=[0.5] * 6, more=0)
def test_a_list_with_weights_means_the_same_in_all_formats(
    inputs: ModelInputs, tags: list[Any], much: list[Any], more: int
) -> None:
    much = much[: max(len(tags) + more, 0)]
    of_lists = outcome_of_columns(
        pa.array([tags], pa.list_(pa.int64())), pa.array([much], pa.list_(pa.float64()))
    )
    found = [of_lists, outcome_of_json(inputs, tags, much)]
    if len(tags) == len(much):
        pairs = kept((tags, much))
        is_fine = all(one is not None and abs(one) < 3.4e38 for _, one in pairs)
        assert (of_lists[0] != "refused") is is_fine
        if is_fine:
            floats = np.array([one for _, one in pairs], np.float32).tolist()
            assert of_lists == ([tag for tag, _ in pairs], floats)
    else:
        assert of_lists[0] == "refused"
    if [None] not in (tags, much):  # whose text is that of an empty list
        texts = bars(tags), bars(much)
        binary = [pa.array([one], pa.binary()) for one in texts]
        found += [outcome_of_columns(*binary), outcome_of_json(inputs, *texts)]
    same = [one[:2] if one[0] == "refused" else one for one in found]
    assert all(one == same[0] for one in same), found
