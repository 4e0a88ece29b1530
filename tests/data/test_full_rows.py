"""Labels, weights, groups, lists with weights and vectors: from files to batches, and faults."""

from __future__ import annotations

import datetime
import json
import math
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.csv as pa_csv
import pytest
from full_rows import (
    LABELS,
    LISTS,
    MOST,
    ROWS,
    SCHEMA,
    assert_rows,
    bars,
    columns,
    kept_ids,
    prepared,
    schema_of,
    write_csv,
    write_parquet,
)
from hypothesis import example, given
from hypothesis import strategies as st
from shard_folder import write_array
from table_rows import run_prepare, semantics

from dlrm_hybrid.data import manifest as manifests
from dlrm_hybrid.data.loader import START, Loader, sequential_batches
from dlrm_hybrid.data.shards import Shards, open_shards, verify
from dlrm_hybrid.data.sources.files import Block
from dlrm_hybrid.data.sources.values import read_values
from dlrm_hybrid.run.readiness import label_remarks
from dlrm_hybrid.types import DataError

LOADED = {"seed": 5, "shuffle": True, "shuffle_block_rows": 50, "shuffle_read_rows": 10}
NUMBERS = [row % 40 for row in range(ROWS)]
TEXTS = [f"u{number}" for number in NUMBERS]
# Bare rows: one label of a column, and another column for what a test is about.
BARE = """
label: bought
dense: [{name: number}]
categorical: [{name: shop, kind: integer}]
ignore: [other]
split: {by: fraction, validation: 0.2, test: 0.2, seed: 3}
"""


def bare_columns(other: Any) -> dict[str, Any]:
    rows = columns()
    return {"bought": rows["clicked"], "number": rows["number"], "shop": rows["shop"]} | {
        "other": other
    }


@pytest.mark.parametrize("trainers", [1, 3])
def test_each_row_keeps_all_that_is_its_own_in_batches_of_any_order(
    trainers: int, tmp_path: Path
) -> None:
    rows, unknown, watched = columns(), 0, []
    shards = prepared(tmp_path, rows)
    verify(shards, lambda done: None)
    for size in (1, 41, ROWS):
        for batch in sequential_batches(shards, range(5, ROWS), size):
            unknown += assert_rows(batch, shards, rows)
    assert unknown > 9
    loader = Loader(shards, batch_size=7, trainers=trainers, **LOADED)
    loader.watch = watched.append
    state, seen, sums = START, [], set()
    for _ in range(2 * loader.steps_per_epoch):
        for trainer in range(trainers):
            batch = loader.part(state, trainer)
            assert_rows(batch, shards, rows)
            assert watched[-1] is batch.bags and batch.group_B is None  # training needs none
            assert_rows(batch.part(slice(1, 3)), shards, rows)
            seen += batch.dense_BI[:, 0].tolist()
            sums.add(batch.weight_B.sum())
        state = loader.after(state)
    epoch = loader.steps_per_epoch * trainers * 7
    assert len(set(seen[:epoch])) == epoch and len(sums) > 10
    clicks = shards.rows.label_R[: len(shards.train_rows), 0].sum()
    assert shards.manifest.parts.train.clicks == clicks
    assert shards.schema.loss_weights == {"clicked": 1, "liked": 0.5, "action": 2, "stars": 1}


def test_all_formats_have_the_same_rows_and_arrays_without_are_as_they_were(tmp_path: Path) -> None:
    rows = columns()
    files = {one.file for one in prepared(tmp_path, rows).manifest.arrays}
    as_json = schema_of(SCHEMA.replace('"|"', "json"))
    run_prepare([write_csv(tmp_path / "bars.csv", rows)], tmp_path / "bars", schema_of())
    run_prepare([write_csv(tmp_path / "json.csv", rows, json.dumps)], tmp_path / "json", as_json)
    for file in sorted(files):
        wanted = (tmp_path / "out" / file).read_bytes()
        for other in ("bars", "json"):
            assert (tmp_path / other / file).read_bytes() == wanted, (other, file)
    bare = SCHEMA.replace(LABELS, "label: clicked\n").replace(", weights: much", "")
    bare = bare.replace(
        "weight: weight\ngroup: user", "ignore: [stars, action, weight, user, much]"
    )
    plain = run_prepare([tmp_path / "rows.parquet"], tmp_path / "plain", schema_of(bare))
    kept = {one.file for one in plain.arrays}
    assert files - kept == {"weight.npy", "group.npy", "ids.2.weights.npy"} and kept < files
    assert {one.name for one in (tmp_path / "plain").glob("*.npy")} == kept
    for file in kept - {"label.npy"}:
        assert (tmp_path / "plain" / file).read_bytes() == (tmp_path / "out" / file).read_bytes()
    label_R, label_RL = (np.load(tmp_path / name / "label.npy") for name in ("plain", "out"))
    np.testing.assert_array_equal(label_R, label_RL[:, 0])


BAD = [
    ("clicked", 2, "2 is neither 0 nor 1"),
    ("clicked", None, "is empty"),
    ("stars", None, "is empty"),
    ("stars", "many", "'many' is not a number"),
    ("action", None, "is empty"),
    ("action", "", "is empty"),
    ("weight", -0.5, "-0.5 is no weight: it must be finite and at least 0"),
    ("weight", math.inf, "inf is no weight"),
    ("weight", 1e39, r"1e\+39 is no weight"),
    ("weight", None, "is empty"),
    ("weight", "much", "'much' is not a number"),
    ("much", ([1, 2], [0.5]), "1 weights for 2 values of 'tags'"),
    ("much", ([1], [0.5, 2.0]), "2 weights for 1 values of 'tags'"),
    ("much", ([], [0.5]), "1 weights for 0 values of 'tags'"),
    ("much", ([1, 2], [0.5, math.inf]), "inf is no finite weight"),
    ("much", ([1, 2], [1e39, 1.0]), r"1e\+39 is no finite weight"),
    ("much", ([1, 2, 3, 4], [1.0, 1.0, None, 1.0]), "a weight is empty"),
    ("image", [1.0], "1 numbers instead of 2"),
    ("image", [1.0] * 3, "3 numbers instead of 2"),
    ("image", [], "0 numbers instead of 2"),
    ("image", [1.0, math.inf], "inf is infinite"),
    ("image", [1.0, 1e39], r"1e\+39 is outside 32 bits"),
]


@pytest.mark.parametrize(("column", "value", "reason"), BAD)
def test_a_bad_value_is_a_bad_row(column: str, value: Any, reason: str, tmp_path: Path) -> None:
    rows = columns()
    changed = (
        dict(zip(("tags", "much"), value, strict=True)) if column == "much" else {column: value}
    )
    for name, cell in changed.items():
        rows[name][6] = cell
        if name not in LISTS and isinstance(cell, str):
            rows[name] = [str(one) for one in rows[name]]
    told = rf"rows.parquet: row 7: column '{column}': {reason}.* \(data.on_bad_row=error; skip"
    with pytest.raises(DataError, match=told):
        prepared(tmp_path, rows)
    shards = prepared(tmp_path, rows, on_bad_row="skip")
    assert (shards.manifest.rows, shards.manifest.bad_rows) == (ROWS - 1, 1)
    good = columns()
    for batch in sequential_batches(shards, range(ROWS - 1), 50):
        assert 6 not in batch.dense_BI[:, 0]
        assert_rows(batch, shards, good)


def test_text_that_is_no_list_is_named_with_its_row(tmp_path: Path) -> None:
    for column, value, reason in (
        ("much", [0.5, "much"], "'much' is not a number"),
        ("image", [1, "x"], "'x' is not a number"),
        ("image", [1], "1 numbers instead of 2"),
        ("image", [1, None, 3], "3 numbers instead of 2"),
    ):
        rows = columns()
        rows["tags"][4], rows[column][4] = [1, 2], value
        path = write_csv(tmp_path / "rows.csv", rows)
        with pytest.raises(DataError, match=rf"rows.csv: row 5: column '{column}': {reason}"):
            run_prepare([path], tmp_path / "out", schema_of())


def store(folder: Path, file: str, change: Callable[[np.ndarray], None]) -> None:
    """Rewrite an array as if `prepare` had written it so, checksums included."""
    manifest = manifests.read(folder)
    array = np.load(folder / file)
    change(array)
    stored = write_array(folder / file, array)
    arrays = tuple(stored if one.file == file else one for one in manifest.arrays)
    manifests.write(folder, replace(manifest, arrays=arrays))


def put(*place: int, value: Any) -> Callable[[np.ndarray], None]:
    def change(array: np.ndarray) -> None:
        array[place] = value

    return change


def one_too_many(offsets_E: np.ndarray) -> None:
    """The first row with as many ids as may be gets one of the next."""
    lengths_R = np.diff(offsets_E)
    row = np.flatnonzero((lengths_R[:-1] == MOST) & (lengths_R[1:] > 0))[0]
    offsets_E[row + 1] += 1


IN_TAGS = (
    r"tags has more than 3 ids, or one for which its table has no row: it has \d+, or a weight"
)
FORGED = [
    ("label.npy", put(3, 2, value=7), "label 'action': 7 is neither 0 nor 1"),
    ("label.npy", put(3, 0, value=np.nan), "label 'clicked': nan is neither 0 nor 1"),
    ("weight.npy", put(3, value=-1), "weight -1 is not finite, or below 0"),
    ("weight.npy", put(3, value=np.nan), "weight nan is not finite"),
    ("weight.npy", put(3, value=np.inf), "weight inf is not finite"),
    ("dense.npy", put(3, 0, value=np.inf), "number is inf"),
    ("dense.npy", put(3, 2, value=np.nan), r"image\[1\] is nan"),
    ("ids.npy", put(3, 0, value=999), r"shop is 999, its table has \d+ rows"),
    ("ids.npy", put(3, 0, value=-5), r"shop is -5, its table has \d+ rows"),
    ("ids.2.values.npy", put(slice(None), value=-1), IN_TAGS),
    ("ids.2.values.npy", put(slice(None), value=300), IN_TAGS),
    ("ids.2.weights.npy", put(slice(None), value=np.nan), IN_TAGS),
    ("ids.2.offsets.npy", one_too_many, IN_TAGS),
    ("ids.2.offsets.npy", put(3, value=-5), IN_TAGS),
    ("ids.2.offsets.npy", put(4, value=2**40), IN_TAGS),
    ("ids.2.offsets.npy", put(20, value=0), IN_TAGS),
    ("ids.2.offsets.npy", put(slice(4, None), value=500), IN_TAGS),
]


@pytest.mark.parametrize(("file", "change", "told"), FORGED)
def test_a_value_that_no_model_can_take_is_named_with_its_row(
    tmp_path: Path, file: str, change: Callable[[np.ndarray], None], told: str
) -> None:
    out = prepared(tmp_path, columns()).folder
    store(out, file, change)
    shards = open_shards(out, None)  # its checksums are right
    name = file.replace("weights", "values").replace("offsets", "values")
    found = rf"{name}: row \d+ \(counted from 0\): {told}.*; the file was damaged"
    loader, state = Loader(shards, batch_size=4, **LOADED), START
    with pytest.raises(DataError, match=found):
        verify(shards, lambda done: None)
    with pytest.raises(DataError, match=found):
        list(sequential_batches(shards, range(ROWS), 41))
    with pytest.raises(DataError, match=found):
        for _ in range(loader.steps_per_epoch):
            _, state = loader.read(state)


def test_a_byte_that_changed_is_found(tmp_path: Path) -> None:
    shards = prepared(tmp_path, columns())
    for one in shards.manifest.arrays:
        path = shards.folder / one.file
        content = path.read_bytes()
        path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
        with pytest.raises(DataError, match=rf"{one.file}: rows 0 to \d+ .*: checksum differs"):
            verify(shards, lambda done: None)
        path.write_bytes(content)
    text = (shards.folder / "manifest.json").read_text()
    manifest = json.loads(text)
    (weights,) = [one for one in manifest["arrays"] if one["file"] == "ids.2.weights.npy"]
    count = weights["shape"][0]
    weights["shape"][0] += 1
    (shards.folder / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(DataError, match=f"{count + 1} weights for {count} ids in ids.2.weights"):
        open_shards(shards.folder, None)


def test_what_labels_are_called_and_weigh_is_part_of_the_rows(tmp_path: Path) -> None:
    found = prepared(tmp_path, columns()).manifest
    others = {
        "weight": SCHEMA.replace("0.5}", "0.7}"),
        "name": SCHEMA.replace("liked", "loved"),
        "order": SCHEMA.replace("  - clicked\n", "").replace("4}\n", "4}\n  - clicked\n"),
    }
    for what, text in others.items():
        changed = replace(found, semantics=replace(found.semantics, schema=schema_of(text)))
        assert changed.identity != found.identity, what
        assert changed.schema.beside_repr != found.schema.beside_repr, what
        assert (changed.meaning != found.meaning) == (what != "weight"), what
    assert found.meaning["labels"] == ["clicked", "liked", "action", "stars"]


def test_rows_of_other_labels_cannot_go_on(tmp_path: Path) -> None:
    base = prepared(tmp_path, columns()).preprocessing
    alone = SCHEMA.replace(LABELS, "label: clicked\nignore: [stars, action]\n")
    for text, named in (
        (alone, "clicked"),
        (SCHEMA.replace("liked", "a"), "clicked, a, action, stars"),
    ):
        told = rf"label: prepared with clicked, liked, action, stars, the schema says {named}"
        with pytest.raises(DataError, match=told):
            run_prepare([tmp_path / "rows.parquet"], tmp_path / "on", schema_of(text), base=base)
    # What makes them, and how much they weigh, may change.
    more = schema_of(SCHEMA.replace("0.5}", "0.7}").replace("above: 3", "above: 2"))
    made = run_prepare([tmp_path / "rows.parquet"], tmp_path / "on", more, base=base)
    assert made.begins_with(base.manifest.meaning)


@pytest.mark.parametrize(
    ("with_it", "without"),
    [
        ("weight: other", "ignore: [other]"),
        ("group: other", "ignore: [other]"),
        ("dense: [{name: d, length: 3}]", "dense: [{name: d, length: 1}]"),
        ("{name: c, max_length: 2, weights: w}", "{name: c, max_length: 2}"),
        ("{name: c, max_length: 2, pooling: mean}", "{name: c, max_length: 2}"),
        ("{name: c, table: t}, {name: d, table: t}", "{name: c}, {name: d}"),
    ],
)
def test_schemas_without_a_key_are_as_they_were_before_it(with_it: str, without: str) -> None:
    """What rows are called would change otherwise, and checkpoints would not fit."""

    def schema(text: str) -> Any:
        text = f"categorical: [{text}]" if text.startswith("{") else text
        base = {"dense": "dense: []", "categorical": "categorical: [{name: x}]"}
        lines = [line for key, line in base.items() if not text.startswith(key)]
        split = "split: {by: fraction, test: 0.5}"
        return schema_of("\n".join(["label: y", *lines, text, split]))

    plain, found = schema(without), schema(with_it)
    assert plain.beside_repr == [] and found.beside_repr != []
    before, after = (re.sub(r"ignore=\(.*?\)", "", repr(one)) for one in (plain, found))
    assert before == after


def prepared_bare(folder: Path, text: str, other: Any, **options: Any) -> Shards:
    """Rows of another column, for which the schema has another line."""
    shards = prepared(folder, bare_columns(other), text, **options)
    verify(shards, lambda done: None)
    return shards


def test_a_part_without_any_weight_is_refused(tmp_path: Path) -> None:
    shards = prepared(tmp_path, columns())
    rows = columns()
    for row in shards.rows.dense_RI[shards.test_rows("day").start :, 0].astype(int):
        rows["weight"][row] = 0.0
    message = r"column 'weight': no row of the part `test` has a weight above 0 \(weight, data.sch"
    with pytest.raises(DataError, match=message):
        prepared(tmp_path / "again", rows)


DAYS = [datetime.date(2024, 3, 1), datetime.date(2024, 3, 2)] + 2 * [datetime.date(2023, 3, 1)]


@pytest.mark.parametrize(
    ("label", "other", "expected"),
    [
        ("positive: [click, buy]", ["view", "click", "buy", "Click"], [0, 1, 1, 0]),
        ("positive: [7, x]", ["7", "x", "07", "7.0"], [1, 1, 0, 0]),
        ("positive: [7, x]", [7, -7, 70, 0], [1, 0, 0, 0]),
        ("positive: ['true']", [True, False, False, True], [1, 0, 0, 1]),
        ("positive: ['2024-03-01']", DAYS, [1, 0, 0, 0]),
        ("above: 3.5", [3.5, 3.6, -1, 1e300], [0, 1, 0, 1]),
        ("above: 0", ["1", "0", " 2e0 ", "-3"], [1, 0, 1, 0]),
        ("above: 0.5", [True, False, False, True], [1, 0, 0, 1]),
    ],
)
@pytest.mark.parametrize("kind", ["parquet", "csv"])
def test_a_label_is_made_of_a_column(
    label: str, other: list[Any], expected: list[int], kind: str, tmp_path: Path
) -> None:
    rows = bare_columns(other * (ROWS // 4)) | {"bought": [None] * ROWS}
    text = BARE.replace("bought", f"{{column: other, {label}}}").replace("[other]", "[bought]")
    if kind == "csv":
        pa_csv.write_csv(pa.table(rows), tmp_path / "rows.csv")
        run_prepare([tmp_path / "rows.csv"], tmp_path / "out", schema_of(text))
        shards = open_shards(tmp_path / "out", semantics(schema_of(text)))
    else:
        shards = prepared(tmp_path, rows, text)
    wanted_R = np.array(expected)[shards.rows.dense_RI[:, 0].astype(int) % 4]
    assert shards.rows.label_R.tolist() == wanted_R.tolist()
    assert len([*shards.folder.glob("*.npy")]) == 3


@pytest.mark.parametrize(
    ("label", "other", "reason"),
    [
        ("positive: [a]", ["1", None], "row 2: column 'other': is empty"),
        ("positive: [a]", ["1", ""], "row 2: column 'other': is empty"),
        ("above: 1", ["1", "b"], "row 2: column 'other': 'b' is not a number"),
        ("above: 1", ["1", "nan"], "row 2: column 'other': 'nan' is neither 0 nor 1"),
        ("above: 1", ["1", ""], "row 2: column 'other': is empty"),
        ("positive: [1]", [0.5, 1.0], "'other': double: `positive` takes .* use `above`"),
    ],
)
def test_what_makes_no_label_is_refused(
    label: str, other: list[Any], reason: str, tmp_path: Path
) -> None:
    text = BARE.replace("bought", f"{{column: other, {label}}}").replace("[other]", "[bought]")
    with pytest.raises(DataError, match=reason):
        prepared(tmp_path, bare_columns(other * (ROWS // 2)), text)


def test_values_that_make_no_label_are_named(tmp_path: Path) -> None:
    rows = columns()
    rows["action"][-1] = "late"
    paths = [
        write_parquet(tmp_path / name, table)
        for name, table in (("more.parquet", columns()), ("rows.parquet", rows))
    ]
    for label, told in (
        ("{column: action, positive: [clik, buy, 7, late]}", ["'7' or 'clik'"]),
        ("{column: action, positive: [buy, late]}", []),
        (
            "\n- {column: action, positive: [buy, clik]}"
            "\n- {column: action, positive: [view, clik, saw], name: seen}",
            ["'clik'", "'clik' or 'saw'"],
        ),
    ):
        said: list[str] = []
        text = SCHEMA.replace(LABELS, f"label: {label}\nignore: [clicked, stars]\n")
        run_prepare(paths, tmp_path / f"out{len(told)}", schema_of(text), say=said.append)
        remarks = [f"no row has action = {names} (positive, data.schema)" for names in told]
        assert [line.strip() for line in said if "no row" in line] == remarks


def partition(keys: list[Any]) -> list[int]:
    """The first place of each key: equal for equal groups, whatever they are called."""
    return [keys.index(key) for key in keys]


@pytest.mark.parametrize(
    "users",
    [
        TEXTS,
        NUMBERS,
        [float(number) for number in NUMBERS],
        pa.array(TEXTS).dictionary_encode(),
        [datetime.date(2024, 1, 1) + datetime.timedelta(number) for number in NUMBERS],
    ],
    ids=["texts", "integers", "whole floats", "dictionary", "dates"],
)
def test_batches_to_score_know_the_groups_of_their_rows(users: Any, tmp_path: Path) -> None:
    shards = prepared_bare(tmp_path, BARE.replace("ignore: [other]", "group: other"), users)
    batches = list(sequential_batches(shards, range(ROWS), 41))
    groups = [group for batch in batches for group in batch.group_B]
    numbers = [int(row) for batch in batches for row in batch.dense_BI[:, 0]]
    assert partition(groups) == partition([NUMBERS[number] for number in numbers])
    assert 0 not in groups
    assert batches[0].part(slice(2, 5)).outcomes.group_B.tolist() == groups[2:5]


@pytest.mark.parametrize(
    ("users", "reason"),
    [
        ([0.5, 1.0] * 150, "row 1: column 'other': 0.5 is not an integer"),
        ([[1], [2]] * 150, "column 'other': .*list"),
        (pa.array([1, 2] * 150, pa.duration("s")), "column 'other': .*no categories are of this"),
    ],
)
def test_what_groups_no_rows_is_refused(users: Any, reason: str, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=reason):
        prepared_bare(tmp_path, BARE.replace("ignore: [other]", "group: other"), users)


@pytest.mark.parametrize("key", ["ignore: [other]", "group: other", "weight: other"])
def test_all_rows_of_a_user_are_in_one_part(key: str, tmp_path: Path) -> None:
    text = BARE.replace("ignore: [other]", key).replace("seed: 3", "seed: 3, column: other")
    shards = prepared_bare(tmp_path, text, NUMBERS)
    number_R = shards.rows.dense_RI[:, 0].astype(int)
    parts = [shards.train_rows, shards.validation_rows, shards.test_rows("day")]
    users = [{NUMBERS[row] for row in number_R[part.start : part.stop]} for part in parts]
    assert sum(map(len, users)) == len(set().union(*users)) == 40
    assert 15 <= len(users[0]) <= 33 and users[1] and users[2]
    # By the value alone, whatever its rows' numbers are.
    backwards = {name: values[::-1] for name, values in bare_columns(NUMBERS).items()}
    again = prepared(tmp_path / "back", backwards, text)
    tested = again.rows.dense_RI[again.test_rows("day").start :, 0].astype(int)
    assert {NUMBERS[row] for row in tested} == users[2]


def test_rows_without_a_user_are_drawn_by_their_numbers(tmp_path: Path) -> None:
    users = [None if row % 3 else f"u{row % 40}" for row in range(ROWS)]
    text = BARE.replace("ignore: [other]", "group: other")
    drawn = prepared_bare(tmp_path / "a", text.replace("seed: 3", "seed: 3, column: other"), users)
    plain = prepared_bare(tmp_path / "b", text, users)
    tested = []
    for shards in (drawn, plain):
        assert (shards.rows.group_R == 0).sum() == 200
        rows = shards.rows.dense_RI[shards.test_rows("day").start :, 0]
        tested.append({int(row) for row in rows if row % 3})
    assert tested[0] == tested[1] and 20 < len(tested[0]) < 60


LISTED = """
label: y
dense: [{name: number}]
categorical:
  - {name: shop, kind: integer}
  - {name: tags, kind: integer, max_length: 3, truncate: last, separator: "|", weights: much}
split: {by: fraction, test: 0.2}
"""


def outcome_of_columns(tags: Any, much: Any) -> Any:
    arrays = [pa.array([0]), pa.array([0.0]), pa.array([1]), tags, much]
    batch = pa.record_batch(arrays, ["y", "number", "shop", "tags", "much"])
    block = Block(batch, np.ones(1, np.int64), ())
    values, bad = read_values(block, schema_of(LISTED), "a", labels=True)
    if bad:
        return "refused", bad[0].column, bad[0].reason
    coded = values.categories[1]
    assert coded.weight_M is not None
    return [coded.keys[one] for one in coded.index_M.tolist()], coded.weight_M.tolist()


weights = st.none() | st.sampled_from([0.5, -2.0, 0.0, math.inf, 1e39, 3e38])


@given(
    tags=st.lists(st.none() | st.integers(0, 8), max_size=5),
    much=st.lists(weights, min_size=6, max_size=6),
    more=st.sampled_from([0, 0, 0, 1, -1]),
)
@example(tags=[], much=[0.5] * 6, more=1)
@example(tags=[None], much=[0.5] * 6, more=0)
def test_a_list_with_weights_means_the_same_as_text(
    tags: list[Any], much: list[Any], more: int
) -> None:
    much = much[: max(len(tags) + more, 0)]
    of_lists = outcome_of_columns(
        pa.array([tags], pa.list_(pa.int64())), pa.array([much], pa.list_(pa.float64()))
    )
    if len(tags) == len(much):
        pairs = kept_ids(tags, much)
        is_fine = all(one is not None and abs(one) < 3.4e38 for _, one in pairs)
        assert (of_lists[0] != "refused") is is_fine
        if is_fine:
            floats = np.array([one for _, one in pairs], np.float32).tolist()
            assert of_lists == ([tag for tag, _ in pairs], floats)
    else:
        assert of_lists[0] == "refused"
    if [None] not in (tags, much):  # whose text is that of an empty list
        texts = [pa.array([bars(items)], pa.binary()) for items in (tags, much)]
        assert outcome_of_columns(*texts)[:2] == of_lists[:2]


def test_labels_that_are_the_same_in_all_rows_are_told(tmp_path: Path) -> None:
    assert [*label_remarks(prepared(tmp_path, columns()))] == []
    alike = {**columns(), "clicked": [0] * ROWS, "action": ["buy"] * ROWS}
    (tmp_path / "alike").mkdir()
    shards = prepared(tmp_path / "alike", alike)
    rows = f"in all {len(shards.train_rows)} training rows: it cannot be learned"
    assert [*label_remarks(shards)] == [
        f"label 'clicked' is 0 {rows}",
        f"label 'action' is 1 {rows}",
    ]
