"""Batches of prepared rows with lists of ids: those of their rows, in every order of reading."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import xxhash
from shard_folder import SEMANTICS, write_array

from dlrm_hybrid.bags import Bags
from dlrm_hybrid.data import manifest as manifests
from dlrm_hybrid.data.arrays import header
from dlrm_hybrid.data.loader import START, Batch, Loader, sequential_batches
from dlrm_hybrid.data.manifest import VOCABULARY_FOLDER, Manifest
from dlrm_hybrid.data.prepare import count_clicks
from dlrm_hybrid.data.schema import CategoricalColumn, DenseColumn, Schema
from dlrm_hybrid.data.shards import Shards, open_shards, verify
from dlrm_hybrid.types import DataError

ROWS, TEST_ROWS, MOST = 257, 40, 5
TABLE_ROWS = (100_000, 50, 7, 300)
# The second and the last column have lists.
SCHEMA = Schema(
    label="y",
    dense=(DenseColumn(name="x"),),
    categorical=tuple(
        CategoricalColumn(name=f"c{i}", kind="integer", max_length=MOST if i % 2 else 1)
        for i in range(4)
    ),
)
Lists = list[list[list[int]]]  # by table and row


def drawn(seed: int = 0) -> Lists:
    """The first column has the number of its row."""
    rng = np.random.default_rng(seed)

    def column(table: int) -> list[list[int]]:
        if table == 0:
            return [[row] for row in range(ROWS)]
        lengths = rng.integers(0, MOST + 1, ROWS) if table % 2 else np.ones(ROWS, int)
        return [rng.integers(0, TABLE_ROWS[table], one).tolist() for one in lengths]

    return [column(table) for table in range(4)]


def write_folder(folder: Path, lists: Lists) -> None:
    folder.mkdir(exist_ok=True)
    rng = np.random.default_rng(1)
    ids = np.array([[lists[0][row][0], lists[2][row][0]] for row in range(ROWS)], np.int32)
    arrays = [
        write_array(folder / "label.npy", rng.integers(0, 2, ROWS).astype(np.float32)),
        write_array(folder / "dense.npy", np.arange(ROWS, dtype=np.float32)[:, None]),
        write_array(folder / "ids.npy", ids),
    ]
    for column in SCHEMA.multi_hot:
        values = np.array([one for bag in lists[column] for one in bag], np.int32)
        offsets = np.cumsum([0, *map(len, lists[column])])
        arrays.append(write_array(folder / manifests.values_file(column), values))
        arrays.append(write_array(folder / manifests.offsets_file(column), offsets))
    (folder / VOCABULARY_FOLDER).mkdir(exist_ok=True)
    for column in range(1, 5):
        (folder / VOCABULARY_FOLDER / f"{column}.npy").write_bytes(header("<u4", (0,)))
    manifest = Manifest(
        format=manifests.FORMAT,
        semantics=replace(SEMANTICS, schema=SCHEMA),
        sources=(),
        parts=count_clicks(folder, arrays[0], (ROWS - TEST_ROWS, 0, TEST_ROWS)),
        arrays=tuple(arrays),
        table_rows=TABLE_ROWS,
        out_of_vocabulary=(False,) * 4,
        vocabulary_xxh3=xxhash.xxh3_128_hexdigest(4 * xxhash.xxh3_128_digest(b"")),
        scales=(None,),
        bad_rows=0,
        zero_keys=0,
    )
    manifests.write(folder, manifest)


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Shards:
    folder = tmp_path_factory.mktemp("lists")
    write_folder(folder, drawn())
    return open_shards(folder, None)


def make_loader(shards: Shards, **options: object) -> Loader:
    values = {"batch_size": 16, "seed": 3, "shuffle": True, "shuffle_block_rows": 50}
    return Loader(shards, **{**values, "shuffle_read_rows": 7, **options})


def lists_of(bags: Bags[np.ndarray]) -> Lists:
    offsets = bags.offsets
    assert offsets is not None and bags.values.dtype == np.int64
    found = [bags.values[a:b].tolist() for a, b in zip(offsets, offsets[1:], strict=False)]
    return [found[table * bags.rows : (table + 1) * bags.rows] for table in range(bags.tables)]


def assert_lists(batch: Batch, rows: list[int]) -> None:
    known = drawn()
    assert lists_of(batch.bags) == [[column[row] for row in rows] for column in known]
    assert batch.dense_BI[:, 0].tolist() == rows


def test_batches_in_order_have_the_lists_of_their_rows(shards: Shards) -> None:
    for size in (1, 16, ROWS):
        first = 5
        for batch in sequential_batches(shards, range(5, ROWS), size):
            assert_lists(batch, list(range(first, min(first + size, ROWS))))
            first += size
        assert first >= ROWS


@pytest.mark.parametrize("trainers", [1, 3])
def test_shuffled_batches_have_the_lists_of_their_rows(shards: Shards, trainers: int) -> None:
    loader, at, seen = make_loader(shards, trainers=trainers), START, []
    watched = []
    loader.watch = watched.append
    for _ in range(2 * loader.steps_per_epoch):
        for trainer in range(trainers):
            batch = loader.part(at, trainer)
            rows = [bag[0] for bag in lists_of(batch.bags)[0]]
            assert_lists(batch, rows)
            assert watched[-1] is batch.bags
            seen += rows
        at = loader.after(at)
    epoch = loader.steps_per_epoch * trainers * 16
    assert len(set(seen[:epoch])) == epoch and seen[:epoch] != sorted(seen[:epoch])
    assert max(seen) < ROWS - TEST_ROWS


def test_without_lists_bags_have_no_offsets(tmp_path: Path) -> None:
    from shard_folder import write_folder as write_plain

    write_plain(tmp_path, [30, 5])
    plain = open_shards(tmp_path, None)
    assert make_loader(plain).read(START)[0].bags.offsets is None
    assert next(sequential_batches(plain, range(5), 5)).bags.offsets is None


def test_lists_of_other_columns_are_other_rows(shards: Shards) -> None:
    manifest, columns = shards.manifest, SCHEMA.categorical
    moved = replace(SCHEMA, categorical=(columns[1], columns[0], *columns[2:]))
    other = replace(manifest, semantics=replace(manifest.semantics, schema=moved))
    assert other.identity != manifest.identity


@pytest.mark.parametrize("fault", ["negative", "no row", "too long"])
def test_bad_lists_are_named(tmp_path: Path, fault: str) -> None:
    lists = drawn()
    bad = {"negative": [-1], "no row": [3, 300, 3], "too long": [1] * (MOST + 1)}[fault]
    lists[3][11] = bad
    write_folder(tmp_path, lists)
    damaged = open_shards(tmp_path, None)
    message = r"ids\.4\.values\.npy: row 11 .*: c3 has more than 5 ids, or one for which its table"
    for read in (
        lambda: list(sequential_batches(damaged, range(ROWS), 16)),
        lambda: make_loader(damaged, shuffle_block_rows=500).read(START),
        lambda: verify(damaged, lambda rows: None),
    ):
        with pytest.raises(DataError, match=message):
            read()


def test_offsets_that_are_none_are_refused(tmp_path: Path) -> None:
    write_folder(tmp_path, drawn())
    path = tmp_path / manifests.offsets_file(1)
    offsets = np.load(path)
    for row, value in ((7, -5), (9, 2**40), (20, 0)):
        broken = offsets.copy()
        broken[row] = value
        np.save(path, broken)
        damaged = open_shards_unchecked(tmp_path)
        with pytest.raises(DataError, match=r"ids\.2\.values\.npy: row"):
            list(sequential_batches(damaged, range(ROWS), 64))


def open_shards_unchecked(folder: Path) -> Shards:
    """As if the file had been written so."""
    manifest = manifests.read(folder)
    path = folder / manifests.offsets_file(1)
    stored = write_array(path, np.load(path))
    arrays = tuple(stored if one.file == stored.file else one for one in manifest.arrays)
    manifests.write(folder, replace(manifest, arrays=arrays))
    return open_shards(folder, None)
