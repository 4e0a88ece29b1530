"""The stored profile, its file format, and how it is measured from raw rows."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import criteo_profile
import numpy as np
import pytest

from dlrm_hybrid.data import profile, synthetic
from dlrm_hybrid.data.profile import NUM_DENSE, WEIGHT_ONE, Staircase
from dlrm_hybrid.types import DataError

PROFILE = profile.builtin("criteo_kaggle")
PATH = Path(profile.__file__).parent / "profiles" / "criteo_kaggle.json"
MAX_BYTES = 150_000
ROWS = 60_000


def ignore(_: int) -> None: ...


def generated(path: Path, rows: int, seed: int) -> Path:
    synthetic.generate(path, rows, seed, PROFILE, ignore)
    return path


@pytest.fixture(scope="module")
def counted(tmp_path_factory: pytest.TempPathFactory) -> criteo_profile.Counts:
    path = generated(tmp_path_factory.mktemp("rows") / "rows.txt", ROWS, 7)
    return criteo_profile.count([path], ignore)


def leaves(value: Any) -> list[Any]:
    if isinstance(value, dict):
        return [leaf for item in value.values() for leaf in leaves(item)]
    return [leaf for item in value for leaf in leaves(item)] if isinstance(value, list) else [value]


def test_the_stored_profile_holds_only_aggregates() -> None:
    text = PATH.read_text(encoding="utf-8")
    raw = json.loads(text)
    assert len(text) <= MAX_BYTES
    assert not re.search(r'"[0-9a-fA-F]{8}"', text)
    for part in ("cardinalities", "integers", "categoricals", "teacher"):
        assert {type(leaf) for leaf in leaves(raw[part])} == {int}
    # categories are ranks, counted from 0: nothing says which values they stood for
    for column, cardinality in zip(PROFILE.categoricals, PROFILE.cardinalities, strict=True):
        assert column.starts[0] == 0
        assert column.stop + (column.missing > 0) == cardinality
        widths = np.diff((*column.starts, column.stop))
        assert (np.diff(np.array(column.weights) / widths) <= 1).all(), "shares fall with the rank"
    assert {"source", "rows", "clicks", "tail"} <= set(raw["provenance"])


def test_a_profile_survives_its_file() -> None:
    text = profile.dumps(PROFILE)
    again = profile.loads(text, "again")
    assert again == PROFILE
    assert profile.read(PATH) == PROFILE
    assert again.digest == PROFILE.digest
    teacher = replace(PROFILE.teacher, bias=PROFILE.teacher.bias + 1)
    assert replace(PROFILE, teacher=teacher).digest != PROFILE.digest


def broken(change: Callable[[dict[str, Any]], None]) -> str:
    raw = json.loads(profile.dumps(PROFILE))
    change(raw)
    return json.dumps(raw)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "x.json: not a profile of format 1"),
        ("[]", "x.json: not a profile of format 1"),
        (broken(lambda raw: raw.update(format=2)), "not a profile of format 1"),
        (broken(lambda raw: raw.pop("teacher")), "teacher: Field required"),
        (broken(lambda raw: raw.update(extra=1)), "extra"),
        (broken(lambda raw: raw["integers"].pop()), "13 integer and 26 categorical columns"),
        (broken(lambda raw: raw["integers"][3]["starts"].reverse()), "column 3: steps are not"),
        (
            broken(lambda raw: raw["categoricals"][2]["weights"].__setitem__(0, 5)),
            "column 15: weights must sum to 4294967296",
        ),
        (broken(lambda raw: raw["integers"][0].update(missing=-1)), "column 0: missing must be"),
        (broken(lambda raw: raw["integers"][0].update(missing_with=39)), "column 0: missing_with"),
        (broken(lambda raw: raw["teacher"]["pairs"].append([0, 26])), "teacher.pairs"),
        (broken(lambda raw: raw["teacher"]["logistic"].pop()), "teacher.logistic needs 1024"),
    ],
)
def test_a_broken_profile_is_refused(text: str, message: str) -> None:
    with pytest.raises(DataError, match=re.escape(message)):
        profile.loads(text, "x.json")


def test_unknown_and_unreadable_profiles_are_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="'avazu' is not one of: criteo_kaggle"):
        profile.builtin("avazu")
    with pytest.raises(DataError, match=r"none\.json: cannot be read"):
        profile.read(tmp_path / "none.json")


def expected_distinct(column: Staircase, rows: int) -> float:
    widths = np.diff((*column.starts, column.stop))
    share = np.array(column.weights) / WEIGHT_ONE / widths
    return float((widths * -np.expm1(rows * np.log1p(-np.minimum(share, 1 - 1e-12)))).sum())


def test_measuring_generated_rows_finds_the_profile_again(counted: criteo_profile.Counts) -> None:
    assert counted.rows == ROWS
    assert abs(counted.clicks / ROWS - PROFILE.click_rate) < 0.01
    integers = criteo_profile.integer_columns(counted)
    categoricals = criteo_profile.categorical_columns(counted, PROFILE.cardinalities)
    known = (*PROFILE.integers, *PROFILE.categoricals)
    for found, column in zip((*integers, *categoricals), known, strict=True):
        assert abs(found.missing - column.missing) / WEIGHT_ONE < 0.011
        assert found.missing_with == column.missing_with
    for found, column in zip(integers, PROFILE.integers, strict=True):
        grid = np.union1d(found.starts, column.starts)[1:]
        assert np.abs(below(found, grid) - below(column, grid)).max() < 0.02
    for found, column in zip(categoricals, PROFILE.categoricals, strict=True):
        assert found.stop == column.stop
        assert abs(found.weights[0] - column.weights[0]) / WEIGHT_ONE < 0.011
        for rows in (ROWS // 4, ROWS, 4 * ROWS):
            ratio = expected_distinct(found, rows) / expected_distinct(column, rows)
            assert 0.85 < ratio < 1.15


def below(column: Staircase, values: np.ndarray) -> np.ndarray:
    edges = np.array((*column.starts, column.stop))
    weight = np.concatenate([[0], np.cumsum(column.weights)]) / WEIGHT_ONE
    return np.interp(values, edges, weight)


def test_rows_that_would_show_single_people_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="9999 rows; a profile needs at least 10000"):
        criteo_profile.count([generated(tmp_path / "rows.txt", 9_999, 0)], ignore)


@pytest.mark.slow
def test_the_stored_profile_is_that_of_the_real_rows(criteo_rows: Path) -> None:
    seen = criteo_profile.count([criteo_rows], ignore)
    if seen.rows != PROFILE.provenance["rows"]:
        pytest.skip(f"{criteo_rows}: other rows than the profile was measured on")
    assert seen.clicks / seen.rows == PROFILE.click_rate
    assert list(criteo_profile.seen_cardinalities(seen)) == PROFILE.provenance["categories_seen"]
    for number, column in enumerate((*PROFILE.integers, *PROFILE.categoricals)):
        missing = seen.missing_CC[number, number] / seen.rows
        assert column.missing == round(missing * WEIGHT_ONE)
    assert criteo_profile.integer_columns(seen) == PROFILE.integers
    made = criteo_profile.categorical_columns(seen, PROFILE.cardinalities)
    for again, stored in zip(made, PROFILE.categoricals, strict=True):
        assert (again.starts, again.stop) == (stored.starts, stored.stop)
        # the fit ends in floating point: another machine may round a weight differently
        assert np.allclose(again.weights, stored.weights, rtol=1e-3, atol=1000)
    assert len(seen.keys) == NUM_DENSE + len(PROFILE.categoricals)
