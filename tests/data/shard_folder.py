"""Small folders of shards with known rows."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import xxhash

from dlrm_hybrid.data import manifest as manifests
from dlrm_hybrid.data.format import (
    BLOCK_ROWS,
    FIRST_DENSE_WORD,
    FIRST_ID_WORD,
    RECORD_WORDS,
    VOCABULARY_FOLDER,
)
from dlrm_hybrid.data.manifest import Manifest, Semantics, Shard

SEMANTICS = Semantics(
    days=3,
    day_split="equal_rows",
    vocabulary="all_days",
    min_count=0,
    max_ind_range=0,
    on_bad_row="error",
)


def make_records(rows: int, seed: int = 0) -> np.ndarray:
    """uint32 [rows, 40]; the row's number stands in I1 and in C1, all else differs by row too."""
    generator = np.random.default_rng(seed)
    records = np.zeros((rows, RECORD_WORDS), np.uint32)
    floats = records.view(np.float32)
    floats[:, 0] = generator.integers(0, 2, rows)
    floats[:, FIRST_DENSE_WORD:FIRST_ID_WORD] = generator.random((rows, 13), np.float32)
    floats[:, FIRST_DENSE_WORD] = np.arange(rows)
    records[:, FIRST_ID_WORD:] = generator.integers(0, 2**31, (rows, 26))
    records[:, FIRST_ID_WORD] = np.arange(rows)
    return records


def write_folder(
    folder: Path, day_rows: Sequence[int], semantics: Semantics = SEMANTICS
) -> np.ndarray:
    """Write a folder that `open_shards` accepts; returns the records of all days."""
    records = make_records(sum(day_rows))
    write_records(folder, records, day_rows, semantics)
    return records


def write_records(
    folder: Path, records: np.ndarray, day_rows: Sequence[int], semantics: Semantics = SEMANTICS
) -> None:
    """Write these records as `write_folder` does."""
    folder.mkdir(exist_ok=True)
    shards = []
    for day, part in enumerate(np.split(records, np.cumsum(day_rows)[:-1])):
        name = f"day_{day}.bin"
        (folder / name).write_bytes(part.tobytes())
        firsts = range(0, len(part), BLOCK_ROWS)
        blocks = [part[first : first + BLOCK_ROWS].tobytes() for first in firsts]
        shard = Shard(
            file=name,
            rows=len(part),
            clicks=int(np.count_nonzero(part[:, 0])),
            xxh3=xxhash.xxh3_128_hexdigest(part.tobytes()),
            blocks=tuple(xxhash.xxh3_64_hexdigest(block) for block in blocks),
        )
        shards.append(shard)
    manifest = Manifest(
        format=manifests.FORMAT,
        semantics=replace(semantics, days=len(day_rows)),
        sources=(),
        days=tuple(shards),
        table_rows=(max(1, len(records)), *[2**31] * 25),
        out_of_vocabulary=False,
        vocabulary_xxh3=_write_vocabulary(folder),
        bad_rows=0,
        zero_keys=0,
    )
    manifests.write(folder, manifest)


def _write_vocabulary(folder: Path) -> str:
    """Files of keys, all empty; returns the checksum of them all."""
    (folder / VOCABULARY_FOLDER).mkdir(exist_ok=True)
    for column in range(1, 27):
        (folder / VOCABULARY_FOLDER / f"C{column:02d}.bin").touch()
    return xxhash.xxh3_128_hexdigest(26 * xxhash.xxh3_128_digest(b""))
