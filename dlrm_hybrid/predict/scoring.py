"""The work of the verb `predict`: reads rows from files and writes a file of scores."""

from __future__ import annotations

import time
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch

from dlrm_hybrid.config import compose
from dlrm_hybrid.config.validate import NAME_CHECKPOINT, faults_text, unset_faults
from dlrm_hybrid.data.sources.arrow import ArrowError, pa, parquet
from dlrm_hybrid.data.sources.paths import find
from dlrm_hybrid.disk import replacing, writing
from dlrm_hybrid.predict.predictor import Predictor
from dlrm_hybrid.predict.sources import ROWS_KEY, read_blocks
from dlrm_hybrid.run.display import Display
from dlrm_hybrid.run.folder import one_user, output_file
from dlrm_hybrid.run.request import Request
from dlrm_hybrid.telemetry.metrics import BinaryScores, metrics_of
from dlrm_hybrid.types import ConfigError, DataError

OUTPUT_KEY = "predict.output"
KINDS = (".parquet", ".csv")
Columns = Mapping[str, Any]
"""Arrays of numpy or Arrow, by the name of the column."""


class ScoreFile(Protocol):
    """A file of scores that is being written."""

    def write(self, columns: Columns) -> None:
        """Append a block of rows; all blocks have the same columns."""
        ...


@contextmanager
def score_file(path: Path) -> Generator[ScoreFile, None, None]:
    """Make or replace a file of scores; after an error in the `with` it is unchanged.

    Raises:
        ConfigError: the name ends otherwise, or another process is writing it.
        ResourceError: the disk refuses.
    """
    if path.suffix not in KINDS:
        fault = f"{OUTPUT_KEY} = {path}: must end in {' or '.join(KINDS)}"
        raise ConfigError(faults_text([fault]))
    output_file(str(path), OUTPUT_KEY)
    with writing(path, OUTPUT_KEY):
        path.parent.mkdir(parents=True, exist_ok=True)
    lock = path.with_name(f".{path.name}.lock")
    with one_user(lock, OUTPUT_KEY, path), ExitStack() as stack:
        with writing(path, OUTPUT_KEY):
            partial = stack.enter_context(replacing(path))
        writer = _ParquetScores(partial) if path.suffix == ".parquet" else _CsvScores(partial)
        try:
            yield writer
            with writing(path, OUTPUT_KEY):
                writer.close()
        finally:
            with suppress(OSError):  # on a full disk; the file is discarded anyway
                writer.close()
        with writing(path, OUTPUT_KEY):
            stack.close()


class _ParquetScores:
    def __init__(self, path: Path) -> None:
        self._path = path
        self._writer: Any = None

    def write(self, columns: Columns) -> None:
        with writing(self._path, OUTPUT_KEY):
            table = pa.table(dict(columns))
            if self._writer is None:
                self._writer = parquet.ParquetWriter(self._path, table.schema, compression="zstd")
            self._writer.write_table(_as_before(table, self._writer.schema))

    def close(self) -> None:
        writer, self._writer = self._writer, None
        if writer is not None:
            writer.close()


def _as_before(table: Any, schema: Any) -> Any:
    """Cast columns to the types of the first block."""
    columns: list[Any] = []
    for field, column in zip(schema, table.columns, strict=True):
        try:
            columns.append(column.cast(field.type))
        except ArrowError as error:
            raise DataError(
                f"column {field.name!r}: {field.type} in the first rows, {column.type} in later "
                "ones: .csv takes both (predict.keep)"
            ) from error
    return pa.table(columns, schema=schema)


def _for_pandas(column: Any) -> Any:
    """Convert a column to pandas, keeping whole numbers beside nulls, which would become floats."""
    try:
        return column.to_pandas(integer_object_nulls=True)
    except ArrowError:  # times of day in nanoseconds, which Python lacks
        return column.cast("string").to_pandas()


class _CsvScores:
    def __init__(self, path: Path) -> None:
        self._path = path
        self._is_new = True

    def write(self, columns: Columns) -> None:
        import pandas as pd

        mode = "w" if self._is_new else "a"
        with writing(self._path, OUTPUT_KEY):
            values = {
                name: _for_pandas(column) if hasattr(column, "to_pandas") else column
                for name, column in columns.items()
            }
            frame = pd.DataFrame(values)
            frame.to_csv(self._path, mode=mode, header=self._is_new, index=False)
        self._is_new = False

    def close(self) -> None:
        """Do nothing: `write` has written every block."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Predicted:
    """The outcome of `predict`: rows scored, their counts and the file written.

    Attributes:
        output: the file of scores.
        seconds: seconds from the first row to the last.
        unknown: number of ids that the run has not seen, by column; only those above 0.
        scores: quality of the scores if all rows have labels, else None.
    """

    checkpoint: Path
    step: int
    output: Path
    rows: int
    seconds: float
    unknown: dict[str, int]
    scores: BinaryScores | None


def predict(request: Request, display: Display) -> Predicted:
    """Score all rows of `predict.rows` with `predict.checkpoint` into `predict.output`.

    Raises:
        ConfigError: a key is missing or invalid.
        DataError: checkpoint, vocabularies or rows are missing or damaged; names row and column.
        ResourceError: the disk refuses.
    """
    options = request.config.predict
    faults = list(_faults(request))
    if faults:
        raise ConfigError(faults_text(faults))
    assert options.rows is not None and options.output is not None
    paths = find(options.rows, ROWS_KEY)
    with score_file(Path(options.output)) as file:
        predictor = _predictor(request, display)
        start = time.perf_counter()
        rows, scores = _score(request, paths, predictor, file, display)
        seconds = time.perf_counter() - start
    names = [column.name for column in predictor.schema.categorical]
    counts = zip(names, predictor.encoder.unknown_F.tolist(), strict=True)
    return Predicted(
        checkpoint=predictor.checkpoint,
        step=predictor.step,
        output=Path(options.output),
        rows=rows,
        seconds=seconds,
        unknown={name: count for name, count in counts if count},
        scores=scores,
    )


def _predictor(request: Request, display: Display) -> Predictor:
    config, options = request.config, request.config.predict
    is_given = "data.prepared" in compose.given_keys(request.overrides)
    assert options.checkpoint is not None
    with display.counter("checkpoint", "bytes", is_late=True) as show:
        return Predictor(
            options.checkpoint,
            prepared=config.data.prepared if is_given else None,
            unknown=options.unknown,
            extra=options.extra,
            threads=config.threads,
            batch_rows=config.evaluate.batch_size,
            progress=lambda count, total: show(count, total),
        )


def _score(
    request: Request,
    paths: Sequence[Path],
    predictor: Predictor,
    file: ScoreFile,
    display: Display,
) -> tuple[int, BinaryScores | None]:
    """Write the scores of all rows; returns their number, and their quality if all have labels."""
    metrics, has_labels, rows = metrics_of(predictor.schema.loss_weights), True, 0
    total_bytes = sum(path.stat().st_size for path in paths if path.is_file())
    start = time.perf_counter()
    with display.bar("predict") as bar:

        def on_bytes(done_bytes: int) -> None:
            speed = rows / (time.perf_counter() - start)
            bar.update(done_bytes, total_bytes, f"{rows:,} rows, {speed:,.0f} rows/s")

        keep, block_bytes = request.config.predict.keep, request.config.data.block_bytes
        extra = predictor.extra
        names = [f"score_{name}" for name in predictor.labels] or ["score"]
        if clashes := [name for name in names if name in keep]:
            fault = f"predict.keep = {list(keep)}: {clashes[0]} is a column of this file of scores"
            raise ConfigError(faults_text([fault]))
        for block in read_blocks(paths, predictor.schema, keep, block_bytes, on_bytes, extra):
            logit_R = predictor.logits(block)
            if block.values.label_N is None:
                has_labels = False
            elif has_labels:
                metrics.add(logit_R, block.values.label_N)
            number_R = np.arange(rows, rows + len(logit_R))
            score_R = torch.from_numpy(logit_R).sigmoid().numpy()
            by_name = dict(zip(names, np.atleast_2d(score_R.T), strict=True))
            file.write({"row": number_R, **by_name, **block.kept})
            rows += len(logit_R)
    if not rows:
        raise DataError(f"{', '.join(map(str, paths))}: no rows ({ROWS_KEY})")
    return rows, metrics.scores() if has_labels else None


def _faults(request: Request) -> Iterator[str]:
    options = request.config.predict
    advice = {
        "checkpoint": NAME_CHECKPOINT,
        "rows": "name the files of rows to score",
        "output": "name a file, .parquet or .csv",
    }
    yield from unset_faults("predict", options, advice)
    rows = find(options.rows, ROWS_KEY)
    if options.output and Path(options.output).resolve() in [path.resolve() for path in rows]:
        yield f"predict.output = {options.output}: is one of predict.rows, which it would replace"
    if "row" in options.keep:
        yield f"predict.keep = {list(options.keep)}: row is a column of every file of scores"
