"""Updates of rows of tables against numpy, however often ids come and whatever bags they are in."""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from dlrm_hybrid.kernels.rows import (
    AdamRates,
    Gradients,
    bag_keys,
    sort_by_row,
    update_adagrad,
    update_adam,
    update_sgd,
)

Float32s = NDArray[np.float32]
Float64s = NDArray[np.float64]
Int64s = NDArray[np.int64]

SHIFT = 8
LR, EPS, BETAS = 0.1, 1e-6, (0.9, 0.99)
RATES = ((0.1, 1e-6), (0.3, 1e-3))


class Case(NamedTuple):
    """Two tables with the bags of a batch of them, table after table, and D."""

    rows_F: Int64s
    ids_K: Int64s
    offsets_E: Int64s
    dim: int
    seed: int

    @property
    def starts(self) -> Int64s:
        return np.cumsum(self.rows_F) - self.rows_F

    @property
    def bags(self) -> int:
        return (len(self.offsets_E) - 1) // 2

    def given(self) -> Gradients:
        keys_K = np.empty(len(self.ids_K), np.int64)
        given = (self.ids_K, self.offsets_E, self.starts, self.rows_F)
        assert bag_keys(*given, self.bags, SHIFT, keys_K) == -1
        expected_K = np.sort(keys_K)
        keys_K = sort_by_row(keys_K, self.rows_F.sum(), SHIFT)
        assert np.array_equal(keys_K, expected_K)
        return Gradients(keys_K, SHIFT, self.drawn(2 * self.bags))

    def drawn(self, rows: int) -> Float32s:
        rng = np.random.default_rng(self.seed)
        return rng.standard_normal((rows, self.dim)).astype(np.float32)

    def sums(self) -> dict[int, Float64s]:
        """Of the gradients of each row among those of both tables."""
        gradient_GD = self.drawn(2 * self.bags).astype(np.float64)
        found: dict[int, Float64s] = {}
        for bag in range(2 * self.bags):
            table, row = divmod(bag, self.bags)
            for id_ in self.ids_K[self.offsets_E[bag] : self.offsets_E[bag + 1]]:
                at = int(self.starts[table] + id_)
                found[at] = found.get(at, np.zeros(self.dim)) + gradient_GD[2 * row + table]
        return found


@st.composite
def cases(draw: st.DrawFn) -> Case:
    rows = [draw(st.integers(1, 6)) for _ in range(2)]
    bags = draw(st.integers(0, 6))
    sizes = [draw(st.integers(0, 4)) for _ in range(2 * bags)]
    ids = [
        draw(st.integers(0, rows[bag >= bags] - 1))
        for bag, size in enumerate(sizes)
        for _ in range(size)
    ]
    return Case(
        rows_F=np.array(rows, np.int64),
        ids_K=np.array(ids, np.int64),
        offsets_E=np.cumsum([0, *sizes]),
        dim=draw(st.sampled_from([1, 3, 8, 10])),
        seed=draw(st.integers(0, 99)),
    )


def sgd(weight: Float64s, state: list[Float64s], gradient: Float64s, table: int) -> None:
    weight -= LR * gradient


def adagrad(weight: Float64s, state: list[Float64s], gradient: Float64s, table: int) -> None:
    (squares,) = state
    squares += gradient**2 if len(squares) > 1 else np.mean(gradient**2)
    weight -= LR * gradient / (np.sqrt(squares) + EPS)


def adam(weight: Float64s, state: list[Float64s], gradient: Float64s, table: int) -> None:
    means, squares = state
    rate, floor = RATES[table]
    means += (1 - BETAS[0]) * (gradient - means)
    square = gradient**2 if len(squares) > 1 else np.mean(gradient**2)
    squares += (1 - BETAS[1]) * (square - squares)
    weight -= rate * means / (np.sqrt(squares) + floor)


def run_sgd(weights_RD: Float32s, state: list[Float32s], given: Gradients, decay: float) -> None:
    update_sgd(weights_RD, given, LR, decay)


def run_adagrad(
    weights_RD: Float32s, state: list[Float32s], given: Gradients, decay: float
) -> None:
    update_adagrad(weights_RD, state[0], given, LR, EPS, decay)


Rule = Callable[[Float64s, list[Float64s], Float64s, int], None]
Run = Callable[[Float32s, list[Float32s], Gradients, float], None]


@pytest.mark.parametrize("decay", [0.0, 0.25])
@pytest.mark.parametrize(
    ("rule", "widths"), [(sgd, ""), (adagrad, "D"), (adagrad, "1"), (adam, "DD"), (adam, "D1")]
)
@given(case=cases())
def test_rows_move_by_the_sums_of_their_gradients(
    case: Case, rule: Rule, widths: str, decay: float
) -> None:
    ends_F = np.cumsum(case.rows_F)
    rates = AdamRates(ends_F, np.array(RATES), *BETAS)

    def run_adam(
        weights_RD: Float32s, state: list[Float32s], given: Gradients, decay: float
    ) -> None:
        update_adam(weights_RD, state[0], state[1], given, rates, decay)

    runs: dict[Rule, Run] = {sgd: run_sgd, adagrad: run_adagrad, adam: run_adam}
    rows = int(ends_F[-1])
    columns = [case.dim if width == "D" else 1 for width in widths]
    first = [case.drawn(rows), *(abs(case.drawn(rows))[:, :count].copy() for count in columns)]
    found = [one.copy() for one in first]
    runs[rule](found[0], found[1:], case.given(), decay)
    expected = [one.astype(np.float64) for one in first]
    sums = case.sums()
    for row, gradient in sums.items():
        table = int(np.searchsorted(ends_F, row, side="right"))
        own = [one[row] for one in expected]
        rule(own[0], own[1:], gradient + decay * own[0], table)
    for one, other, before in zip(found, expected, first, strict=True):
        np.testing.assert_allclose(one, other, rtol=2e-5, atol=2e-5)
        others = np.setdiff1d(np.arange(rows), list(sums))
        assert np.array_equal(one[others], before[others])
    moved = [row for row in sums if not np.array_equal(found[0][row], first[0][row])]
    assert len(moved) == len(sums)


@given(case=cases(), place=st.integers(0, 50), beyond=st.booleans())
def test_an_id_outside_its_table_is_found(case: Case, place: int, beyond: bool) -> None:
    if not len(case.ids_K):
        return
    place %= len(case.ids_K)
    bag = int(np.searchsorted(case.offsets_E, place, side="right")) - 1
    case.ids_K[place] = case.rows_F[bag // case.bags] if beyond else -1
    keys_K = np.empty(len(case.ids_K), np.int64)
    given = (case.ids_K, case.offsets_E, case.starts, case.rows_F)
    assert bag_keys(*given, case.bags, SHIFT, keys_K) == place


@pytest.mark.parametrize("rows", [0, 1, 2, 1024, 1025, 2**20, 2**20 + 1, 34_000_000, 2**50])
def test_keys_of_many_rows_are_sorted(rows: int) -> None:
    draw = np.random.default_rng(rows)
    rows_K = draw.integers(0, max(1, rows), 3000 if rows else 0)
    rows_K[::3] = rows_K[:1]  # one of them is there very often
    keys_K = rows_K << 12 | np.arange(rows_K.size)
    assert np.array_equal(sort_by_row(keys_K.copy(), rows, 12), np.sort(keys_K))


def test_bits_are_the_same_on_every_machine() -> None:
    """Written down once: a processor that multiplies and adds in one go would change them."""
    rng = np.random.default_rng(8)
    ids_K, offsets_E = rng.integers(0, 20, 100), np.arange(0, 102, 2)
    case = Case(np.array([20, 20]), ids_K, offsets_E, dim=8, seed=9)
    rates = AdamRates(np.array([20, 40]), np.array(RATES), *BETAS)
    digest = xxhash.xxh3_64()
    for columns in (8, 1):
        weights = [case.drawn(40) for _ in range(3)]
        means, squares, sums = (np.zeros((40, size), np.float32) for size in (8, columns, columns))
        update_sgd(weights[0], case.given(), LR, 0.01)
        update_adagrad(weights[1], sums, case.given(), LR, EPS, 0.0)
        update_adam(weights[2], means, squares, case.given(), rates, 0.01)
        for array in (*weights, means, squares, sums):
            digest.update(array.tobytes())
    assert digest.hexdigest() == "980fabf74bf1a7fc"
