"""A file of scores that has its name once all of them are in it.

Shapes: R rows.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, Protocol

from dlrm_hybrid.config.validate import faults_text
from dlrm_hybrid.data.sources.arrow import ArrowError, pa, parquet
from dlrm_hybrid.disk import replacing, writing
from dlrm_hybrid.run.folder import one_user, output_file
from dlrm_hybrid.types import ConfigError, DataError

OUTPUT_KEY = "predict.output"
KINDS = (".parquet", ".csv")
Columns = Mapping[str, Any]
"""Arrays of numpy or Arrow by name."""


class ScoreFile(Protocol):
    """Takes rows, block after block."""

    def write(self, columns: Columns) -> None:
        """Add rows; each block has the same columns."""
        ...


@contextmanager
def score_file(path: Path) -> Generator[ScoreFile, None, None]:
    """Make or replace a file of scores; where the `with` is left early, it is as it was.

    Args:
        path: `.parquet` or `.csv`.

    Raises:
        ConfigError: it is neither, or another process is writing it.
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
        made = _Parquet(partial) if path.suffix == ".parquet" else _Csv(partial)
        try:
            yield made
            with writing(path, OUTPUT_KEY):
                made.close()
        finally:
            with suppress(OSError):  # a full disk takes no end of a file that nobody wants
                made.close()
        with writing(path, OUTPUT_KEY):
            stack.close()


class _Parquet:
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
    """Columns of the types that the first block had."""
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
    """A column of Arrow's with None, or whole numbers beside nothing would become floats."""
    try:
        return column.to_pandas(integer_object_nulls=True)
    except ArrowError:  # times of a day in nanoseconds, which Python's have not
        return column.cast("string").to_pandas()


class _Csv:
    def __init__(self, path: Path) -> None:
        self._path = path
        self._is_new = True

    def write(self, columns: Columns) -> None:
        import pandas as pd

        mode = "w" if self._is_new else "a"
        with writing(self._path, OUTPUT_KEY):
            found = {
                name: _for_pandas(one) if hasattr(one, "to_pandas") else one
                for name, one in columns.items()
            }
            frame = pd.DataFrame(found)
            frame.to_csv(self._path, mode=mode, header=self._is_new, index=False)
        self._is_new = False

    def close(self) -> None:
        """Every block is written when `write` returns."""
