"""Files laid out as those of the BARS leaderboards, of drawn rows or of Criteo's text."""

from __future__ import annotations

import csv
import gzip
import math
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

INTEGERS = [f"I{k}" for k in range(1, 14)]
CATEGORIES = [f"C{k}" for k in range(1, 27)]
FEATURES = [f"feat_{k}" for k in range(1, 23)]
HEADERS = {
    "bars_criteo_x1": ["label", *INTEGERS, *CATEGORIES],
    "bars_criteo_x4": ["Label", *INTEGERS, *CATEGORIES],
    "bars_avazu_x1": ["label", *FEATURES],
}
SIZE = 60  # categories of a column
TOLD = 6  # columns that say something of the label
Row = list[object]


def write_drawn(folder: Path, experiment: str, rows: int) -> None:
    """train.csv, valid.csv and test.csv, 7:1:2; labels follow from some columns of both kinds."""
    rng = np.random.default_rng(len(experiment))
    num_integers = 0 if experiment == "bars_avazu_x1" else len(INTEGERS)
    num_categories = len(HEADERS[experiment]) - 1 - num_integers
    integers_RI = np.floor(rng.pareto(1.0, (rows, num_integers)) * 3).astype(np.int64) - 1
    ids_RF = np.minimum(rng.zipf(1.3, (rows, num_categories)) - 1, SIZE - 1)
    effects_FV = rng.normal(0, 1, (TOLD, SIZE))
    logit_R = effects_FV[np.arange(TOLD), ids_RF[:, :TOLD]].sum(1) / 2
    logit_R += np.log1p(np.maximum(integers_RI[:, :2], 0)).sum(1) / 2
    label_R = rng.random(rows) < 1 / (1 + np.exp(-logit_R + logit_R.mean() + 1))
    hidden_RI, hidden_RF = rng.random(integers_RI.shape) < 0.1, rng.random(ids_RF.shape) < 0.05

    def lines() -> Iterator[Row]:
        for row in range(rows):
            if experiment == "bars_criteo_x4":
                drawn = zip(integers_RI[row].tolist(), hidden_RI[row], strict=True)
                numbers: Row = ["" if is_hidden else x for x, is_hidden in drawn]
                drawn = zip(ids_RF[row].tolist(), hidden_RF[row], strict=True)
                texts: Row = [
                    "" if is_hidden else f"{x * 0x9E3779 + 7:08x}" for x, is_hidden in drawn
                ]
            else:
                numbers = [f"{math.log1p(max(int(x), 0)) / 9:.6f}" for x in integers_RI[row]]
                texts = [int(x) + SIZE * k for k, x in enumerate(ids_RF[row])]
            yield [int(label_R[row]), *numbers, *texts]

    _write(folder, experiment, lines(), lambda row: row % 10)


def write_criteo(folder: Path, experiment: str, text: Path) -> None:
    """The same of Criteo's text: as it is for x4, numbers scaled and categories numbered for x1."""
    numbered: defaultdict[str, dict[str, int]] = defaultdict(dict)

    def lines() -> Iterator[Row]:
        with gzip.open(text, "rt") if text.suffix == ".gz" else text.open() as file:
            for line in file:
                label, *values = line.rstrip("\n").split("\t")
                if experiment == "bars_criteo_x4":
                    yield [label, *values]
                    continue
                numbers = [f"{math.log1p(max(int(x or 0), 0)) / 9:.6f}" for x in values[:13]]
                ids = [
                    numbered[name].setdefault(one, len(numbered[name]))
                    for name, one in zip(CATEGORIES, values[13:], strict=True)
                ]
                yield [label, *numbers, *ids]

    _write(folder, experiment, lines(), lambda row: row * 7919 % 10)


def _write(
    folder: Path, experiment: str, lines: Iterator[Row], tenth: Callable[[int], int]
) -> None:
    files = {name: (folder / f"{name}.csv").open("w") for name in ("train", "valid", "test")}
    writers = {name: csv.writer(file) for name, file in files.items()}
    for writer in writers.values():
        writer.writerow(HEADERS[experiment])
    for row, line in enumerate(lines):
        part = tenth(row)
        writers["valid" if part == 0 else "test" if part < 3 else "train"].writerow(line)
    for file in files.values():
        file.close()
