"""The delta between two models of a run: rows of tables, dense weights and new categories.

    delta.json           which model it changes and which it makes, sizes and checksums; sealed
    delta.safetensors    embedding.1.rows (int32, R) and embedding.1.weight (R × D), of each table
                         the rows that differ; all dense tensors and statistics; vocabulary.1, new
                         categories: whole numbers, or UTF-8 bytes of texts, of the lengths
                         vocabulary.1.lengths; first the categories that take the places
                         vocabulary.1.taken of others, then the appended ones

Shapes: R rows of a table, D embedding dimension, K categories that take places of others.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Annotated, Any, cast

import numpy as np
import safetensors.torch
import torch
from pydantic import Field, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass
from torch import Tensor

from dlrm_hybrid.bounds import STRICT
from dlrm_hybrid.checkpoint.manifest import Count, Digest, FileEntry, manifest_text, sealed
from dlrm_hybrid.checkpoint.writer import write_tensors
from dlrm_hybrid.data.preprocessing import Keys, Vocabulary
from dlrm_hybrid.disk import MOST_JSON_BYTES, content, plain_file, read_text, replace_text
from dlrm_hybrid.parallel.finite import first_not_finite
from dlrm_hybrid.types import DataError

DELTA_FILE = "delta.json"
TENSORS_FILE = "delta.safetensors"
Rows = Annotated[int, Field(ge=1, le=2**31)]


@dataclass(config=STRICT, frozen=True, kw_only=True)
class ModelVersion:
    """One of a run's models.

    Attributes:
        version: identifies the checkpoint, wherever its folder is.
    """

    version: Digest
    checkpoint: str
    step: Count

    @property
    def text(self) -> str:
        """Description of the model for messages."""
        return f"{self.checkpoint} (step {self.step:,}, version {self.version[:8]})"


@dataclass(config=STRICT, frozen=True, kw_only=True)
class DeltaManifest:
    """The content of `delta.json`.

    Attributes:
        base: the model that it changes.
        model: the model that it makes.
        base_rows: rows of each table before.
        table_rows: rows of each table after.
        tensors: size and checksum of the file of tensors.
    """

    base: ModelVersion
    model: ModelVersion
    base_rows: tuple[Rows, ...]
    table_rows: tuple[Rows, ...]
    tensors: FileEntry


_MANIFEST = TypeAdapter(DeltaManifest)


def difference(
    tables: Sequence[str], before: Mapping[str, Tensor], after: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """The tensors of a delta between two models, without vocabularies.

    Args:
        tables: names of the tables, of which the later model has at least as many rows.
    """
    tensors = dict(after)
    for table in tables:
        name = f"{table}.weight"
        old_RD, new_RD = before[name], after[name]
        has_changed_R = torch.ones(len(new_RD), dtype=torch.bool)
        known_RD = new_RD[: len(old_RD)]
        # By bits: 0 and -0 are equal, and another model.
        differs_RD = old_RD.view(torch.int32) != known_RD.view(torch.int32)
        has_changed_R[: len(old_RD)] = differs_RD.any(1)
        rows_R = has_changed_R.nonzero().squeeze(1)
        tensors[f"{table}.rows"] = rows_R.to(torch.int32)
        tensors[name] = new_RD[rows_R]
    return tensors


def vocabulary_tensors(number: int, before: Vocabulary, after: Vocabulary) -> dict[str, Tensor]:
    """The new categories of column `number`, from 1, as tensors of a delta."""
    taken_K, keys = after.since(before)
    name = f"vocabulary.{number}"
    tensors = {f"{name}.taken": torch.tensor(taken_K, dtype=torch.int32)}
    if not after.column.has_texts:
        return {**tensors, name: torch.tensor(np.array(keys, np.int64))}
    texts = [str(key).encode() for key in keys]
    lengths = np.array([len(text) for text in texts], np.int32)
    content = np.frombuffer(bytearray().join(texts), np.uint8)
    return {**tensors, name: torch.tensor(content), f"{name}.lengths": torch.tensor(lengths)}


def write_delta(
    folder: Path,
    tensors: Mapping[str, Tensor],
    base: ModelVersion,
    model: ModelVersion,
    base_rows: Sequence[int],
    table_rows: Sequence[int],
) -> int:
    """Write a delta into a folder; returns the bytes of its tensors. Raises OSError."""
    contiguous = {name: tensor.contiguous() for name, tensor in tensors.items()}
    file = write_tensors(folder / TENSORS_FILE, contiguous)
    manifest = DeltaManifest(
        base=base,
        model=model,
        base_rows=tuple(base_rows),
        table_rows=tuple(table_rows),
        tensors=FileEntry(num_bytes=file.num_bytes, xxh3=file.xxh3),
    )
    values = json.loads(_MANIFEST.dump_json(manifest))
    replace_text(folder / DELTA_FILE, manifest_text(values))
    return file.num_bytes


def read_manifest(folder: Path) -> DeltaManifest:
    """Read the manifest of a delta; raises DataError if there is none, or it is damaged."""
    path = folder / DELTA_FILE
    if not path.is_file():
        raise DataError(
            f"{folder}: no delta here (no {DELTA_FILE}); name a folder that "
            "`export export.since=…` has written"
        )
    values = sealed(path, read_text(folder, DELTA_FILE, MOST_JSON_BYTES), "", what="a delta")
    try:
        manifest = _MANIFEST.validate_json(json.dumps(values))
    except ValidationError as error:
        fault = error.errors(include_url=False)[0]
        where = ".".join(str(part) for part in fault["loc"])
        raise DataError(f"{path}: {where} = {fault['input']!r:.80}: {fault['msg']}") from None
    if len(manifest.base_rows) != len(manifest.table_rows):
        raise DataError(f"{path}: base_rows and table_rows are of different numbers of tables")
    return manifest


def read_tensors(folder: Path, manifest: DeltaManifest) -> dict[str, Tensor]:
    """Read the tensors of a delta; DataError if it is damaged, or a value is not finite."""
    path = plain_file(folder, TENSORS_FILE)
    file, expected = content(path), manifest.tensors
    if (file.num_bytes, file.xxh3) != (expected.num_bytes, expected.xxh3):
        raise DataError(
            f"{path}: {file.num_bytes} bytes with checksum {file.xxh3}, {DELTA_FILE} says "
            f"{expected.num_bytes} with {expected.xxh3}"
        )
    try:
        tensors: dict[str, Tensor] = cast(Any, safetensors.torch).load_file(path)
    except safetensors.SafetensorError as error:
        raise DataError(f"{path}: {error}") from error
    for name, tensor in tensors.items():
        if tensor.dtype is torch.float32 and first_not_finite([(name, tensor)]) is not None:
            raise DataError(f"{path}: {name} holds values that are not finite")
    return tensors


def later_vocabulary(tensors: Mapping[str, Tensor], number: int, before: Vocabulary) -> Vocabulary:
    """The vocabulary of column `number`, from 1, that a delta makes; ValueError if it is damaged.

    It is the earlier one itself if no category is new.
    """
    name, has_texts = f"vocabulary.{number}", before.column.has_texts
    wanted = {f"{name}.taken": torch.int32, name: torch.uint8 if has_texts else torch.int64}
    for key, dtype in (wanted | ({f"{name}.lengths": torch.int32} if has_texts else {})).items():
        if (tensors[key].dtype, tensors[key].dim()) != (dtype, 1):
            actual = f"{tensors[key].dtype} {[*tensors[key].shape]}"
            raise ValueError(f"{key} is {actual}, wanted a list of {dtype}")
    taken_K, content = (tensors[key].numpy() for key in (f"{name}.taken", name))
    keys: Keys = content
    if has_texts:
        lengths = cast("list[int]", tensors[f"{name}.lengths"].tolist())
        places = [0, *accumulate(lengths)]
        if sorted(places) != places or places[-1] != len(content):
            raise ValueError(f"{name}.lengths are not those of all its bytes")
        text = content.tobytes()
        keys = [text[first:stop].decode() for first, stop in pairwise(places)]
    if len(taken_K) > len(keys) or ((taken_K < 0) | (taken_K >= len(before.keys))).any():
        raise ValueError(f"{name}.taken are no places of it")
    return before.having(taken_K.astype(np.int64), keys) if len(keys) else before
