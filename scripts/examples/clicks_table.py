"""Makes a table of clicks like a shop's, to try `data=table` on; prints the best possible AUC.

    python scripts/examples/clicks_table.py FOLDER [--rows 200000]

Writes FOLDER/clicks.csv and FOLDER/clicks.parquet, the same rows in time order: a label, three
dense columns with missing values, five columns of text, one with a list of tags, the time, and a
comment that no model needs. A planted teacher draws the label, so its own AUC and log-loss are the
best that a model can reach on the test part, the rows from TEST_FROM on.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
import pandas as pd
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Int64s = NDArray[np.int64]

BEGIN, DAYS = np.datetime64("2026-03-01T00:00:00"), 30
TEST_FROM = BEGIN + np.timedelta64(27, "D")
SIZES = {"country": 12, "city": 120, "device": 5, "campaign": 300, "customer": 800}
EFFECTS = {"country": 0.5, "city": 0.4, "device": 0.4, "campaign": 0.5, "customer": 0.3}
TAGS, MOST_TAGS = 200, 6
BIAS = -1.6
# So that names are not all ASCII, and some have what CSV must quote.
SYLLABLES = ["al", "ber", "çe", "dø", "él", "fü", "go", "hå", "ki", "ló", "mi", "ño", "œu", "京"]
SPECIAL = (", ", ' "x" ', "|", "  ", "-")


def main() -> None:
    """Write the table, print what the teacher reaches."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("--rows", type=int, default=200_000)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    rows, first, label_R, chance_R = clicks(options.rows, options.seed)
    options.folder.mkdir(parents=True, exist_ok=True)
    rows.to_parquet(options.folder / "clicks.parquet", index=False)
    rows.assign(tags=rows["tags"].map("|".join)).to_csv(options.folder / "clicks.csv", index=False)
    label_R, chance_R = label_R[first:], chance_R[first:]
    print(f"{options.folder}: {options.rows:,} rows, {len(label_R):,} from {TEST_FROM} on to test")
    print(f"best possible there: AUC {auc(label_R, chance_R):.4f}", end="")
    print(f", log-loss {-np.log(np.where(label_R == 1, chance_R, 1 - chance_R)).mean():.4f}")


def auc(label_R: NDArray[np.int8], score_R: Floats) -> float:
    """How often a row with a click scores above one without."""
    rank_R = pd.Series(score_R).rank().to_numpy()
    clicked = int(label_R.sum())
    return float((rank_R[label_R == 1].mean() - (clicked + 1) / 2) / (len(label_R) - clicked))


def clicks(rows: int, seed: int) -> tuple[pd.DataFrame, int, NDArray[np.int8], Floats]:
    """The table, its first test row, and label and chance of a click of each row.

    Args:
        rows: R.
        seed: of all that is drawn.
    """
    draw = np.random.default_rng(seed)
    logit_R = np.full(rows, BIAS)
    columns: dict[str, object] = {}
    for name, size in SIZES.items():
        ids_R, effect_R = _category(draw, rows, size, EFFECTS[name])
        gone_R = draw.random(rows) < 0.02
        logit_R += np.where(gone_R, 0.0, effect_R)  # what cannot be seen has no effect
        names = np.array([*(_word(draw, i) for i in range(size)), None], object)
        columns[name] = names[np.where(gone_R, size, ids_R)]
    for name, (values_R, effect_R, gaps) in _numbers(draw, rows).items():
        gone_R = draw.random(rows) < gaps
        logit_R += np.where(gone_R, 0.0, effect_R)
        columns[name] = np.where(gone_R, np.nan, values_R)
    columns["tags"], effect_R = _tags(draw, rows)
    logit_R += effect_R
    chance_R = 1 / (1 + np.exp(-logit_R))
    label_R = (draw.random(rows) < chance_R).astype(np.int8)
    seconds_R = np.sort(draw.integers(0, DAYS * 86_400, rows))
    shown_R = BEGIN + seconds_R.astype("timedelta64[s]")
    comments = [f"row {i}" for i in range(rows)]
    front = {"clicked": label_R, "shown_at": shown_R}
    table = pd.DataFrame({**front, **columns, "comment": comments})
    return table, int(np.searchsorted(shown_R, TEST_FROM)), label_R, chance_R


def _numbers(draw: np.random.Generator, rows: int) -> dict[str, tuple[Floats, Floats, float]]:
    """Dense columns: values, their effects, and the share that is missing."""
    price_R = draw.lognormal(3, 1, rows).round(2)
    age_R = draw.normal(40, 12, rows).clip(16, 95).round()
    seconds_R = draw.exponential(60, rows).round(1)
    return {
        "price": (price_R, 1.5 - 0.5 * np.log1p(price_R), 0.0),
        "age": (age_R, 0.02 * (age_R - 40), 0.05),
        "seconds_on_page": (seconds_R, 0.4 * np.log1p(seconds_R) - 1.5, 0.03),
    }


def _category(
    draw: np.random.Generator, rows: int, size: int, spread: float
) -> tuple[Int64s, Floats]:
    """Popular and rare categories, each with an effect."""
    weight = 1 / (1 + np.arange(size)) ** 0.8
    ids_R = draw.choice(size, rows, p=weight / weight.sum())
    return ids_R, draw.normal(0, spread, size)[ids_R]


def _tags(draw: np.random.Generator, rows: int) -> tuple[list[list[str]], Floats]:
    """A list of tags for each row, some without any, and the sum of their effects."""
    counts_R = draw.integers(0, MOST_TAGS + 1, rows)
    ids_N, effect_N = _category(draw, int(counts_R.sum()), TAGS, 0.25)
    lists = [[f"tag-{i}" for i in ids] for ids in np.split(ids_N, counts_R.cumsum()[:-1])]
    row_N = np.repeat(np.arange(rows), counts_R)
    return lists, np.bincount(row_N, effect_N, rows).astype(np.float64)


def _word(draw: np.random.Generator, number: int) -> str:
    parts = "".join(draw.choice(SYLLABLES, 3))
    return f"{parts}{SPECIAL[number % 50] if number % 50 < len(SPECIAL) else ''}{number}"


if __name__ == "__main__":
    main()
