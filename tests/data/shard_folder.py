"""Small folders of shards with known rows."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import xxhash
from criteo_rows import semantics

from dlrm_hybrid.data import manifest as manifests
from dlrm_hybrid.data.arrays import ArrayWriter, StoredArray, header
from dlrm_hybrid.data.manifest import VOCABULARY_FOLDER, Manifest, Semantics
from dlrm_hybrid.data.prepare import count_clicks

RECORD_WORDS, FIRST_DENSE_WORD, FIRST_ID_WORD = 40, 1, 14
SEMANTICS = semantics(days=3, min_count=0)


def make_records(rows: int, seed: int = 0) -> np.ndarray:
    """uint32 [rows, 40]: label, 13 dense values, 26 ids.

    The row's number stands in I1 and in C1, all else differs by row too.
    """
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
    floats = records.view(np.float32)
    arrays = (
        write_array(folder / "label.npy", floats[:, 0].copy()),
        write_array(folder / "dense.npy", floats[:, FIRST_DENSE_WORD:FIRST_ID_WORD].copy()),
        write_array(folder / "ids.npy", records[:, FIRST_ID_WORD:].view(np.int32).copy()),
    )
    train, test = sum(day_rows[:-1]), day_rows[-1]
    manifest = Manifest(
        format=manifests.FORMAT,
        semantics=replace(semantics, days=len(day_rows)),
        sources=(),
        parts=count_clicks(folder, arrays[0], (train, 0, test)),
        arrays=arrays,
        table_rows=(max(1, len(records)), *[2**31] * 25),
        out_of_vocabulary=(False,) * 26,
        vocabulary_xxh3=_write_vocabulary(folder),
        scales=(None,) * 13,
        bad_rows=0,
        zero_keys=0,
    )
    manifests.write(folder, manifest)


def write_array(path: Path, rows: np.ndarray) -> StoredArray:
    """Write a .npy file as `prepare` does."""
    with ArrayWriter(path, rows.dtype, rows.shape[1] if rows.ndim > 1 else None) as file:
        file.append(rows)
        return file.finish()


def _write_vocabulary(folder: Path) -> str:
    """Files of keys, all empty; returns the checksum of them all."""
    (folder / VOCABULARY_FOLDER).mkdir(exist_ok=True)
    for column in range(1, 27):
        path = folder / VOCABULARY_FOLDER / f"{column}.npy"
        path.write_bytes(header("<u4", (0,)))
    return xxhash.xxh3_128_hexdigest(26 * xxhash.xxh3_128_digest(b""))
