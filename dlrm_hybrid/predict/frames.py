"""Blocks of a DataFrame with the raw values of columns, and of files that pandas reads.

Shapes: R rows.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import numpy.typing as npt

from dlrm_hybrid.data.schema import Schema
from dlrm_hybrid.data.sources.criteo import MISSING_KEY
from dlrm_hybrid.predict.blocks import Block
from dlrm_hybrid.types import DataError

if TYPE_CHECKING:
    import pandas as pd

Series = Any
"""A column of a frame; pandas has no types that say of what."""
_KEY = re.compile(r"[0-9a-fA-F]{8}")
_SHOWN_CHARACTERS = 40


def block_of(
    frame: pd.DataFrame,
    schema: Schema,
    source: str,
    keep: Sequence[str] = (),
    where: Callable[[int], str] | None = None,
) -> Block:
    """The rows of a frame; its label where it has one.

    Args:
        frame: with all feature columns.
        schema: of the rows that the model was trained on, of Criteo's.
        source: what it is, for messages.
        keep: columns to pass on.
        where: what a row is called, from 0; None for its number in the frame.

    Raises:
        DataError: a column is missing, or a value is none of its column.
    """
    where = where or (lambda row: f"{source}: row {row:,} (counted from 0)")
    features = [one.name for one in (*schema.dense, *schema.categorical)]
    missing = [name for name in (*features, *keep) if name not in frame.columns]
    if missing:
        raise DataError(f"{source}: has no column {', '.join(missing)}")
    columns: Mapping[str, Series] = {str(name): frame[name] for name in frame.columns}
    dense = [_logarithm(columns[one.name], one.name, where) for one in schema.dense]
    keys = [_keys(columns[one.name], one.name, where) for one in schema.categorical]
    label = schema.label
    return Block(
        dense_RI=np.stack(dense, 1),
        keys_FR=np.stack(keys),
        label_R=_labels(columns[label], label, where) if label in columns else None,
        kept={name: np.asarray(columns[name]) for name in keep},
        where=where,
    )


def _logarithm(column: Series, name: str, where: Callable[[int], str]) -> npt.NDArray[np.float32]:
    """log(x + 1) as `prepare` takes it: in float64, missing and negative x as 0."""
    value_R = _numbers(column, name, where)
    value_R = np.where(np.isnan(value_R), 0.0, value_R)
    wrong = np.flatnonzero(np.isinf(value_R) | (value_R != np.floor(value_R)))
    if len(wrong):
        row = int(wrong[0])
        raise DataError(f"{where(row)}: {name}: {_shown(column.iloc[row])} is not an integer")
    return np.log(np.maximum(value_R, 0.0) + 1.0).astype(np.float32)


def _numbers(column: Series, name: str, where: Callable[[int], str]) -> npt.NDArray[np.float64]:
    import pandas as pd

    numbers = cast(Series, pd.to_numeric(column, errors="coerce"))
    value_R: npt.NDArray[np.float64] = numbers.to_numpy(np.float64, na_value=np.nan)
    wrong = np.flatnonzero(np.isnan(value_R) & ~_is_missing(column))
    if len(wrong):
        row = int(wrong[0])
        raise DataError(f"{where(row)}: {name}: {_shown(column.iloc[row])} is not a number")
    return value_R


def _keys(column: Series, name: str, where: Callable[[int], str]) -> npt.NDArray[np.uint32]:
    """Eight hexadecimal digits as numbers; each distinct one is read once."""
    import pandas as pd

    code_R, found = pd.factorize(column, use_na_sentinel=True)
    categories = [str(one) for one in found]
    for number, text in enumerate(categories):
        if text and not _KEY.fullmatch(text):
            row = int(np.flatnonzero(code_R == number)[0])
            what = f"{_shown(text)} is not eight hexadecimal digits"
            raise DataError(f"{where(row)}: {name}: {what}")
    # After the last one, which a missing value's code -1 means, comes the key of these.
    keys = [int(text, 16) if text else MISSING_KEY for text in categories]
    return np.array([*keys, MISSING_KEY], np.uint32)[code_R]


def _labels(column: Series, name: str, where: Callable[[int], str]) -> npt.NDArray[np.float32]:
    value_R = _numbers(column, name, where)
    wrong = np.flatnonzero((value_R != 0) & (value_R != 1))
    if len(wrong):
        row = int(wrong[0])
        raise DataError(f"{where(row)}: {name}: {_shown(column.iloc[row])} is neither 0 nor 1")
    return value_R.astype(np.float32)


def _is_missing(column: Series) -> npt.NDArray[np.bool_]:
    missing: Any = column.isna() | (column.astype(str) == "")
    return np.asarray(missing, np.bool_)


def _shown(value: object) -> str:
    text = value if isinstance(value, str) else str(value)
    return ascii(text[:_SHOWN_CHARACTERS]) + ("…" if len(text) > _SHOWN_CHARACTERS else "")
