"""What a folder of shards says about itself: `manifest.json`, written last."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, cast

from dlrm_hybrid.types import DataError

MANIFEST_FILE = "manifest.json"
FORMAT = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Semantics:
    """The options that decide what the rows mean; shards made under others are refused.

    Attributes:
        days: number of consecutive parts; the last one is the test part.
        day_split: `equal_rows` cuts all rows into `days` equal parts in file order, the first ones
            one row longer, as facebookresearch/dlrm; `files` takes one raw file as one day.
        vocabulary: `all_days` gives every category of every day an id, as facebookresearch/dlrm;
            `train_days` knows only those of the training days, all others share id 0.
        min_count: categories seen fewer times than this within the vocabulary's days share id 0;
            0 and 1 keep all.
        max_ind_range: categories are taken modulo this before the vocabulary; 0 leaves them.
        on_bad_row: `error`, `skip` or `quarantine`.
    """

    days: int
    day_split: str
    vocabulary: str
    min_count: int
    max_ind_range: int
    on_bad_row: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceFile:
    """A raw file as it was read: name without folder, size and a hash of its first and last MiB."""

    name: str
    num_bytes: int
    xxh3: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Shard:
    """One day: `rows` records of `format.RECORD_BYTES` in `file`; xxh3-128 over the whole file."""

    file: str
    rows: int
    clicks: int
    xxh3: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """Everything a reader needs to trust the shards.

    Attributes:
        days: one shard per day in order; the last is the test part.
        table_rows: ids in use per categorical column, the shared id 0 included.
        out_of_vocabulary: whether id 0 of every column stands for unknown categories.
        vocabulary_xxh3: xxh3-128 over the xxh3-128 digests of the 26 vocabulary files.
        bad_rows: raw rows that were left out.
        zero_keys: fields that literally held 00000000 and share the id of a missing value.
    """

    format: int
    semantics: Semantics
    sources: tuple[SourceFile, ...]
    days: tuple[Shard, ...]
    table_rows: tuple[int, ...]
    out_of_vocabulary: bool
    vocabulary_xxh3: str
    bad_rows: int
    zero_keys: int

    @property
    def identity(self) -> list[str]:
        """Checksums of the shards: the same rows in the same order, whatever their folder."""
        return [day.xxh3 for day in self.days]

    @property
    def vocabulary(self) -> dict[str, Any]:
        """What decides which category an id means."""
        return {
            "vocabulary_xxh3": self.vocabulary_xxh3,
            "table_rows": list(self.table_rows),
            "out_of_vocabulary": self.out_of_vocabulary,
            "max_ind_range": self.semantics.max_ind_range,
        }

    @property
    def rows(self) -> int:
        """Records in all days."""
        return sum(day.rows for day in self.days)


def write(folder: Path, manifest: Manifest) -> None:
    """Write `manifest.json` into `folder`, whole or not at all, and flush it to the disk."""
    path = folder / MANIFEST_FILE
    unfinished = path.with_suffix(".new")
    with unfinished.open("w", encoding="utf-8") as file:
        json.dump(asdict(manifest), file, indent=1)
        file.flush()
        os.fsync(file.fileno())
    unfinished.replace(path)


def read(folder: Path) -> Manifest:
    """Read the manifest of a prepared folder.

    Raises:
        DataError: there is none, or it is not one of ours; the message names the file.
    """
    path = folder / MANIFEST_FILE
    try:
        raw: Any = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise DataError(f"{folder}: no prepared data here (no {MANIFEST_FILE})") from None
    except (OSError, ValueError) as error:
        raise DataError(f"{path}: cannot be read: {error}") from error
    if not isinstance(raw, dict) or cast(dict[str, Any], raw).get("format") != FORMAT:
        raise DataError(f"{path}: not a manifest of format {FORMAT}")
    fields = cast(dict[str, Any], raw)
    try:
        fields["semantics"] = Semantics(**fields["semantics"])
        fields["sources"] = tuple(SourceFile(**source) for source in fields["sources"])
        fields["days"] = tuple(Shard(**day) for day in fields["days"])
        fields["table_rows"] = tuple(fields["table_rows"])
        return Manifest(**fields)
    except (KeyError, TypeError) as error:
        raise DataError(f"{path}: not a manifest of format {FORMAT}: {error}") from error
