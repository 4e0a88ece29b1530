"""Writes a click log that drifts: a Parquet file a day, and the best log-loss anybody can reach.

    python scripts/rows/drifting.py FOLDER --days 7 --rows 2000000

Each day as many ids of each column leave as come (`--new`, of those that are there), some of them
popular. A teacher labels the rows: an effect of each id that swings over weeks, the product of a
user's and an item's vectors, and weights of the numbers that turn a little each day. The same
arguments write the same rows.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from dlrm_hybrid.data.sources.arrow import pa, parquet

Floats = npt.NDArray[np.float64]

IDS = {"user": 20_000, "item": 4_000, "shop": 500, "city": 60}
"""Columns, and ids of each that are there on a day of 200,000 rows; with fewer rows fewer."""
ROWS_OF_IDS = 200_000
NUMBERS = ("age", "price", "hour")
LATENT = 4
BIAS = -1.2
TURN = 0.15  # of the numbers' weights, in radians a day
SWING = 0.25  # of an id's effect
FLATNESS = 0.7  # 0: all ids are as popular
SCHEMA = """
label: clicked
dense: [{{name: age}}, {{name: price}}, {{name: hour}}]
categorical:
  - {{name: user, min_count: {least}}}
  - {{name: item, min_count: {least}}}
  - {{name: shop}}
  - {{name: city}}
split: {{by: file, test: [{test}]}}
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Log:
    """A log of several days.

    Attributes:
        rows: of each day.
        days: their number.
        new: share of the ids of a column that are new each day.
        drift: how fast effects swing and weights turn, times `SWING` and `TURN`.
        seed: of everything drawn.
    """

    rows: int
    days: int
    new: float = 0.03
    drift: float = 1.0
    seed: int = 0

    def day(self, number: int) -> tuple[Any, float]:
        """The rows of a day, from 1, and the teacher's mean log-loss on them."""
        draw = np.random.default_rng([self.seed, number])
        x_NI = draw.normal(size=(self.rows, len(NUMBERS)))
        logit_N: Floats = BIAS + x_NI @ self._weights(number)
        columns: dict[str, Any] = dict(zip(NUMBERS, x_NI.astype(np.float32).T, strict=True))
        vectors: list[Floats] = []
        for place, (name, size) in enumerate(IDS.items()):
            ids_N, effect_N, vector_NL = self._drawn(place, self._size(size), number, draw)
            columns[name] = pa.array([f"{name} {one}" for one in ids_N.tolist()])
            logit_N += effect_N
            vectors.append(vector_NL)
        logit_N += (vectors[0] * vectors[1]).sum(1)
        click_N = draw.random(self.rows) < 1 / (1 + np.exp(-logit_N))
        columns["clicked"] = click_N.astype(np.int8)
        wrong_N: Floats = np.where(click_N, -logit_N, logit_N)
        loss = float(np.logaddexp(0, wrong_N).mean())
        return pa.table(columns), loss

    def _size(self, size: int) -> int:
        return max(20, size * self.rows // ROWS_OF_IDS)

    def _weights(self, day: int) -> Floats:
        turned = TURN * self.drift * day
        first, second = np.cos(turned), np.sin(turned)
        return 0.6 * np.array([first, second, first - second])

    def _drawn(
        self, column: int, size: int, day: int, draw: np.random.Generator
    ) -> tuple[npt.NDArray[np.int64], Floats, Floats]:
        """The ids of a day's rows in a column, their effects and their vectors."""
        every = size + round(self.new * size) * self.days
        own = np.random.default_rng([self.seed, 1_000_000 + column])
        popularity_V: Floats = own.random(every) ** -FLATNESS
        amplitude_V, phase_V = own.normal(0, 0.7, every), own.uniform(0, 2 * np.pi, every)
        vector_VL = own.normal(0, 0.5, (every, LATENT))
        first = round(self.new * size) * (day - 1)
        there: Floats = np.cumsum(popularity_V[first : first + size])
        drawn_N: Floats = draw.random(self.rows) * float(there[-1])
        ids_N = first + np.searchsorted(there, drawn_N).astype(np.int64)
        effect_V = amplitude_V * np.cos(phase_V + SWING * self.drift * day)
        return ids_N, effect_V[ids_N], vector_VL[ids_N]


def write(log: Log, folder: Path) -> list[float]:
    """Write `day1.parquet` … and `day1.yaml` …, whose test part is the day after.

    Returns:
        the teacher's log-loss of each day.
    """
    folder.mkdir(parents=True, exist_ok=True)
    losses: list[float] = []
    for number in range(1, log.days + 1):
        table, loss = log.day(number)
        parquet.write_table(table, folder / f"day{number}.parquet")
        test = f"day{number + 1}.parquet"
        (folder / f"day{number}.yaml").write_text(SCHEMA.format(least=2, test=test))
        losses.append(loss)
    return losses


def arguments(doc: str | None) -> argparse.ArgumentParser:
    """A parser with the arguments of a log."""
    parser = argparse.ArgumentParser(
        description=doc, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("--days", type=int, default=3)
    parser.add_argument("--rows", type=int, default=4_000, help="of a day")
    parser.add_argument("--new", type=float, default=0.03, help="share of new ids a day")
    parser.add_argument("--drift", type=float, default=1.0, help="0 for a log that stays as it is")
    parser.add_argument("--seed", type=int, default=0)
    return parser


def log_of(options: argparse.Namespace) -> Log:
    """The log that arguments ask for."""
    return Log(
        rows=options.rows,
        days=options.days,
        new=options.new,
        drift=options.drift,
        seed=options.seed,
    )


def main() -> None:
    """Write the files, print the losses."""
    options = arguments(__doc__).parse_args()
    for number, loss in enumerate(write(log_of(options), options.folder), 1):
        print(f"day {number}: {options.folder}/day{number}.parquet, best log-loss {loss:.5f}")


if __name__ == "__main__":
    main()
