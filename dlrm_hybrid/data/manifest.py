"""`manifest.json`: describes a folder of shards and the raw files it was made from."""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Annotated, Any, Final, Literal

import xxhash
from pydantic import Field, TypeAdapter, ValidationError

from dlrm_hybrid import disk
from dlrm_hybrid.data.arrays import BLOCK_ROWS, StoredArray, file_fault
from dlrm_hybrid.data.schema import Schema
from dlrm_hybrid.types import DataError

MANIFEST_FILE = "manifest.json"
UNFINISHED_FILE = f".{MANIFEST_FILE}.partial"  # left by a writer that was killed
FORMAT: Final = 3
VOCABULARY_FOLDER = "vocabulary"
WEIGHT_FILE = "weight.npy"
GROUP_FILE = "group.npy"
MOST_BYTES = 1 << 28  # limit of the file: a terabyte of rows has 100 MB of checksums
_Count = Annotated[int, Field(ge=0, lt=2**63)]
_Xxh3 = Annotated[str, Field(pattern=r"^[0-9a-f]{32}$")]


@dataclass(frozen=True, slots=True, kw_only=True)
class Semantics:
    """The options that decide what prepared rows mean; shards made with others are refused.

    All but the last two are for Criteo's rows, and null for a table, whose schema has its own.

    Attributes:
        day_split: `equal_rows` cuts all rows into `days` equal parts in file order, the first ones
            one row longer, like facebookresearch/dlrm; `files` takes each raw file as a day.
    """

    days: int | None
    day_split: str | None
    vocabulary: str | None
    min_count: int | None
    max_ind_range: int | None
    on_bad_row: str
    schema: Schema

    @property
    def options(self) -> dict[str, Any]:
        """The options without the schema, by key of the section `data`."""
        return {key.name: getattr(self, key.name) for key in fields(self) if key.name != "schema"}

    @property
    def shares_id(self) -> tuple[bool, ...]:
        """Whether id 0 is all categories outside the vocabulary, for each categorical column."""
        if self.schema.format == "criteo":
            shares = (self.min_count or 0) > 1 or self.vocabulary == "train_days"
            return (shares,) * len(self.schema.categorical)
        is_partial = self.schema.vocabulary == "train"
        return tuple(
            is_partial
            or column.min_count > 1
            or column.missing == "shared"
            or column.max_rows is not None
            for column in self.schema.categorical
        )

    def differences(self, expected: Semantics) -> list[str]:
        """The options that differ from the expected ones, each with its key and both values."""
        options = expected.options
        return [
            f"data.{name}: prepared with {value!r}, the configuration says {options[name]!r}"
            for name, value in self.options.items()
            if value != options[name]
        ] + self.schema.differences(expected.schema)


@dataclass(frozen=True, slots=True, kw_only=True)
class FileStamp:
    """Identifies a raw file without reading all of it.

    Attributes:
        name: file name without the folder.
        mtime_ns: time of the last change of its bytes, which programs may set.
        ctime_ns: time of the last change of bytes, name or rights, which only the system sets.
        sample_xxh3: xxh3-128 of its first and last MiB and of pieces between.
    """

    name: str
    num_bytes: _Count
    mtime_ns: int
    ctime_ns: int
    inode: int
    sample_xxh3: _Xxh3

    @property
    def content(self) -> tuple[int, str]:
        """Size and sample: equal for copies of a file."""
        return self.num_bytes, self.sample_xxh3


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceFile:
    """A raw file that was read by prepare.

    Attributes:
        xxh3: xxh3-128 of all its bytes.
        copies: stamps of files found to have the same bytes, newest first.
    """

    stamp: FileStamp
    xxh3: _Xxh3
    copies: tuple[FileStamp, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """Size of the training, validation or test part.

    Attributes:
        clicks: number of rows with label 1; of several labels, the first one.
    """

    rows: _Count
    clicks: _Count


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """The parts of the prepared rows, which lie in this order."""

    train: Part
    validation: Part
    test: Part

    def __iter__(self) -> Iterator[Part]:
        return iter((self.train, self.validation, self.test))


@dataclass(frozen=True, slots=True, kw_only=True)
class Scale:
    """Scale of a standardised dense column: (x - mean) / deviation, of the training part."""

    mean: float
    deviation: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Growth:
    """Distinct categories of one column in rows that were prepared on a base.

    Attributes:
        reused: categories that the base has rows for.
        appended: new categories, with rows behind the rows of the base.
        unknown: categories without a row, which share id 0.
        evicted: categories of the base whose rows new ones have taken.
    """

    reused: _Count
    appended: _Count
    unknown: _Count
    evicted: _Count = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Base:
    """The earlier rows whose vocabularies and scales rows were prepared with.

    Attributes:
        meaning_xxh3: `meaning_xxh3` of those rows.
        grows: whether new categories were appended.
    """

    meaning_xxh3: _Xxh3
    grows: bool
    growth: tuple[Growth, ...]

    def fits(self, meaning_xxh3: str, grows: bool) -> bool:
        """Whether these rows have this base, and grow it or not."""
        return (self.meaning_xxh3, self.grows) == (meaning_xxh3, grows)


@dataclass(frozen=True, slots=True, kw_only=True)
class Vectors:
    """Vectors that rows of a table begin with (`vectors` of a categorical column).

    Attributes:
        column: index of the categorical column.
        ids: ids of the categories that have a row.
        values: float32, their vectors.
    """

    column: _Count
    stamp: FileStamp
    categories: _Count
    ids: StoredArray
    values: StoredArray


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """Description and checksums of a folder of shards.

    Attributes:
        arrays: the files with the rows: `label.npy`, `dense.npy`, `ids.npy` for the categorical
            columns with one id a row, `weight.npy` and `group.npy` (hashes) if the schema
            has these, and `ids.<n>.values.npy` and `ids.<n>.offsets.npy` for each multi-hot one,
            and `ids.<n>.weights.npy` where it has weights; n counts all categorical columns from 1.
        table_rows: ids in use per categorical column, the shared id 0 included; equal for columns
            with one table.
        out_of_vocabulary: per categorical column, whether id 0 represents unknown categories.
        vocabulary_xxh3: xxh3-128 over the xxh3-128 digests of the vocabularies.
        scales: scale of each dense column, null if it was not standardised.
        bad_rows: raw rows that were left out.
        zero_keys: fields that literally held 00000000 and share the id of a missing value.
        base: rows whose vocabularies these begin with; None without any.
    """

    format: Literal[3]
    semantics: Semantics
    sources: tuple[SourceFile, ...]
    parts: Parts
    arrays: tuple[StoredArray, ...]
    table_rows: tuple[Annotated[int, Field(ge=1, le=2**31)], ...]
    out_of_vocabulary: tuple[bool, ...]
    vocabulary_xxh3: _Xxh3
    scales: tuple[Scale | None, ...]
    bad_rows: _Count
    zero_keys: _Count
    base: Base | None = None
    vectors: tuple[Vectors, ...] = ()

    @property
    def schema(self) -> Schema:
        """The columns."""
        return self.semantics.schema

    @property
    def identity(self) -> list[str]:
        """Checksums that are equal for the same rows in the same order, whatever their folder."""
        borders = "-".join(str(part.rows) for part in self.parts)
        expanded = [f"{i}: {size}" for i, size in self.schema.expanded.items()]  # as it is read
        lists = [f"{i}: lists" for i in self.schema.multi_hot]  # tells whose lists the arrays are
        # Each file is learned, the same rows under another name too.
        names = [source.stamp.name for source in self.sources] if self.schema.is_progressive else []
        frozen = [f"{i}: frozen" for i, is_frozen in enumerate(self.schema.frozen) if is_frozen]
        vectors = [f"{file.column}: {file.ids.xxh3} {file.values.xxh3}" for file in self.vectors]
        labels = [f"{name}: {weight}" for name, weight in self.schema.loss_weights.items()]
        extras = [*lists, *expanded, *frozen, *vectors, *names, *labels]
        return [borders, *(array.xxh3 for array in self.arrays), *extras]

    @property
    def vocabulary(self) -> dict[str, Any]:
        """Everything that decides which category an id means."""
        flags = set(self.out_of_vocabulary)
        return {
            "vocabulary_xxh3": self.vocabulary_xxh3,
            "table_rows": list(self.table_rows),
            "out_of_vocabulary": flags.pop() if len(flags) == 1 else list(self.out_of_vocabulary),
            "max_ind_range": self.semantics.max_ind_range,
        }

    @property
    def meaning(self) -> dict[str, Any]:
        """Everything that decides what a model's inputs mean: vocabulary and transforms."""
        pairs = zip(self.schema.inputs, self.scales, strict=True)
        scales = [(dense, (scale.mean, scale.deviation) if scale else ()) for dense, scale in pairs]
        return (
            self.vocabulary
            | {"missing_values": list(self.schema.missing_values)}
            | {
                f"dense[{i}]": [column.name, column.transform, column.missing, *scale]
                for i, (column, scale) in enumerate(scales)
            }
            | {
                f"categorical[{i}]": [column.name, column.kind, column.hash_size, *column.changes]
                + ([f"expand_to {column.expand_to}"] if column.expand_to > 1 else [])
                + ([f"pooling {column.pooling}"] if column.pooling != "sum" else [])
                + ([] if column.weights is None else [f"weights {column.weights}"])
                + ([f"table {column.table}"] if column.table is not None else [])
                for i, column in enumerate(self.schema.categorical)
            }
            | ({"labels": [*labels]} if (labels := self.schema.loss_weights) else {})
        )

    @property
    def meaning_xxh3(self) -> str:
        """Identifies what the columns mean, `meaning`, by a digest."""
        return meaning_xxh3(self.meaning)

    def begins_with(self, meaning: Mapping[str, Any]) -> bool:
        """Whether these rows have an earlier `meaning`, or were prepared on one that has it."""
        return self.meaning == meaning or (
            self.base is not None and self.base.meaning_xxh3 == meaning_xxh3(meaning)
        )

    @property
    def rows(self) -> int:
        """Number of rows of all parts."""
        return sum(part.rows for part in self.parts)

    def array(self, file: str) -> StoredArray:
        """The array of a file name."""
        return next(array for array in self.arrays if array.file == file)


def meaning_xxh3(meaning: Mapping[str, Any]) -> str:
    """Identifies a `Manifest.meaning`, as it is or read from JSON."""
    return xxhash.xxh3_128_hexdigest(json.dumps(meaning, sort_keys=True).encode())


def array_shapes(schema: Schema, rows: int) -> dict[str, tuple[str, tuple[int | None, ...]]]:
    """Type and shape of each array by file name; None for a length that `rows` does not decide."""
    labels = (len(schema.loss_weights),) if schema.loss_weights else ()
    shapes: dict[str, tuple[str, tuple[int | None, ...]]] = {
        "label.npy": ("<f4", (rows, *labels)),
        "dense.npy": ("<f4", (rows, schema.num_dense)),
        "ids.npy": ("<i4", (rows, len(schema.single))),
    }
    if schema.weight is not None:
        shapes[WEIGHT_FILE] = ("<f4", (rows,))
    if schema.group is not None:
        shapes[GROUP_FILE] = ("<i8", (rows,))
    for column in schema.multi_hot:
        shapes[values_file(column)] = ("<i4", (None,))
        shapes[offsets_file(column)] = ("<i8", (rows + 1,))
        if column in schema.weighted:
            shapes[weights_file(column)] = ("<f4", (None,))
    return shapes


def values_file(column: int) -> str:
    """Name of the file with the ids of a multi-hot column, row after row."""
    return f"ids.{column + 1}.values.npy"


def offsets_file(column: int) -> str:
    """Name of the file with the positions where each row's ids begin in `values_file`."""
    return f"ids.{column + 1}.offsets.npy"


def vectors_files(column: int) -> tuple[str, str]:
    """Names of the files with a column's ids that have vectors, and with the vectors."""
    return f"vectors.{column + 1}.ids.npy", f"vectors.{column + 1}.npy"


def weights_file(column: int) -> str:
    """Name of the file with the weights of the ids in `values_file`."""
    return f"ids.{column + 1}.weights.npy"


def write(folder: Path, manifest: Manifest) -> None:
    """Write `manifest.json` into `folder`, complete and on the disk or not at all."""
    disk.replace_text(folder / MANIFEST_FILE, json.dumps(asdict(manifest), indent=1))


def read(folder: Path) -> Manifest:
    """Read the manifest of a prepared folder.

    Raises:
        DataError: it is missing, or `write` has not written it; names the file and the field.
    """
    path = folder / MANIFEST_FILE
    if not os.path.lexists(path):
        raise DataError(f"{folder}: no prepared rows here (no {MANIFEST_FILE})")
    content = disk.read_text(folder, MANIFEST_FILE, MOST_BYTES)
    try:
        manifest = adapter().validate_json(content, strict=True)
    except ValidationError as error:
        raise DataError(f"{path}: not a manifest of prepared rows: {odd_field(error)}") from error
    if fault := _contradiction(manifest) or _other_vectors(manifest):
        raise DataError(f"{path}: {fault}")
    return manifest


def odd_field(error: ValidationError) -> str:
    """The first field of a file that is wrong, and why: `sources.0.xxh3: String should …`."""
    first = error.errors(include_url=False)[0]
    return f"{'.'.join(map(str, first['loc'])) or 'file'}: {first['msg']}"


@functools.cache
def adapter() -> TypeAdapter[Manifest]:
    """The reader of manifests, cached: it takes longer to make than to use."""
    return TypeAdapter(Manifest)


def size_fault(folder: Path, manifest: Manifest) -> str | None:
    """The first fault in the size or header of a file; None if all are right."""
    of_vectors = (array for file in manifest.vectors for array in (file.ids, file.values))
    faults = (file_fault(folder, array) for array in (*manifest.arrays, *of_vectors))
    return next((fault for fault in faults if fault is not None), None)


def _other_vectors(manifest: Manifest) -> str | None:
    tables = [i for i, table in enumerate(manifest.schema.categorical) if table.vectors is not None]
    if [file.column for file in manifest.vectors] != tables:
        return f"vectors: {len(manifest.vectors)} for the columns {tables}"
    for number, (ids, values) in enumerate((file.ids, file.values) for file in manifest.vectors):
        has_width = len(values.shape) == 2 and values.shape[:1] == ids.shape
        if (ids.dtype, values.dtype) != ("<i4", "<f4") or not has_width:
            return f"vectors.{number}: {ids.dtype} {ids.shape}, {values.dtype} {values.shape}"
    return None


def _contradiction(manifest: Manifest) -> str | None:
    schema = manifest.schema
    for name, values, expected in (
        ("table_rows", manifest.table_rows, len(schema.categorical)),
        ("out_of_vocabulary", manifest.out_of_vocabulary, len(schema.categorical)),
        ("scales", manifest.scales, schema.num_dense),
    ):
        if len(values) != expected:
            return f"{name}: {len(values)} values for {expected} columns"
    if (base := manifest.base) and len(base.growth) != len(schema.categorical):
        return f"base.growth: {len(base.growth)} values for {len(schema.categorical)} columns"
    for name, part in zip(("train", "validation", "test"), manifest.parts, strict=True):
        if part.clicks > part.rows:
            return f"parts.{name}.clicks: {part.clicks} of {part.rows} rows"
    shapes = array_shapes(schema, manifest.rows)
    files = [array.file for array in manifest.arrays]
    if files != list(shapes):
        return f"arrays: lists {files} instead of {list(shapes)}"
    for number, array in enumerate(manifest.arrays):
        dtype, shape = shapes[array.file]
        fits = len(shape) == len(array.shape) and all(
            expected in (None, length) for expected, length in zip(shape, array.shape, strict=True)
        )
        if array.dtype != dtype or not fits:
            return f"arrays.{number}: {array.dtype} {array.shape} instead of {dtype} {shape}"
        if len(array.blocks) != -(-array.rows // BLOCK_ROWS):
            return f"arrays.{number}.blocks: {len(array.blocks)} checksums for {array.rows} rows"
    return next(_odd_weights(manifest), None)


def _odd_weights(manifest: Manifest) -> Iterator[str]:
    for column in manifest.schema.weighted:
        ids, weights = (manifest.array(name(column)).rows for name in (values_file, weights_file))
        if ids != weights:
            yield f"arrays: {weights} weights for {ids} ids in {weights_file(column)}"


_EDGE_BYTES = 1 << 20
_PIECES = 16
_PIECE_BYTES = 1 << 16


def stamp(path: Path, key: str = "data.raw") -> FileStamp:
    """Take the stamp of a raw file: size, times and a checksum of samples.

    Raises:
        DataError: it is missing, not a regular file or cannot be read; names the `key` of the file.
    """
    if not path.is_file():
        reason = "not a regular file" if path.exists() else "no such file"
        raise DataError(f"{path}: {reason} ({key})")
    try:
        with path.open("rb") as file:
            status = os.fstat(file.fileno())
            digest = xxhash.xxh3_128(file.read(_EDGE_BYTES))
            for piece in range(1, _PIECES + 1):
                file.seek(status.st_size * piece // (_PIECES + 1))
                digest.update(file.read(_PIECE_BYTES))
            file.seek(max(0, status.st_size - _EDGE_BYTES))
            digest.update(file.read(_EDGE_BYTES))
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error} ({key})") from error
    return FileStamp(
        name=path.name,
        num_bytes=status.st_size,
        mtime_ns=status.st_mtime_ns,
        ctime_ns=status.st_ctime_ns,
        inode=status.st_ino,
        sample_xxh3=digest.hexdigest(),
    )


def file_xxh3(path: Path) -> str:
    """The xxh3-128 of all bytes of a raw file; raises DataError if it cannot be read."""
    try:
        return disk.content(path).xxh3
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error} (data.raw)") from error
