"""Columns of one id a row that are read as bags: which ids, and the same ones wherever they are."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from full_rows import SCHEMA, columns, prepared
from hypothesis import given
from hypothesis import strategies as st
from shard_folder import SEMANTICS, write_folder

from dlrm_hybrid.bags import Bags, expanded, jagged, lengths_of, part, table_offsets, with_first_ids
from dlrm_hybrid.data import manifest as manifests
from dlrm_hybrid.data.loader import START, Loader, sequential_batches
from dlrm_hybrid.data.schema import Schema
from dlrm_hybrid.data.schemas.reading import builtin
from dlrm_hybrid.data.shards import Shards, open_shards
from dlrm_hybrid.rng import fold

DAYS = (331, 340, 100)
SIZES = {0: 3, 2: 20, 25: 2}
MASK = (1 << 64) - 1


def with_sizes(schema: Schema, sizes: dict[int, int]) -> Schema:
    columns = enumerate(schema.categorical)
    return replace(
        schema, categorical=tuple(replace(one, expand_to=sizes.get(i, 1)) for i, one in columns)
    )


def wanted(column: int, id_: int, size: int, rows: int) -> list[int]:
    """The bag of an id, by whole numbers of Python."""
    found = [id_]
    for place in range(1, size):
        state = (fold(0, "bag", column) + (id_ * 65536 + place) * 0x9E3779B97F4A7C15) & MASK
        bits = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & MASK
        bits = ((bits ^ (bits >> 27)) * 0x94D049BB133111EB) & MASK
        found.append(((bits ^ (bits >> 31)) >> 32) * rows >> 32)
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("shards")
    schema = with_sizes(SEMANTICS.schema, SIZES)
    write_folder(folder, DAYS, replace(SEMANTICS, schema=schema))
    return folder


@pytest.fixture(scope="module")
def shards(folder: Path) -> Shards:
    return open_shards(folder, None)


def bags_of(bags: Bags[Any], table: int) -> list[list[int]]:
    """The ids of each row."""
    offsets = bags.offsets[table * bags.rows : (table + 1) * bags.rows + 1]
    return [bags.values[a:b].tolist() for a, b in zip(offsets, offsets[1:], strict=False)]


def test_a_bag_is_its_id_and_what_a_hash_draws_from_the_whole_table(shards: Shards) -> None:
    bag_of = shards.preprocessing.bag_of
    ids = np.array([0, 5, 770, 5])
    for column, size in SIZES.items():
        found = bag_of(column, ids)
        rows = shards.table_rows[column]
        assert found.tolist() == [wanted(column, id_, size, rows) for id_ in ids.tolist()]
        assert found.min() >= 0
        assert found.max() < rows
    # no two columns draw the same, and no two ids
    assert bag_of(2, ids)[1, 1:].tolist() != bag_of(2, ids)[2, 1:].tolist()


def test_all_rows_of_a_table_are_drawn_alike(shards: Shards) -> None:
    bag_of = shards.preprocessing.bag_of
    counts = np.bincount(bag_of(0, np.arange(771))[:, 1:].reshape(-1), minlength=771)
    # 1,542 draws from 771 rows: Poisson of mean 2
    assert abs(counts.mean() - 2) < 1e-9
    assert counts.var() == pytest.approx(2, rel=0.2)


def test_an_id_beyond_the_table_is_repeated(shards: Shards) -> None:
    bag_of = shards.preprocessing.bag_of
    # that of unknown categories, whose row is one of zeros
    assert bag_of(0, np.array([shards.table_rows[0], 1]))[0].tolist() == [771] * 3


def test_every_way_to_read_rows_gives_an_id_the_same_bag(shards: Shards) -> None:
    options: dict[str, Any] = {"seed": 3, "shuffle": True, "shuffle_block_rows": 100}
    options["shuffle_read_rows"] = 25
    whole, _ = Loader(shards, batch_size=64, **options).read(START)
    halves = [
        Loader(shards, batch_size=32, trainer=trainer, trainers=2, **options).read(START)[0]
        for trainer in range(2)
    ]
    assert lengths_of(whole.bags)[:, 0].tolist() == [SIZES.get(i, 1) for i in range(26)]
    by_id: dict[int, list[int]] = {}
    in_order = list(sequential_batches(shards, range(sum(DAYS)), 100))
    for batch in (*in_order, whole, *halves):
        for bag in bags_of(batch.bags, 0):
            assert by_id.setdefault(bag[0], bag) == bag
    assert len(by_id) == sum(DAYS)
    for table in range(26):
        joined = [bag for half in halves for bag in bags_of(half.bags, table)]
        assert bags_of(whole.bags, table) == joined


def test_other_sizes_are_other_rows_and_mean_something_else(folder: Path, shards: Shards) -> None:
    found = shards.manifest
    schema = with_sizes(found.schema, {**SIZES, 0: 4})
    other = replace(found, semantics=replace(found.semantics, schema=schema))
    assert other.identity != found.identity
    assert other.meaning != found.meaning
    (difference,) = found.semantics.differences(other.semantics)
    assert "data.schema.categorical[0].expand_to: prepared with 3" in difference
    plain = replace(found, semantics=replace(found.semantics, schema=SEMANTICS.schema))
    # rows that nobody expands are what they were before there were bags
    assert [one for one in plain.identity if ":" in one] == []
    assert all(len(one) == 3 for name, one in plain.meaning.items() if name[:4] == "cate")
    assert manifests.read(folder).semantics.schema.expanded == SIZES


def test_lists_stay_beside_columns_that_are_expanded(tmp_path: Path) -> None:
    plain = prepared(tmp_path / "plain", columns())
    wide = SCHEMA.replace(
        "{name: shop, kind: integer}", "{name: shop, kind: integer, expand_to: 4}"
    )
    shards = prepared(tmp_path / "wide", columns(), wide)
    (before,), (after,) = (sequential_batches(one, range(50), 50) for one in (plain, shards))
    assert bags_of(after.bags, 1) == bags_of(before.bags, 1)
    shops, rows = [bag[0] for bag in bags_of(before.bags, 0)], shards.table_rows[0]
    assert bags_of(after.bags, 0) == [wanted(0, shop, 4, rows) for shop in shops]


def numbered(table: int, ids_B: np.ndarray[Any, Any], sizes: dict[int, int]) -> Any:
    """Bags that say of what they are."""
    more = 1000 * (table + 1) + np.arange(sizes[table]) + 100 * ids_B[:, None]
    more[:, 0] = ids_B
    return more


@given(
    lengths=st.lists(st.lists(st.integers(0, 3), min_size=4, max_size=4), min_size=1, max_size=4),
    chosen=st.sets(st.integers(0, 3)),
    size=st.integers(2, 5),
)
def test_expanded_bags_have_what_the_others_had(
    lengths: Sequence[Sequence[int]], chosen: set[int], size: int
) -> None:
    lengths_FB = np.array(lengths)
    sizes = {one: size for one in sorted(chosen) if one < len(lengths_FB)}
    lengths_FB[list(sizes)] = 1
    before = jagged(np.arange(lengths_FB.sum()), lengths_FB)
    after = expanded(before, sizes, lambda table, ids_B: numbered(table, ids_B, sizes))
    assert (lengths_of(before) == lengths_FB).all()
    for table in range(len(lengths_FB)):
        if table in sizes:
            ids_B = before.values[slice(*table_offsets(before)[table : table + 2])]
            assert bags_of(after, table) == numbered(table, ids_B, sizes).tolist()
        else:
            assert bags_of(after, table) == bags_of(before, table)
    back = with_first_ids(after, sizes)
    assert back.values.tolist() == before.values.tolist()
    assert (lengths_of(back) == lengths_FB).all()
    for first in range(4):  # rows alone, as micro-batches take them
        alone = part(before, slice(first, first + 1))
        one = expanded(alone, sizes, lambda table, ids_B: numbered(table, ids_B, sizes))
        assert one.values.tolist() == part(after, slice(first, first + 1)).values.tolist()


def test_the_schema_of_the_benchmark_has_its_sizes() -> None:
    # mlcommons/training, recommendation_v2/torchrec_dlrm/README.MD, --multi_hot_sizes
    sizes = "3,2,1,2,6,1,1,1,1,7,3,8,1,6,9,5,1,1,1,12,100,27,10,3,1,1"
    found = builtin("criteo_1tb_multi_hot")
    assert [one.expand_to for one in found.categorical] == [int(one) for one in sizes.split(",")]
    assert with_sizes(found, {}) == builtin("criteo_1tb")
