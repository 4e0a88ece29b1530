"""Arrow's modules, which have no types."""

from __future__ import annotations

from importlib import import_module
from typing import Any

pa: Any = import_module("pyarrow")
pc: Any = import_module("pyarrow.compute")
pa_csv: Any = import_module("pyarrow.csv")
parquet: Any = import_module("pyarrow.parquet")
ArrowError: type[Exception] = pa.ArrowException
ArrowInvalid: type[Exception] = pa.ArrowInvalid
Batch = Any
"""A `pyarrow.RecordBatch`."""
