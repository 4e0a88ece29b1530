"""Rows prepared on a base keep its ids and scales; new categories get rows behind its own."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from table_rows import (
    BY_FRACTION,
    BY_TIME,
    COLUMNS,
    make_rows,
    part_of,
    run_prepare,
    table,
    write_csv,
    write_parquet,
)

from dlrm_hybrid.data.manifest import Growth, Manifest
from dlrm_hybrid.data.preprocessing import Preprocessing, Vocabulary
from dlrm_hybrid.data.schema import Schema
from dlrm_hybrid.data.schemas import reading as schemas
from dlrm_hybrid.data.shards import open_shards, verify
from dlrm_hybrid.types import DataError

NAMES = ("città", "shop", "device", "code", "page", "tags")


def first_day(folder: Path, schema: Schema | None = None) -> Preprocessing:
    raw = write_parquet(folder / "first.parquet", make_rows(700))
    manifest = run_prepare([raw], folder / "first", schema or table())
    return Preprocessing(folder / "first", manifest)


def next_rows() -> list[dict]:
    """Rows of which some have cities, shops, codes and tags that the first ones lack."""
    rows = make_rows(700, seed=1)
    for number, row in enumerate(rows):
        if number % 3 == 0:
            row["città"] = f"new town {number % 30}"
            row["shop"] = 77 + number % 5
            row["code"] = f"{0xABC00000 + number % 7:08x}"
            row["tags"] = [f"new {number % 4}", "t1"]
    return rows


def keys_of(preprocessing: Preprocessing) -> list[list]:
    return [list(one.keys) for one in preprocessing.vocabularies()]


def grown(
    base: Preprocessing, raw: Path, schema: Schema | None = None, grows: bool = True
) -> Preprocessing:
    output = raw.with_name(f"{raw.stem}-{grows}")
    manifest = run_prepare([raw], output, schema or table(), base=base, grows=grows)
    return Preprocessing(output, manifest)


def ids_of(preprocessing: Preprocessing, column: int) -> np.ndarray:
    shards = open_shards(preprocessing.folder, None)
    place = shards.schema.single.index(column)
    return shards.rows.ids_RF[:, place]


def categories(vocabulary: Vocabulary, ids_R: np.ndarray) -> list:
    """What each id stands for; None for all that have no row."""
    names = [None, *vocabulary.keys][1 - vocabulary.first_id :]
    return [names[one] for one in ids_R.tolist()]


def test_known_categories_keep_their_ids_and_frequent_new_ones_come_behind(tmp_path: Path) -> None:
    base = first_day(tmp_path)
    before = {path: path.read_bytes() for path in base.folder.rglob("*") if path.is_file()}
    rows = next_rows()
    after = grown(base, write_csv(tmp_path / "next.csv", rows))
    verify(open_shards(after.folder, None), lambda done: None)
    assert {path: path.read_bytes() for path in before} == before
    in_order = [row for part in (0, 1, 2) for row in rows if part_of(row) == part]
    training = [row for row in rows if part_of(row) == 0]
    for index, (name, kind) in enumerate([("città", str), ("shop", int)]):
        known = keys_of(base)[index]
        told, seen = (
            [kind(row[name]) if row[name] is not None else missing(kind) for row in some]
            for some in (training, rows)
        )
        least = 3 if name == "città" else 1
        new = [one for one in dict.fromkeys(seen) if one not in known and told.count(one) >= least]
        assert new, name
        assert keys_of(after)[index] == [*known, *new]
        expected = [
            one if one in (*known, *new) else None
            for row in in_order
            for one in [kind(row[name]) if row[name] is not None else missing(kind)]
        ]
        assert categories(after.vocabularies()[index], ids_of(after, index)) == expected
        growth = after.manifest.base.growth[index]
        distinct = set(seen)
        assert growth == Growth(
            reused=len(distinct & set(known)),
            appended=len(new),
            unknown=len(distinct - set(known) - set(new)),
        )
        assert after.table_rows[index] == base.table_rows[index] + len(new)


def missing(kind: type) -> object:
    return "" if kind is str else -(2**63)


def test_all_kinds_of_columns_begin_with_the_base_and_scales_stay(tmp_path: Path) -> None:
    base = first_day(tmp_path)
    after = grown(base, write_parquet(tmp_path / "next.parquet", next_rows()))
    for name, known, now in zip(NAMES, keys_of(base), keys_of(after), strict=True):
        assert now[: len(known)] == known, name
        assert len(set(now)) == len(now), name
    appended = {
        name: one.appended for name, one in zip(NAMES, after.manifest.base.growth, strict=True)
    }
    assert appended["device"] == appended["page"] == 0  # two known ones; buckets all have rows
    assert all(appended[name] > 0 for name in ("città", "shop", "code", "tags"))
    assert after.manifest.scales == base.manifest.scales
    assert after.manifest.out_of_vocabulary == base.manifest.out_of_vocabulary
    assert after.manifest.begins_with(base.manifest.meaning)
    assert not base.manifest.begins_with(after.manifest.meaning)


def test_rows_without_new_categories_grow_nothing(tmp_path: Path) -> None:
    base = first_day(tmp_path)
    again = make_rows(700)
    after = grown(base, write_csv(tmp_path / "again.csv", again))
    assert after.manifest.vocabulary == base.manifest.vocabulary
    assert after.manifest.meaning == base.manifest.meaning
    assert [one.appended for one in after.manifest.base.growth] == [0] * len(NAMES)
    assert after.manifest.arrays[1].xxh3 == base.manifest.arrays[1].xxh3  # dense values


def test_without_growth_new_categories_are_unknown(tmp_path: Path) -> None:
    base = first_day(tmp_path)
    raw = write_csv(tmp_path / "next.csv", next_rows())
    after, fixed = grown(base, raw), grown(base, raw, grows=False)
    assert fixed.manifest.meaning == base.manifest.meaning
    for one, other in zip(fixed.manifest.base.growth, after.manifest.base.growth, strict=True):
        assert one == Growth(
            reused=other.reused, appended=0, unknown=other.appended + other.unknown
        )
    known = ids_of(after, 0) < base.table_rows[0]
    np.testing.assert_array_equal(ids_of(fixed, 0), np.where(known, ids_of(after, 0), 0))


def test_a_table_that_is_full_takes_the_most_frequent_new_categories(tmp_path: Path) -> None:
    """More rows may be asked for later; fewer leave those that are there."""
    text = (COLUMNS + BY_TIME).replace("kind: integer", "kind: integer, max_rows: MOST")

    def schema(most: int) -> Schema:
        return schemas.loads(text.replace("MOST", str(most)), "a.yaml")

    base = first_day(tmp_path, schema(12))
    training = [row["shop"] for row in make_rows(700) if part_of(row) == 0]
    training = [-(2**63) if one is None else one for one in training]
    order = [*dict.fromkeys(training)]
    kept = sorted(order, key=lambda one: (-training.count(one), order.index(one)))[:11]
    assert base.table_rows[1] == 12
    assert keys_of(base)[1] == sorted(kept, key=order.index)
    raw = write_csv(tmp_path / "next.csv", next_rows())
    full = grown(base, raw, schema(12))
    assert keys_of(full)[1] == keys_of(base)[1]
    assert full.manifest.base.growth[1].appended == 0
    assert ids_of(full, 1).min() == 0
    more = grown(base, raw.rename(tmp_path / "b.csv"), schema(14))
    shops = [row["shop"] for row in next_rows() if part_of(row) == 0]
    new = [one for one in dict.fromkeys(shops) if one is not None and one not in keys_of(base)[1]]
    most = sorted(new, key=lambda one: (-shops.count(one), new.index(one)))[:2]
    assert keys_of(more)[1] == [*keys_of(base)[1], *sorted(most, key=new.index)]
    less = grown(base, write_csv(tmp_path / "c.csv", next_rows()), schema(5))
    assert keys_of(less)[1] == keys_of(base)[1]


@pytest.mark.parametrize("evict", ["rarest", "least_recent"])
def test_in_a_full_table_new_categories_take_rows_that_are_least_in_use(
    tmp_path: Path, evict: str
) -> None:
    text = (COLUMNS + BY_TIME).replace(
        "kind: integer", f"kind: integer, max_rows: 5, evict: {evict}"
    )
    schema = schemas.loads(text, "a.yaml")
    when = [row["when"] for row in make_rows(700) if part_of(row) == 0][0]

    def day(name: str, shops: str, base: Preprocessing | None) -> Preprocessing:
        others = [row for row in make_rows(700) if part_of(row) != 0]
        train = [{**others[0], "when": when, "shop": int(one)} for one in shops]
        tested = [{**one, "shop": 1} for one in others]
        raw = write_csv(tmp_path / f"{name}.csv", [*train, *tested])
        manifest = run_prepare([raw], tmp_path / name, schema, base=base)
        return Preprocessing(tmp_path / name, manifest)

    def shops(of: Preprocessing) -> str:
        return "".join(map(str, keys_of(of)[1]))

    first = day("first", "1112223344", None)
    second = day("second", "115667", first)
    third = day("third", "88822", second)
    assert shops(first) == "1234"
    if evict == "rarest":  # 1 has 5 in all, 2 has 3, 3 and 4 have 2, like 6
        assert (shops(second), shops(third)) == ("1234", "1238")
    else:
        assert (shops(second), shops(third)) == ("1756", "1728")
    growth = second.manifest.base.growth[1], third.manifest.base.growth[1]
    if evict == "rarest":
        assert growth[0] == Growth(reused=1, appended=0, unknown=3, evicted=0)
    else:
        assert growth[0] == Growth(reused=1, appended=0, unknown=0, evicted=3)
    replaced = third.replaced(second)
    assert replaced[1].tolist() == ([4] if evict == "rarest" else [3, 4])
    assert all(not len(one) for index, one in enumerate(replaced) if index != 1)
    ids = ids_of(second, 1)[: len("115667")]
    expected = [one if one in "".join(shops(second)) else None for one in "115667"]
    told = categories(second.vocabularies()[1], ids)
    assert [None if one is None else str(one) for one in told] == expected
    assert categories(third.vocabularies()[1], ids_of(third, 1)[:5]) == [8, 8, 8, 2, 2]


def test_days_follow_days(tmp_path: Path) -> None:
    """A base may have grown itself; the third day's vocabulary begins with the second's."""
    first = first_day(tmp_path)
    second = grown(first, write_csv(tmp_path / "second.csv", next_rows()))
    rows = make_rows(300, seed=2)
    for row in rows[:20]:
        row["shop"] = 10**15
    third = grown(second, write_csv(tmp_path / "third.csv", rows))
    assert keys_of(third)[1] == [*keys_of(second)[1], 10**15]
    assert third.manifest.begins_with(second.manifest.meaning)
    assert not third.manifest.begins_with(first.manifest.meaning)


def test_what_is_there_is_used_again_and_of_another_base_refused(tmp_path: Path) -> None:
    base = first_day(tmp_path)
    raw = write_csv(tmp_path / "next.csv", next_rows())
    after = grown(base, raw)
    stamp = (after.folder / "manifest.json").stat().st_mtime_ns
    assert grown(base, raw).manifest == after.manifest
    assert (after.folder / "manifest.json").stat().st_mtime_ns == stamp
    fault = "prepared differently: it has vocabularies of an earlier run .data.base.; ADVICE"
    with pytest.raises(DataError, match=fault):
        run_prepare([raw], after.folder, table())
    again = run_prepare([raw], after.folder, table(), base=after)  # made from these rows
    assert again == after.manifest
    with pytest.raises(DataError, match=r"not on those of .*, data.grow = False"):
        run_prepare([raw], after.folder, table(), base=base, grows=False)


@pytest.mark.parametrize(
    ("before", "after", "told"),
    [
        (
            "{name: shop, kind: integer}",
            "{name: shop}",
            r"categorical\[1\].kind: prepared with 'integer', the schema says 'string'",
        ),
        ("missing: 40", "missing: 41", r"dense\[0\].missing: prepared with 40.0, the schema says"),
        ("hash_size: 50", "hash_size: 51", r"categorical\[4\].hash_size: prepared with 50"),
        ("  - {name: device}\n", "", r"categorical\[2\].name: prepared with 'device'"),
        ("label: bought\n", "label: bought\nmissing_values: [x]\n", r"missing_values\[0\]: prep"),
    ],
)
def test_columns_of_another_meaning_are_refused(
    tmp_path: Path, before: str, after: str, told: str
) -> None:
    base = first_day(tmp_path, schemas.loads(COLUMNS + BY_TIME, "a.yaml"))
    raw = write_csv(tmp_path / "next.csv", next_rows())
    text = (COLUMNS + BY_TIME).replace(before, after)
    other = schemas.loads(text.replace("[user", "[user, device") if not after else text, "b.yaml")
    with pytest.raises(
        DataError, match=f"no base for these rows .data.base.\n  data.schema.{told}"
    ):
        grown(base, raw, other)


def test_a_table_with_a_row_for_every_category_has_none_for_unknown_ones(tmp_path: Path) -> None:
    all_known = schemas.loads(COLUMNS + BY_TIME + "vocabulary: all\n", "a.yaml")
    base = first_day(tmp_path, all_known)
    raw = write_csv(tmp_path / "next.csv", next_rows())
    after = grown(base, raw, all_known)
    assert after.manifest.base.growth[1].unknown == 0
    assert ids_of(after, 1).min() == 0  # of the first shop
    with pytest.raises(DataError, match=r"categorical\[1\]: 'shop' may have categories without"):
        grown(base, raw.rename(tmp_path / "b.csv"), table(tags=False))
    fault = r"categorical\[1\]: 'shop' may .* data.grow=false.* of these, and vocabulary: all"
    with pytest.raises(DataError, match=fault):
        grown(base, (tmp_path / "b.csv").rename(raw), all_known, grows=False)


def test_the_split_and_the_least_count_may_change(tmp_path: Path) -> None:
    base = first_day(tmp_path)
    other = schemas.loads(
        (COLUMNS + BY_FRACTION)
        .replace("min_count: 3", "min_count: 9")
        .replace("tags]", "tags, when]"),
        "b.yaml",
    )
    with pytest.raises(DataError, match=r"categorical\[5\].name: prepared with 'tags'"):
        grown(base, write_csv(tmp_path / "next.csv", next_rows()), other)
    other = table(BY_FRACTION)
    assert grown(base, tmp_path / "next.csv", other).manifest.schema.split == other.split


def test_a_damaged_manifest_is_told(tmp_path: Path) -> None:
    base = first_day(tmp_path)
    after = grown(base, write_csv(tmp_path / "next.csv", next_rows()))
    path = after.folder / "manifest.json"
    text = path.read_text()
    cut = text.index('"growth": [') + len('"growth": [')
    path.write_text(text[:cut] + text[text.index("]", cut) :])
    with pytest.raises(DataError, match="base.growth: 0 values for 6 columns"):
        open_shards(after.folder, None)
    assert isinstance(after.manifest, Manifest)
