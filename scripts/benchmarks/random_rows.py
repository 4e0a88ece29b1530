"""Random rows for benchmarks: Criteo's shape and table sizes, ids by a power law, no meaning.

Shapes: R rows, I = 13 integer features, F = 26 categorical features, W = 40 words of a record.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from dlrm_hybrid.data import manifest as manifests
from dlrm_hybrid.data.format import FIRST_DENSE_WORD, FIRST_ID_WORD, NUM_DENSE, RECORD_WORDS
from dlrm_hybrid.data.manifest import Manifest, Semantics, Shard, ShardChecksums

CLICK_RATE = 0.256  # of Criteo Kaggle


@dataclass(frozen=True, slots=True)
class RandomRows:
    """Rows as counts: counts_RI and ids_RF int32, label_R int32 of 0 and 1."""

    counts_RI: npt.NDArray[np.int32]
    ids_RF: npt.NDArray[np.int32]
    label_R: npt.NDArray[np.int32]


def draw_rows(table_rows: tuple[int, ...], rows: int, seed: int) -> RandomRows:
    """Draw rows; the id of rank r of a table comes with probability about 1/r."""
    rng = np.random.default_rng(seed)
    counts_RI = np.minimum(rng.pareto(0.7, (rows, NUM_DENSE)), 1e6).astype(np.int32)
    sizes_F = np.array(table_rows, np.float64)
    ids_RF = (sizes_F + 1) ** rng.random((rows, len(table_rows))) - 1
    label_R = rng.random(rows) < CLICK_RATE
    return RandomRows(
        counts_RI, np.minimum(ids_RF, sizes_F - 1).astype(np.int32), label_R.astype(np.int32)
    )


def write_shards(folder: Path, rows: RandomRows, table_rows: tuple[int, ...]) -> None:
    """Write rows as a prepared folder of two days; the test day holds the last row only."""
    records_RW = np.empty((len(rows.label_R), RECORD_WORDS), np.uint32)
    floats_RW = records_RW.view(np.float32)
    floats_RW[:, 0] = rows.label_R
    floats_RW[:, FIRST_DENSE_WORD:FIRST_ID_WORD] = np.log1p(rows.counts_RI, dtype=np.float32)
    records_RW.view(np.int32)[:, FIRST_ID_WORD:] = rows.ids_RF
    days = [
        _write_day(folder / "day_0.bin", records_RW[:-1]),
        _write_day(folder / "day_1.bin", records_RW[-1:]),
    ]
    semantics = Semantics(
        days=2,
        day_split="files",
        vocabulary="all_days",
        min_count=0,
        max_ind_range=0,
        on_bad_row="error",
    )
    manifest = Manifest(
        format=manifests.FORMAT,
        semantics=semantics,
        sources=(),
        days=tuple(days),
        table_rows=table_rows,
        out_of_vocabulary=False,
        vocabulary_xxh3=32 * "0",
        bad_rows=0,
        zero_keys=0,
    )
    manifests.write(folder, manifest)


def _write_day(path: Path, records_RW: npt.NDArray[np.uint32]) -> Shard:
    path.write_bytes(records_RW.data)
    checksums = ShardChecksums()
    checksums.update(records_RW)
    return checksums.shard(path.name, int(records_RW.view(np.float32)[:, 0].sum()))
