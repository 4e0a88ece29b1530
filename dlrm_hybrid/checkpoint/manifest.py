"""The manifest of a checkpoint, checked whenever it is read; free of torch.

A checksum is no signature: an intact manifest may still name files elsewhere, overlapping parts, or
more elements than its files have. Nothing is opened or allocated for such a manifest.
"""

from __future__ import annotations

import json
import math
import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import field, replace
from itertools import product
from pathlib import Path
from typing import Annotated, Any, NoReturn, cast

import xxhash
from pydantic import ConfigDict, Field, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass

from dlrm_hybrid.bounds import STRICT, Monitor, OneOf
from dlrm_hybrid.disk import read_text
from dlrm_hybrid.types import DataError, ScoredPart

FORMAT = 2
MANIFEST_FILE = "manifest.json"
SEAL = ', "xxh3": "'
PREFIX = "step_"
MAX_BYTES = 1 << 25
MAX_FAULTS = 5
ELEMENT_BYTES: Mapping[str, int] = {
    **{"F64": 8, "F32": 4, "F16": 2, "BF16": 2},
    **{"I64": 8, "I32": 4, "I16": 2, "I8": 1, "U8": 1, "BOOL": 1},
}
OPEN = ConfigDict(strict=True, extra="ignore", allow_inf_nan=False)

Count = Annotated[int, Field(ge=0, lt=2**63)]
TensorShape = Annotated[tuple[Count, ...], Field(max_length=4)]
FileName = Annotated[str, Field(pattern=r"^[A-Za-z0-9_][A-Za-z0-9_.\-]{0,250}$")]
TensorName = Annotated[str, Field(pattern=r"^[ -~]{1,1000}$")]
Digest = Annotated[str, Field(pattern=r"^[0-9a-f]{32}$")]
DType = Annotated[str, OneOf(lambda: ELEMENT_BYTES)]


@dataclass(config=STRICT, frozen=True, kw_only=True)
class FileEntry:
    """Size and checksum (XXH3, 128 bits) of a file of tensors."""

    num_bytes: Count
    xxh3: Digest


@dataclass(config=STRICT, frozen=True, kw_only=True)
class TensorBox:
    """A box of a tensor: its file, its begin in the tensor, its shape.

    Its rows, elements of the first dimension, are `every` rows apart in the tensor.
    """

    file: FileName
    begin: TensorShape
    shape: TensorShape
    every: Annotated[int, Field(ge=1, le=65_536)] = 1


@dataclass(config=STRICT, frozen=True, kw_only=True)
class TensorEntry:
    """A tensor, and the parts that make it up."""

    group: TensorName
    dtype: DType
    shape: TensorShape
    parts: Annotated[tuple[TensorBox, ...], Field(max_length=65_536)]


@dataclass(config=STRICT, frozen=True, kw_only=True)
class Score:
    """The score of a checkpoint in an evaluation.

    Attributes:
        part: the rows that were scored.
        monitor: kind of score; a lower log-loss is better, or a higher AUC or GAUC.
    """

    part: ScoredPart
    monitor: Monitor
    value: float

    def gain(self, before: float) -> float:
        """Gain over a value of the same kind of score; positive if better."""
        return before - self.value if self.monitor == "log_loss" else self.value - before

    @property
    def text(self) -> str:
        """The score as text for the user."""
        name = "log-loss" if self.monitor == "log_loss" else self.monitor.upper()
        return f"{self.part} {name} {self.value:.4f}"

    def is_best(self, best: Score | None) -> bool:
        """Whether it is better than the best so far, or the first of its kind."""
        if best is None or (best.part, best.monitor) != (self.part, self.monitor):
            return True
        return self.gain(best.value) > 0


@dataclass(config=OPEN, frozen=True, kw_only=True)
class Manifest:
    """The contents of a checkpoint, and what a run needs to resume from it.

    Attributes:
        files: sizes and checksums by name.
        tensors: shapes and parts by name.
        progress: see `train.progress.Progress`; None, as the next three, if no run can resume.
        config_hash: identifies all keys that decide the weights.
        rows: checksums of the prepared rows.
        score: score of an evaluation at this step, if any.
        arithmetic: values that also decide the bits of the weights; empty if unknown.
        vocabulary: meaning of the rows' ids and columns; empty if unknown.
        values: all of the above, and any other facts of the run, as JSON values.
    """

    step: Count
    files: Mapping[FileName, FileEntry]
    tensors: Mapping[TensorName, TensorEntry]
    progress: Mapping[str, Any] | None = None
    config: Mapping[str, Any] | None = None
    config_hash: str | None = None
    rows: tuple[str, ...] | None = None
    score: Score | None = None
    arithmetic: Mapping[str, Any] = field(default_factory=dict[str, Any])
    vocabulary: Mapping[str, Any] = field(default_factory=dict[str, Any])
    values: Mapping[str, Any] = field(default_factory=dict[str, Any])


_MANIFEST = TypeAdapter(Manifest)


def folder_name(step: int) -> str:
    """Name of the folder of a step's checkpoint."""
    return f"{PREFIX}{step:08d}"


def is_folder_name(text: str) -> bool:
    """Whether a name is that of a step's folder; names of copies are not."""
    digits = text.removeprefix(PREFIX)
    return re.fullmatch(r"[0-9]{8,18}", digits) is not None and text == folder_name(int(digits))


def version(values: Mapping[str, Any]) -> str:
    """A digest that identifies a checkpoint by the values of its manifest, wherever it is."""
    return _digest(json.dumps(values, sort_keys=True))


def manifest_text(values: Mapping[str, Any]) -> str:
    """Write values as a manifest, which ends with the checksum of all before it."""
    text = json.dumps({"format": FORMAT, **values})[:-1]
    return f'{text}{SEAL}{_digest(text)}"}}'


def read_manifest(folder: Path, instead: str = "") -> Manifest:
    """Read and check the manifest of a checkpoint.

    Args:
        instead: end of error messages, but that of another format, which removes no damage.

    Raises:
        DataError: it is missing, changed, foreign or contradictory; names the field.
    """
    path = folder / MANIFEST_FILE
    text = read_text(folder, MANIFEST_FILE, MAX_BYTES, instead)
    values = sealed(path, text, instead)
    try:
        manifest = replace(_MANIFEST.validate_json(json.dumps(values)), values=values)
    except ValidationError as error:
        shown = "; ".join(_fault(fault) for fault in error.errors(include_url=False)[:MAX_FAULTS])
        raise DataError(f"{path}: {shown}{instead}") from None
    fault = next(_faults(folder, manifest), None)
    if fault is not None:
        raise DataError(f"{path}: {fault}{instead}")
    return manifest


def sealed(path: Path, text: str, instead: str, what: str = "a checkpoint") -> dict[str, Any]:
    """Parse a manifest and check its format and checksum; raises DataError.

    Args:
        instead: end of messages, as for `read_manifest`.
        what: the thing whose manifest it is, for messages.
    """
    try:
        parsed: Any = json.loads(text, parse_constant=_no_number, parse_float=_finite)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{path}: not {what}: {error}{instead}") from None
    if not isinstance(parsed, dict) or "format" not in parsed:
        raise DataError(f"{path}: not {what}: no format is said{instead}")
    values = cast("dict[str, Any]", parsed)
    number = values.pop("format")
    if number != FORMAT:
        raise DataError(
            f"{path}: {what} of format {number!r}; this version of the program "
            f"reads format {FORMAT} only"
        )
    body, _, seal = text.rpartition(SEAL)
    if seal != f'{_digest(body)}"}}':
        raise DataError(f"{path}: changed since it was written{instead}")
    del values["xxh3"]
    return values


def _finite(text: str) -> float:
    value = float(text)
    return value if math.isfinite(value) else _no_number(text)


def _no_number(text: str) -> NoReturn:
    raise ValueError(f"{text} is no number")


def _faults(folder: Path, manifest: Manifest) -> Iterator[str]:
    """Yield contradictions between the values of a manifest."""
    if is_folder_name(folder.name) and folder.name != folder_name(manifest.step):
        yield f"step = {manifest.step}: the folder is {folder.name}"
    used: defaultdict[str, int] = defaultdict(int)
    for title, tensor in manifest.tensors.items():
        for number, part in enumerate(tensor.parts):
            if part.file not in manifest.files:
                yield f"tensors.{title}.parts.{number}.file = {part.file!r}: is not among files"
            used[part.file] += math.prod(part.shape) * ELEMENT_BYTES[tensor.dtype]
        if not _tiles(tensor.shape, tensor.parts):
            yield (
                f"tensors.{title}.parts: do not make up a tensor of shape {list(tensor.shape)}: "
                "they overlap, leave gaps or reach beyond it"
            )
    for file, num_bytes in used.items():
        if num_bytes > manifest.files[file].num_bytes:
            yield (
                f"files.{file}.num_bytes = {manifest.files[file].num_bytes}: less than the "
                f"{num_bytes} of the tensors in it"
            )


def _tiles(shape: Sequence[int], parts: Sequence[TensorBox]) -> bool:
    """Whether parts cover a tensor, each element exactly once.

    If a part has every n-th row, all must; parts of equal remainder make up a tensor.
    """
    every = parts[0].every if parts else 1
    if any(len(part.begin) != len(shape) or len(part.shape) != len(shape) for part in parts):
        return False
    if every == 1 or not shape:
        return all(part.every == 1 for part in parts) and _boxes_tile(
            shape, [(part.begin, part.shape) for part in parts]
        )
    boxes: list[list[tuple[Sequence[int], Sequence[int]]]] = [[] for _ in range(every)]
    for part in parts:
        if part.every != every:
            return False
        nth, remainder = divmod(part.begin[0], every)
        boxes[remainder].append(((nth, *part.begin[1:]), part.shape))
    return all(
        _boxes_tile((len(range(remainder, shape[0], every)), *shape[1:]), part_boxes)
        for remainder, part_boxes in enumerate(boxes)
    )


def _boxes_tile(shape: Sequence[int], boxes: Sequence[tuple[Sequence[int], Sequence[int]]]) -> bool:
    """Whether boxes, given by begin and shape, cover a tensor, each element exactly once.

    Give each corner of a box the sign of its parity. The signed corners of all parts are those of
    the whole, the rest cancelling out, exactly if the parts add up to it at every element.
    """
    if boxes == [((0,) * len(shape), shape)]:
        return True
    corners: Counter[tuple[int, ...]] = Counter()
    whole = ((0,) * len(shape), tuple(shape), -1)
    for begin, length, sign in (whole, *((begin, length, 1) for begin, length in boxes)):
        for upper in product((0, 1), repeat=len(shape)):
            corner = tuple(b + u * n for b, u, n in zip(begin, upper, length, strict=True))
            corners[corner] += sign * (-1) ** sum(upper)
    return not any(corners.values())


def _fault(fault: Any) -> str:
    where = repr(".".join(str(part) for part in fault["loc"]))[1:-1]
    return f"{where} = {fault['input']!r:.80}: {fault['msg']}"


def _digest(text: str) -> str:
    return xxhash.xxh3_128(text.encode()).hexdigest()
