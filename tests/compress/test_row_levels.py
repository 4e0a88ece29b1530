"""Laws of rows and gradients that are sent as levels."""

import re
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from torch import Tensor

from dlrm_hybrid.compress.embedding.ends import Held
from dlrm_hybrid.compress.embedding.memory import (
    Copies,
    LevelOptions,
    Residuals,
    Rows,
    Slots,
    Step,
    Sum,
    values_of,
)
from dlrm_hybrid.compress.embedding.messages import LevelReceiver, LevelSender
from dlrm_hybrid.compress.embedding.trainer import LevelFormat, TrainerMemory
from dlrm_hybrid.compress.embedding.widths import Widths
from dlrm_hybrid.kernels.levels.row_levels import MOST_LEVELS, NO_SLOT, WAYS
from dlrm_hybrid.types import DataError, DivergedError
from dlrm_hybrid.wire.section import SectionError

Float32s = NDArray[np.float32]
DIM = 4
TABLES = (1, 9, 300)
WIDTHS = Widths((4, 4, 3), DIM)
OPTIONS = LevelOptions(row_error=0.05, gradient_error=0.5, copies_rows=32, lifespan=8)
HELD = Held((0, 1, 2), TABLES, WIDTHS)
SEEDS = st.integers(0, 2**32 - 1)
EXPONENTS = st.integers(-30, 10)


def memory_of(
    table_rows: tuple[int, ...], widths: Widths, options: LevelOptions = OPTIONS
) -> TrainerMemory:
    """Of a trainer whose tables one end holds."""
    held = Held(tuple(range(len(table_rows))), table_rows, widths)
    return LevelFormat(options, table_rows).trainer(0, [held])


def some_rows(rng: np.random.Generator) -> Rows:
    """Distinct ids of TABLES; now and then none, now and then all."""
    counts = [rng.integers(0, rows + 1) if rng.random() < 0.9 else rows for rows in TABLES]
    ids = [np.sort(rng.permutation(rows)[:n]) for rows, n in zip(TABLES, counts, strict=True)]
    return Rows(np.concatenate(ids).astype(np.int64), np.array(counts, np.int64))


def is_inside(rows: Rows) -> NDArray[np.bool_]:
    """What of the rows is no zero behind a narrow one."""
    return np.arange(DIM) < np.repeat(WIDTHS.as_array, rows.counts_L)[:, None]


def flat(rows: Rows) -> NDArray[np.int64]:
    """Where the rows are among those of all tables."""
    return rows.ids_K + np.repeat(np.cumsum([0, *TABLES[:-1]]), rows.counts_L)


def messages(rng: np.random.Generator) -> Iterator[tuple[Rows, int]]:
    """Rows that are asked for, and the exponent of the step they come in."""
    exponent = int(rng.integers(-20, 5))
    for _ in range(int(rng.integers(1, 30))):
        if rng.random() < 0.2:
            exponent = int(rng.integers(-20, 5))
        yield some_rows(rng), exponent


@given(SEEDS, st.sampled_from([8, 32, 1000]))
def test_copies_are_equal_and_never_further_than_half_a_step(seed: int, most: int) -> None:
    rng = np.random.default_rng(seed)
    holder, trainer = Copies(TABLES, DIM, most), Copies(TABLES, DIM, most)
    true_RD = rng.normal(size=(sum(TABLES), DIM)).astype(np.float32)
    for rows, exponent in messages(rng):
        true_RD += 10.0 ** rng.uniform(-6, 1) * rng.normal(size=true_RD.shape).astype(np.float32)
        given_KD = true_RD[flat(rows)]
        levels_KD, sent_KD, fresh = holder.send(rows, given_KD, exponent)
        view_KD, also_fresh = trainer.receive(rows, levels_KD, exponent)
        assert np.array_equal(view_KD, sent_KD)
        assert np.array_equal(fresh, also_fresh)
        assert np.array_equal(holder.values_SD, trainer.values_SD)
        assert np.array_equal(holder.slots.held_S2, trainer.slots.held_S2)
        # Float32 rounds the difference, and the copy where a step is less than its last bit.
        moved_KD = np.abs(values_of(levels_KD, exponent))
        largest_KD = np.maximum(np.maximum(np.abs(given_KD), np.abs(view_KD)), moved_KD)
        rounding_KD = 2 * np.spacing(largest_KD)
        assert (np.abs(view_KD - given_KD) <= 2.0 ** (exponent - 1) + rounding_KD).all()


@given(SEEDS, st.sampled_from([8, 32, 1000]))
def test_what_is_sent_and_what_stays_are_gradient_and_residual_bit_for_bit(
    seed: int, most: int
) -> None:
    rng = np.random.default_rng(seed)
    slots = Slots(TABLES, most)
    residuals = Residuals(slots, DIM)
    held_RD = np.zeros((sum(TABLES), DIM), np.float32)
    lost = 0
    for rows, exponent in messages(rng):
        slots_K, fresh = slots.take(rows)
        residuals.forget(fresh)
        kept_R = np.zeros(len(held_RD), bool)
        for table, where in enumerate(slots.of_table):
            ids = slots.held_S2[where, 0][slots.held_S2[where, 0] > 0] - 1
            kept_R[ids + sum(TABLES[:table])] = True
        lost += int(held_RD[~kept_R].any(axis=1).sum())
        held_RD[~kept_R] = 0
        scale = 10.0 ** rng.uniform(-6, 1)
        sum_KD = (scale * rng.normal(size=(len(rows.ids_K), DIM))).astype(np.float32)
        total_KD = sum_KD + held_RD[flat(rows)]
        sent_KD = values_of(residuals.round(rows, sum_KD, exponent), exponent)
        rest_KD = total_KD - sent_KD
        assert (np.abs(rest_KD) <= 2.0 ** (exponent - 1)).all()
        assert np.array_equal(sent_KD + rest_KD, total_KD)
        is_kept_K = slots_K != NO_SLOT
        lost += int(rest_KD[~is_kept_K].any(axis=1).sum())
        assert np.array_equal(residuals.values_SD[slots_K[is_kept_K]], rest_KD[is_kept_K])
        held_RD[flat(rows)] = np.where(is_kept_K[:, None], rest_KD, 0)
    assert residuals.lost == lost
    if most >= max(TABLES):
        assert lost == 0


@given(SEEDS, st.sampled_from([8, 16, 32]))
def test_a_full_set_lets_the_rows_go_that_were_asked_for_the_longest_ago(
    seed: int, most: int
) -> None:
    rng = np.random.default_rng(seed)
    slots, sets = Slots([200], most), most // WAYS
    for _ in range(20):
        ids = np.sort(rng.permutation(200)[: rng.integers(0, 60)]).astype(np.int64)
        before_NW2 = slots.held_S2.copy().reshape(sets, WAYS, 2)
        slots_K, fresh = slots.take(Rows(ids, np.array([len(ids)])))
        after_NW2 = slots.held_S2.reshape(sets, WAYS, 2)
        changed_NW = before_NW2[:, :, 0] != after_NW2[:, :, 0]
        assert np.flatnonzero(changed_NW).tolist() == sorted(fresh.tolist())
        has_slot_K = slots_K != NO_SLOT
        assert (slots.held_S2[slots_K[has_slot_K], 0] == ids[has_slot_K] + 1).all()
        for own in range(sets):
            asked = set((ids[ids % sets == own] + 1).tolist())
            left, kept = before_NW2[own, changed_NW[own]], before_NW2[own, ~changed_NW[own]]
            assert not asked & set(left[left[:, 0] > 0, 0].tolist())
            quiet = [used for tag, used in kept.tolist() if tag not in asked]
            assert max(left[:, 1], default=0) <= min(quiet, default=slots.messages)
            assert len(asked & set(after_NW2[own, :, 0].tolist())) == min(len(asked), WAYS)


@given(SEEDS)
def test_levels_come_back_from_their_bytes(seed: int) -> None:
    rng = np.random.default_rng(seed)
    sender, receiver = LevelSender(WIDTHS, 5), LevelReceiver(WIDTHS, 2)
    for number in range(12):
        rows = some_rows(rng)
        shape = (len(rows.ids_K), DIM)
        levels_KD = rng.geometric(rng.uniform(0.1, 1), shape) - 1
        levels_KD *= rng.choice([-1, 1], shape) * (rng.random((shape[0], 1)) < rng.random())
        if rng.random() < 0.3 and levels_KD.size:
            levels_KD[0, 0] = rng.choice([MOST_LEVELS, -MOST_LEVELS])
        levels_KD *= is_inside(rows)
        if number == 7:
            sender.restart()
        message = sender.encode(levels_KD.astype(np.int32), rows.counts_L, [-number, 60])
        found_KD, exponents = receiver.decode(memoryview(message), rows.counts_L)
        assert exponents == [-number, 60]
        assert np.array_equal(found_KD, levels_KD)


@given(st.binary(max_size=300), SEEDS, st.integers(0, 400), st.integers(0, 7))
def test_any_bytes_give_levels_or_an_error(noise: bytes, seed: int, at: int, bit: int) -> None:
    rng = np.random.default_rng(seed)
    sender, rows = LevelSender(WIDTHS, 5), some_rows(rng)
    levels_KD = rng.integers(-2, 3, (len(rows.ids_K), DIM)).astype(np.int32)
    good = sender.encode(levels_KD, rows.counts_L, [3])
    flipped = bytearray(good)
    flipped[at % len(good)] ^= 1 << bit
    for message in (noise, bytes(flipped), good[: at % len(good)], good + noise[:1]):
        receiver = LevelReceiver(WIDTHS, 1)
        try:
            found_KD, _ = receiver.decode(memoryview(message), rows.counts_L)
        except SectionError:
            continue
        assert (np.abs(found_KD.astype(np.int64)) <= MOST_LEVELS).all()
        assert found_KD.shape == levels_KD.shape


def test_a_message_takes_what_its_levels_are_worth() -> None:
    rng = np.random.default_rng(0)
    rows = Rows(np.arange(4000), np.array([4000]))
    levels_KD = rng.integers(-1, 2, (4000, DIM)) * (rng.random((4000, 1)) < 0.1)
    sender = LevelSender(Widths((DIM,), DIM), 1000)
    sizes = [len(sender.encode(levels_KD.astype(np.int32), rows.counts_L, [0])) for _ in range(4)]
    is_sent = levels_KD.any(axis=1)
    chance = is_sent.mean()
    bits = len(rows.ids_K) * -(chance * np.log2(chance) + (1 - chance) * np.log2(1 - chance))
    share = np.unique(levels_KD[is_sent], return_counts=True)[1] / (is_sent.sum() * DIM)
    bits += is_sent.sum() * DIM * -(share * np.log2(share)).sum()
    assert bits / 8 <= sizes[3] <= 1.02 * bits / 8 + 8


@given(SEEDS)
def test_sums_of_squares_do_not_depend_on_who_holds_a_table(seed: int) -> None:
    rng = np.random.default_rng(seed)
    one = memory_of(TABLES, WIDTHS)
    order = rng.permutation(len(TABLES)).tolist()
    # The first holds no table, and is never asked.
    held = [[], *([table] for table in order)]
    parts = [Held(tuple(own), tuple(TABLES[t] for t in own), WIDTHS.of(own)) for own in held]
    several = LevelFormat(OPTIONS, TABLES).trainer(0, parts)
    nothing = Rows(np.empty(0, np.int64), np.empty(0, np.int64))
    for _ in range(20):
        rows = some_rows(rng)
        ends_L = np.cumsum(rows.counts_L)[:-1]
        true_KD = rng.normal(size=(len(rows.ids_K), DIM)).astype(np.float32) * is_inside(rows)
        sum_KD = (1e-3 * rng.normal(size=true_KD.shape)).astype(np.float32) * is_inside(rows)
        ids_L, true_L, sum_L = (np.split(x, ends_L) for x in (rows.ids_K, true_KD, sum_KD))
        expected = np.split(one.own_rows(0, rows, true_KD), ends_L)
        rows_P = [Rows(ids_L[table], rows.counts_L[table : table + 1]) for table in order]
        for place, table in enumerate(order):
            view_KD = several.own_rows(1 + place, rows_P[place], true_L[table])
            assert np.array_equal(view_KD, expected[table])
        (levels_KD,) = one.round([rows], [sum_KD])
        sums = [sum_KD[:0], *(sum_L[table] for table in order)]
        _, *found = several.round([nothing, *rows_P], sums)
        for table, levels in zip(order, found, strict=True):
            assert np.array_equal(levels, np.split(levels_KD, ends_L)[table])
    assert several.tensors().keys() == one.tensors().keys()
    for name, value in one.tensors().items():
        assert np.array_equal(several.tensors()[name], value), name


@given(SEEDS)
def test_who_goes_on_from_a_checkpoint_does_as_who_was_never_broken(seed: int) -> None:
    rng = np.random.default_rng(seed)
    memory = memory_of(TABLES, WIDTHS)

    def learn(own: TrainerMemory, rng: np.random.Generator) -> list[NDArray[np.generic]]:
        told: list[NDArray[np.generic]] = []
        for _ in range(10):
            rows = some_rows(rng)
            true_KD = rng.normal(size=(len(rows.ids_K), DIM)).astype(np.float32)
            told += [own.own_rows(0, rows, true_KD), *own.round([rows], [true_KD])]
        return told

    learn(memory, rng)
    saved = {name: value.clone() for name, value in memory.tensors().items()}
    again = memory_of(TABLES, WIDTHS)
    again.load(saved)
    holder = LevelFormat(OPTIONS, TABLES).holder(0, HELD)
    holder.load(saved)
    assert holder.exponent == memory.row_step.exponent
    assert np.array_equal(holder.copies.values_SD, memory.parts[0].copies.values_SD)
    for one, other in zip(
        learn(memory, np.random.default_rng(seed)),
        learn(again, np.random.default_rng(seed)),
        strict=True,
    ):
        assert np.array_equal(one, other)


def test_a_checkpoint_of_other_limits_is_refused() -> None:
    one = Widths((DIM,), DIM)
    saved = memory_of((100,), one).tensors()
    with pytest.raises(DataError, match=r"levels 0.slots: .* \[32, 2\], expected .* \[104, 2\]"):
        memory_of((100,), one, replace(OPTIONS, copies_rows=100)).load(saved)


@pytest.mark.parametrize(
    ("forged", "told"),
    [
        (None, "nothing, expected torch.int64 [7]"),
        (torch.zeros(1, dtype=torch.int64), "torch.int64 [1], expected torch.int64 [7]"),
        (torch.zeros(7, dtype=torch.bfloat16), "torch.bfloat16 [7], expected torch.int64 [7]"),
        (torch.tensor([0, 61, 0, 0, 0, 0, 0]), "[0, 61, 0, 0, 0, 0, 0], expected [0, "),
        (torch.tensor([0, 0, -(2**63), 0, 0, 0, 0]), "60, 60"),
        (torch.tensor([2**63 - 1, 0, 0, 0, 0, 0, 0]), "[9223372036854775807, 0"),
        (torch.tensor([-1, 0, 0, 0, 0, 0, 0]), "[-1, 0"),
        (torch.tensor([0, 0, 0, 0, 0, 0, -1]), "0, -1]"),
    ],
)
def test_forged_steps_are_refused_at_both_ends(forged: Tensor | None, told: str) -> None:
    memory = memory_of(TABLES, WIDTHS)
    saved = {name: value.clone() for name, value in memory.tensors().items()}
    del saved["levels.0.steps"]
    if forged is not None:
        saved["levels.0.steps"] = forged
    for end in (memory, LevelFormat(OPTIONS, TABLES).holder(0, HELD)):
        with pytest.raises(DataError, match=f"levels steps: .*{re.escape(told)}"):
            end.load(saved)


@pytest.mark.parametrize("square", [-1.0, 1.7e308])
@pytest.mark.parametrize("name", ["levels.0.0.row_squares", "levels.0.0.gradient_squares"])
def test_forged_squares_are_refused(name: str, square: float) -> None:
    memory = memory_of(TABLES, WIDTHS)
    saved = memory.tensors()
    assert name in saved
    saved[name] = torch.full_like(saved[name], square)
    with pytest.raises(DataError, match=r"_squares: .*, expected 0 to 1e\+300"):
        memory.load(saved)


@pytest.mark.parametrize("bad", [np.nan, np.inf, 3e38])
def test_what_is_no_number_of_steps_is_refused(bad: float) -> None:
    memory = memory_of((9,), Widths((DIM,), DIM))
    rows, good_KD = Rows(np.array([2, 5]), np.array([2])), np.ones((2, DIM), np.float32)
    bad_KD = good_KD.copy()
    bad_KD[1, 2] = bad
    with pytest.raises(DivergedError, match=r"the row of id 5 has an element of .* 2\*\*-"):
        memory.own_rows(0, rows, bad_KD)
    memory.round([rows], [good_KD])
    memory.round([rows], [good_KD])
    memory.round([rows], [good_KD])
    with pytest.raises(DivergedError, match="the gradient of id 5"):
        memory.round([rows], [bad_KD])


@given(EXPONENTS, st.floats(1e-3, 1e3))
def test_a_step_is_the_power_of_two_near_its_part_of_the_mean_square(
    exponent: int, fraction: float
) -> None:
    values_KD = np.full((10, DIM), 2.0**exponent, np.float32)
    step, own = Step(fraction, 8, 0.0), Sum(Widths((DIM,), DIM))
    own.add(Rows(np.arange(10), np.array([10])), values_KD)
    step.renew_if_due([own])
    wanted = 2 * fraction * 2.0**exponent
    assert wanted / 2**0.5 <= 2.0**step.exponent <= wanted * 2**0.5
    assert own.count == 0
