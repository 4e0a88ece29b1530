import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from shard_folder import write_folder

from dlrm_hybrid.data.loader import (
    START,
    Loader,
    LoaderState,
    ReadAhead,
    permutation,
    sequential_batches,
    with_coming,
)
from dlrm_hybrid.data.shards import open_shards
from dlrm_hybrid.types import ConfigError, DataError

TRAIN_ROWS = 1013
DAYS = (331, 340, 342, 101)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("shards")


@pytest.fixture(scope="module")
def records(folder):
    return write_folder(folder, DAYS)


@pytest.fixture(scope="module")
def shards(folder, records):
    return open_shards(folder, None)


def make_loader(shards, **options):
    defaults = {"batch_size": 16, "seed": 3, "shuffle": True}
    defaults |= {"shuffle_block_rows": 100, "shuffle_read_rows": 25}
    return Loader(shards, **{**defaults, **options})


def walk(loader, state, steps):
    batches, states = [], [state]
    for _ in range(steps):
        batch, state = loader.read(state)
        batches.append(batch)
        states.append(state)
    return batches, states


def rows_of(batches):
    return np.concatenate([batch.bags.values[0] for batch in batches])


def assert_equal_batches(left, right):
    assert len(left) == len(right)
    for one, other in zip(left, right, strict=True):
        assert np.array_equal(one.dense_BI, other.dense_BI)
        assert np.array_equal(one.bags.values, other.bags.values)
        assert np.array_equal(one.label_B, other.label_B)


def assert_rows_whole(batch, all_records):
    records = all_records[batch.bags.values[0]]
    assert np.array_equal(batch.label_B, records.view(np.float32)[:, 0])
    assert np.array_equal(batch.dense_BI, records.view(np.float32)[:, 1:14])
    assert np.array_equal(batch.bags.values, records[:, 14:].T)


def test_batches_have_the_layout_that_the_model_reads(shards, records):
    batch, _ = make_loader(shards, batch_size=50).read(START)
    assert_rows_whole(batch, records)
    for array, dtype, shape in (
        (batch.dense_BI, np.float32, (50, 13)),
        (batch.bags.values, np.int64, (26, 50)),
        (batch.label_B, np.float32, (50,)),
    ):
        assert array.dtype == dtype
        assert array.shape == shape
        assert array.flags.c_contiguous
        assert array.flags.writeable


@pytest.mark.parametrize("block_rows", [1, 7, 100, TRAIN_ROWS, 5000])
@pytest.mark.parametrize("batch_size", [1, 16, 250, TRAIN_ROWS])
def test_an_epoch_gives_every_row_once_and_drops_what_fills_no_batch(
    shards, batch_size, block_rows
):
    loader = make_loader(shards, batch_size=batch_size, shuffle_block_rows=block_rows)
    batches, states = walk(loader, START, loader.steps_per_epoch)
    seen = rows_of(batches)
    assert states[-1] == LoaderState(1, 0, 0)
    assert all(state.epoch == 0 for state in states[:-1])
    assert len(set(seen.tolist())) == len(seen) == TRAIN_ROWS - TRAIN_ROWS % batch_size
    assert 0 <= seen.min() <= seen.max() < TRAIN_ROWS
    assert not np.array_equal(seen, np.arange(len(seen)))


@given(
    batch_size=st.integers(1, 130),
    block_rows=st.integers(1, 300),
    read_rows=st.integers(1, 400),
    shuffle=st.booleans(),
    seed=st.integers(0, 2**63 - 1),
    data=st.data(),
)
def test_resuming_anywhere_goes_on_as_if_unbroken(
    shards, batch_size, block_rows, read_rows, shuffle, seed, data
):
    options = {"batch_size": batch_size, "shuffle_block_rows": block_rows}
    options |= {"shuffle_read_rows": read_rows, "shuffle": shuffle, "seed": seed}
    loader = make_loader(shards, **options)
    steps = min(40, 2 * loader.steps_per_epoch + 1)
    first_step = data.draw(st.integers(0, 2 * loader.steps_per_epoch))
    _, states = walk(loader, START, first_step)
    unbroken, _ = walk(loader, states[-1], steps)
    cut = data.draw(st.integers(0, steps))
    _, later = walk(loader, states[-1], cut)
    resumed, _ = walk(make_loader(shards, **options), later[-1], steps - cut)
    assert_equal_batches(unbroken[cut:], resumed)


@given(
    trainers=st.integers(1, 4),
    batch_size=st.integers(8, 60),
    block_rows=st.integers(1, 300),
    shuffle=st.booleans(),
)
def test_the_parts_of_all_trainers_are_the_global_batch(
    shards, trainers, batch_size, block_rows, shuffle
):
    options = {"shuffle_block_rows": block_rows, "shuffle": shuffle}
    whole = make_loader(shards, batch_size=trainers * batch_size, **options)
    steps = whole.steps_per_epoch + 1
    batches, states = walk(whole, START, steps)
    parts = []
    for trainer in range(trainers):
        part = make_loader(
            shards, batch_size=batch_size, trainer=trainer, trainers=trainers, **options
        )
        part_batches, part_states = walk(part, START, steps)
        assert part_states == states
        parts.append(part_batches)
    for step, batch in enumerate(batches):
        pieces = [one[step] for one in parts]
        # any loader gives the part of any trainer
        assert_equal_batches([part.part(states[step], one) for one in range(trainers)], pieces)
        assert part.after(states[step]) == states[step + 1]
        ids_FB = np.concatenate([one.bags.values for one in pieces], axis=1)
        assert np.array_equal(batch.bags.values, ids_FB)
        assert np.array_equal(batch.dense_BI, np.concatenate([p.dense_BI for p in pieces]))
        assert np.array_equal(batch.label_B, np.concatenate([p.label_B for p in pieces]))


@pytest.mark.parametrize("ahead", [0, 1, 5])
def test_batches_come_with_those_after_them(ahead):
    found = list(with_coming(iter("abcd"), ahead))
    expected = [("a", "bcd"), ("b", "cd"), ("c", "d"), ("d", "")]
    assert found == [(batch, tuple(after[:ahead])) for batch, after in expected]


@pytest.mark.parametrize("block_rows", [100, TRAIN_ROWS])
def test_order_depends_on_seed_and_epoch_only(shards, block_rows):
    def epochs(seed):
        loader = make_loader(shards, seed=seed, shuffle_block_rows=block_rows)
        batches, _ = walk(loader, START, 2 * loader.steps_per_epoch)
        rows = rows_of(batches)
        return rows[: len(rows) // 2], rows[len(rows) // 2 :]

    first, second = epochs(seed=3)
    again, _ = epochs(seed=3)
    other, _ = epochs(seed=4)
    assert np.array_equal(first, again)
    assert not np.array_equal(first, second)
    assert not np.array_equal(first, other)
    assert (first == second).mean() < 0.05
    later, _ = make_loader(shards, shuffle_block_rows=block_rows).read(LoaderState(1, 0, 0))
    assert np.array_equal(later.bags.values[0], second[:16])


def test_a_block_is_made_of_whole_runs_from_everywhere(shards):
    loader = make_loader(shards, batch_size=10, shuffle_block_rows=300, shuffle_read_rows=30)
    batches, states = walk(loader, START, 30)
    assert any(state.block == 1 for state in states)
    first = [batch for batch, state in zip(batches, states, strict=False) if state.block == 0]
    rows = rows_of(first)
    runs = sorted(set((rows // 30).tolist()))
    assert len(runs) == 10
    assert runs != list(range(runs[0], runs[0] + 10))
    # The rows of ten runs meet in every batch of ten.
    assert np.mean([len(set((batch.bags.values[0] // 30).tolist())) for batch in batches]) > 5


def test_without_shuffling_rows_come_in_file_order(shards):
    loader = make_loader(shards, shuffle=False)
    batches, _ = walk(loader, START, loader.steps_per_epoch + 1)
    rows = rows_of(batches)
    assert np.array_equal(rows[:-16], np.arange(TRAIN_ROWS - TRAIN_ROWS % 16))
    assert np.array_equal(rows[-16:], np.arange(16))


@given(seed=st.integers(0, 2**63 - 1), count=st.integers(0, 300))
def test_permutation_is_one_and_follows_the_hash(seed, count):
    def splitmix64(state):
        mask = 2**64 - 1
        state = (state ^ (state >> 30)) * 0xBF58476D1CE4E5B9 & mask
        state = (state ^ (state >> 27)) * 0x94D049BB133111EB & mask
        return state ^ (state >> 31)

    order = permutation(seed, count)
    assert order.dtype == np.uint32
    keys = [splitmix64((number * 0x9E3779B97F4A7C15 + seed) % 2**64) for number in range(count)]
    bits = max(count - 1, 0).bit_length()
    assert order.tolist() == sorted(range(count), key=lambda number: (keys[number] >> bits, number))


def test_permutations_are_even():
    places = np.array([permutation(seed, 8) for seed in range(4000)])
    counts = np.array([np.bincount(places[:, place], minlength=8) for place in range(8)])
    assert np.abs(counts - 500).max() < 5 * np.sqrt(500)


def test_a_state_saved_with_another_global_batch_goes_on(shards):
    loader = make_loader(shards, batch_size=16)
    _, states = walk(loader, START, loader.steps_per_epoch - 1)
    wider = make_loader(shards, batch_size=64)
    _, after = wider.read(states[-1])
    assert after == walk(wider, LoaderState(1, 0, 0), 1)[1][-1]


@pytest.mark.parametrize(
    "state", [LoaderState(0, 11, 0), LoaderState(0, 0, 100), LoaderState(0, -1, 0)]
)
def test_a_state_of_other_data_is_refused(shards, state):
    with pytest.raises(DataError, match="does not fit 1013 training rows in blocks of 100"):
        make_loader(shards).read(state)


def test_a_batch_larger_than_the_data_is_refused(shards):
    make_loader(shards, batch_size=TRAIN_ROWS)
    with pytest.raises(
        ConfigError, match="train.batch_size = 507: a step of 2 trainer.* 1,014 rows.* 1,013"
    ):
        make_loader(shards, batch_size=507, trainers=2)


@pytest.mark.parametrize("batch_size", [1, 64, 101, 4096])
def test_evaluation_reads_all_rows_in_order(shards, records, batch_size):
    rows = shards.test_rows("day")
    batches = list(sequential_batches(shards, rows, batch_size))
    assert rows_of(batches).tolist() == list(rows)
    assert all(len(batch.label_B) == batch_size for batch in batches[:-1])
    for batch in batches:
        assert_rows_whole(batch, records)


@pytest.mark.parametrize("ahead", [0, 1, 5])
def test_batches_that_are_read_ahead_are_those_that_come(shards, ahead):
    batches, states = walk(make_loader(shards), START, 90)  # over the end of an epoch
    reads = []

    def read(state):
        reads.append(state)
        return make_loader(shards).read(state)

    read_ahead = ReadAhead(read, ahead)
    for step in [*range(80), 20, 21]:
        batch, after, coming = read_ahead(states[step])
        assert after == states[step + 1]
        assert_equal_batches([batch, *coming], batches[step : step + 1 + ahead])
    assert len(reads) == 80 + ahead + 2 + ahead  # each once, but after a jump
