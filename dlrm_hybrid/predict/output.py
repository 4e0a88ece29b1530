"""A file of scores that has its name once all of them are in it.

Shapes: R rows.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol

import numpy.typing as npt

from dlrm_hybrid.config.validate import faults_text
from dlrm_hybrid.disk import flush, writing
from dlrm_hybrid.predict.sources import require
from dlrm_hybrid.run.folder import one_user
from dlrm_hybrid.types import ConfigError

OUTPUT_KEY = "predict.output"
KINDS = (".parquet", ".csv")
Columns = Mapping[str, npt.NDArray[Any]]


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
        ResourceError: the disk or a missing package refuses.
    """
    if path.suffix not in KINDS:
        fault = f"{OUTPUT_KEY} = {path}: must end in {' or '.join(KINDS)}"
        raise ConfigError(faults_text([fault]))
    require(path)
    with writing(path, OUTPUT_KEY):
        path.parent.mkdir(parents=True, exist_ok=True)
    with one_user(path.with_name(f".{path.name}.lock"), OUTPUT_KEY, path):
        partial = path.with_name(f".{path.name}.partial")
        made = _Parquet(partial) if path.suffix == ".parquet" else _Csv(partial)
        try:
            yield made
            made.close()
            with writing(path, OUTPUT_KEY):
                flush(partial)
                partial.replace(path)
                flush(path.parent)
        finally:
            made.close()
            partial.unlink(missing_ok=True)


class _Parquet:
    def __init__(self, path: Path) -> None:
        self._arrow = import_module("pyarrow")
        self._parquet = import_module("pyarrow.parquet")
        self._path = path
        self._writer: Any = None

    def write(self, columns: Columns) -> None:
        with writing(self._path, OUTPUT_KEY):
            table = self._arrow.table(dict(columns))
            if self._writer is None:
                self._writer = self._parquet.ParquetWriter(
                    self._path, table.schema, compression="zstd"
                )
            self._writer.write_table(table.cast(self._writer.schema))

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()
            self._writer = None


class _Csv:
    def __init__(self, path: Path) -> None:
        self._path = path
        self._is_new = True

    def write(self, columns: Columns) -> None:
        import pandas as pd

        mode = "w" if self._is_new else "a"
        with writing(self._path, OUTPUT_KEY):
            pd.DataFrame(dict(columns)).to_csv(
                self._path, mode=mode, header=self._is_new, index=False
            )
        self._is_new = False

    def close(self) -> None:
        """Every block is written when `write` returns."""
