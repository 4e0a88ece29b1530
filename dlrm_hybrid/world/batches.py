"""A program's batches, as arrays of NumPy or torch, checked and converted for the model.

Shapes: B rows of a batch, I dense columns, F categorical columns, N ids of all bags, L labels if
there are several.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from numbers import Real
from typing import Any, cast, final

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from dlrm_hybrid.arrays import Float32s, Int64s
from dlrm_hybrid.bags import Bags, jagged, lengths_of, require_offsets, table_offsets
from dlrm_hybrid.data.loader import Batch
from dlrm_hybrid.data.shards import bad_weights
from dlrm_hybrid.model.spec import ModelShape
from dlrm_hybrid.types import DataError

Loader = Callable[[int, int], Any]
"""`loader(trainer, trainers)`: an iterable of the batches of one trainer, for one epoch."""
WHAT = "a batch is (dense, ids, label), or a mapping with these keys and perhaps weight"
KEYS = ("dense", "ids", "label")
WEIGHT = "weight"


@final
@dataclass(frozen=True, slots=True)
class Columns:
    """Checks the batches of a world against its model.

    Attributes:
        spec: the model.
        batch_size: number of rows of one trainer's training batch.
    """

    spec: ModelShape
    batch_size: int

    def batch(
        self, data: Any, title: str, rows: int | None = None, *, labelled: bool = True
    ) -> Batch:
        """Check and convert one batch.

        Args:
            data: `(dense, ids, label)` or a mapping: float (B, I), None for a model without dense
                columns; ids int (B, F), or `Bags`, or a KeyedJaggedTensor of F keys; label 0 or
                1 (B,), or (B, L) of a model with `loss_weights`; a mapping may have `weight` ≥ 0
                (B,), which multiplies the rows' losses.
            title: name of the batch, for error messages.
            rows: number that it must have; None for any.
            labelled: whether it must have a label; else a missing label, or None, is read as 0.

        Raises:
            DataError: a shape, type or value is wrong; names batch, column and value.
        """
        try:
            return self._batch(data, rows, labelled)
        except _FaultError as fault:
            raise DataError(f"{title}: {fault}") from None

    def _batch(self, data: Any, rows: int | None, labelled: bool) -> Batch:
        if isinstance(data, Batch):
            dense, ids, label = data.dense_BI, data.bags, data.label_B
            weight = data.weight_B
        else:
            dense, ids, label, weight = _parts(data if labelled else _with_label(data))
        if label is None and not labelled:
            label = np.zeros((_bags(ids, self.spec.table_names).rows, self.spec.labels))
        label_B = _array("label", label, np.float32)
        if label_B.ndim == 2 and label_B.shape[1] == 1:
            label_B = label_B[:, 0]
        labels = self.spec.labels
        if label_B.shape[1:] != (() if labels == 1 else (labels,)) or not label_B.ndim:
            shape = "(rows,)" if labels == 1 else f"(rows, {labels})"
            raise _FaultError(f"label has shape {_shape(label_B)}, must be {shape}")
        if rows is not None and len(label_B) != rows:
            raise _FaultError(
                f"{len(label_B)} rows, must be {rows}: all batches of a world have "
                "batch_size rows for each trainer (drop_last=True leaves out a smaller one)"
            )
        wrong = (label_B != 0) & (label_B != 1)
        if wrong.any():
            row, *which = np.argwhere(wrong)[0].tolist()
            what = f"label {which[0] + 1}" if which else "label"
            value = label_B[(row, *which)]
            raise _FaultError(f"{what} of row {row} is {value:g}, must be 0 or 1")
        bags, weight_B = self._bags(ids, len(label_B)), _weights(weight, len(label_B))
        return Batch(self._dense(dense, len(label_B)), bags, label_B, weight_B)

    def _dense(self, value: Any, rows: int) -> Float32s:
        if value is None and not self.spec.num_dense:
            return np.empty((rows, 0), np.float32)
        dense_BI = _array("dense", value, np.float32)
        if dense_BI.shape != (rows, self.spec.num_dense):
            raise _FaultError(
                f"dense has shape {_shape(dense_BI)}, must be ({rows}, {self.spec.num_dense}): "
                "rows of the label × dense columns of the model (bottom[0])"
            )
        finite_BI = np.isfinite(dense_BI)
        if not finite_BI.all():
            row, column = np.argwhere(~finite_BI)[0].tolist()
            raise _FaultError(f"dense column {column} of row {row} is {dense_BI[row, column]}")
        return dense_BI

    def _bags(self, value: Any, rows: int) -> Bags[Int64s]:
        columns = self.spec.columns
        bags = _bags(value, self.spec.table_names)
        if (bags.tables, bags.rows) != (len(columns), rows):
            of = "columns" if self.spec.table_of_column else "tables"
            raise _FaultError(
                f"ids of {bags.rows} rows × {bags.tables} {of}, must be {rows} × {len(columns)}: "
                f"rows of the label × embedding {of} of the model"
            )
        for table in bags.averaged:
            if table not in range(len(columns)):
                most = len(columns) - 1
                raise _FaultError(f"averaged = {table}, must be a table from 0 to {most}")
        offsets, ids_N = table_offsets(bags).tolist(), bags.values.reshape(-1)
        for column, table in enumerate(columns):
            ids_T, size = ids_N[offsets[column] : offsets[column + 1]], self.spec.table_rows[table]
            if len(ids_T) and (ids_T.min() < 0 or ids_T.max() >= size):
                place = int(((ids_T < 0) | (ids_T >= size)).argmax())
                ends = np.cumsum(lengths_of(bags)[column])
                row = int(np.searchsorted(ends, place, side="right"))
                name = self.spec.table_names[table]
                raise _FaultError(
                    f"id {ids_T[place]} of row {row} in {name}, which has {size:,} rows"
                )
        return bags

    def of_trainers(self, data: Any, trainers: int, step: int) -> list[Batch]:
        """Check and convert the batches of one step, one for each trainer.

        Args:
            data: a batch of `trainers * batch_size` rows, which is split among the trainers in
                order; or a sequence of one batch for each trainer.
            trainers: number of trainers.
            step: number for error messages.

        Raises:
            DataError: see `batch`; or the number of batches is not that of trainers.
        """
        title = f"step {step}"
        if is_one(data):
            whole = self.batch(data, title, rows=trainers * self.batch_size)
            size = self.batch_size
            return [whole.part(slice(t * size, (t + 1) * size)) for t in range(trainers)]
        if isinstance(data, str) or not isinstance(data, Iterable):
            kind = type(data).__name__
            raise DataError(f"{title}: {kind}; {WHAT}; or a list of one for each trainer")
        batches = list(cast("Iterable[Any]", data))
        if len(batches) != trainers:
            raise DataError(
                f"{title}: {len(batches)} batches, must be one for each of {trainers} trainers, or "
                f"one batch of {trainers * self.batch_size} rows"
            )
        return [
            self.batch(batch, f"{title}, trainer {trainer}", self.batch_size)
            for trainer, batch in enumerate(batches)
        ]


class _FaultError(Exception):
    """A fault of a batch, without the batch's name, which the caller adds."""


def is_one(data: Any) -> bool:
    """Whether this is one batch, not a sequence of one for each trainer."""
    if isinstance(data, (Batch, Mapping)):
        return True
    if not isinstance(data, Sequence):
        return False
    parts = cast("Sequence[Any]", data)
    return len(parts) == len(KEYS) and _is_label(parts[2])


def _is_label(value: Any) -> bool:
    """Whether this is the label of a batch, not another batch, which begins with an array."""
    if not isinstance(value, Sequence):
        return hasattr(value, "shape")
    several = cast("Sequence[Any]", value)
    first: Any = several[0] if several else 0
    if isinstance(first, Sequence):
        row = cast("Sequence[Any]", first)
        first = row[0] if row else None
    return isinstance(first, Real) or getattr(first, "shape", None) == ()


def _with_label(data: Any) -> Any:
    """Add the label None to a batch without a label."""
    if isinstance(data, Mapping):
        return {"label": None, **cast("Mapping[Any, Any]", data)}
    if isinstance(data, Sequence) and len(cast("Sequence[Any]", data)) == len(KEYS) - 1:
        return (*cast("Sequence[Any]", data), None)
    return cast("Any", data)


def _parts(data: Any) -> tuple[Any, Any, Any, Any]:
    if isinstance(data, Mapping):
        mapping = cast("Mapping[Any, Any]", data)
        if set(mapping) - {WEIGHT} != set(KEYS):
            raise _FaultError(f"keys {', '.join(map(str, mapping))}; {WHAT}")
        return mapping["dense"], mapping["ids"], mapping["label"], mapping.get(WEIGHT)
    parts: Any = data
    if not isinstance(data, Sequence) or len(parts) != len(KEYS):
        raise _FaultError(f"{type(parts).__name__}; {WHAT}")
    dense, ids, label = parts
    return dense, ids, label, None


def _weights(value: Any, rows: int) -> Float32s | None:
    if value is None:
        return None
    weight_B = _array(WEIGHT, value, np.float32)
    if weight_B.shape != (rows,):
        raise _FaultError(f"weight has shape {_shape(weight_B)}, must be ({rows},)")
    for row in np.flatnonzero(bad_weights(weight_B))[:1].tolist():
        raise _FaultError(
            f"weight of row {row} is {weight_B[row]:g}, must be finite and at least 0"
        )
    return weight_B


def _array(name: str, value: Any, dtype: Any) -> npt.NDArray[Any]:
    """Copy to a contiguous array, since a loader may reuse its memory."""
    if hasattr(value, "detach"):
        value = value.detach().cpu()
    try:
        array = np.asarray(value)
    except (TypeError, ValueError, RuntimeError) as error:
        raise _FaultError(f"{name} is {type(value).__name__}, no array: {error}") from None
    kinds = "iub" if dtype is np.int64 else "iubf"
    if array.dtype.kind not in kinds:
        raise _FaultError(
            f"{name} is of {array.dtype}, must be {'integers' if kinds == 'iub' else 'numbers'}"
        )
    return np.array(array, dtype, order="C")


def _bags(value: Any, names: Sequence[str]) -> Bags[Int64s]:
    """Convert ids to bags in the order of tables."""
    if isinstance(value, Bags):
        as_bags = cast("Bags[Any]", value)
        ids_only = replace(as_bags, weights=None)
        bags = ids_only.map(lambda array: _array("ids", array, np.int64))
        weights = as_bags.weights
    elif hasattr(value, "keys") and hasattr(value, "lengths") and hasattr(value, "values"):
        keys: list[Any] = list(value.keys())
        if keys != list(names) and set(keys) == set(names):
            raise _FaultError(
                f"ids have keys {', '.join(keys)}, must be in the order of the tables: "
                f"{', '.join(names)}"
            )
        weights = getattr(value, "weights_or_none", lambda: None)()
        try:
            lengths_FB = _array("lengths", value.lengths(), np.int64).reshape(len(keys), -1)
            bags = jagged(_array("ids", value.values(), np.int64), lengths_FB)
        except ValueError as error:
            raise _FaultError(f"ids: {error}") from None
    else:
        ids_BF = _array("ids", value, np.int64)
        if ids_BF.ndim != 2:
            raise _FaultError(f"ids have shape {_shape(ids_BF)}, must be (rows, tables), or Bags")
        return Bags(np.ascontiguousarray(ids_BF.T))
    if weights is not None:
        weights_N = _array("weights of ids", weights, np.float32)
        is_odd_N = ~np.isfinite(weights_N.reshape(-1))
        if is_odd_N.any():
            place = int(is_odd_N.argmax())
            raise _FaultError(f"weight {place} of the ids is {weights_N.reshape(-1)[place]}")
        bags = replace(bags, weights=weights_N)
    try:
        require_offsets(bags)
    except ValueError as error:
        raise _FaultError(f"ids: {error}") from None
    return bags


def _shape(array: npt.NDArray[Any]) -> str:
    return f"({', '.join(map(str, array.shape))}{',' if array.ndim == 1 else ''})"


def tensors_of_batch(batch: Batch) -> dict[str, Tensor]:
    """Convert a batch to tensors by name, for an order to a worker."""
    offsets = {} if batch.bags.offsets is None else {"offsets": batch.bags.offsets}
    arrays = {"dense": batch.dense_BI, "ids": batch.bags.values, **offsets, "label": batch.label_B}
    if batch.bags.weights is not None:
        arrays["id_weights"] = batch.bags.weights
    if batch.bags.averaged:
        arrays["averaged"] = np.array(batch.bags.averaged, np.int64)
    if batch.weight_B is not None:
        arrays["weight"] = batch.weight_B
    return {name: torch.from_numpy(np.ascontiguousarray(array)) for name, array in arrays.items()}


def batch_of(tensors: Mapping[str, Tensor], tables: int) -> Batch:
    """Convert tensors back to the batch of `tensors_of_batch`."""
    arrays = {name: tensor.numpy() for name, tensor in tensors.items()}
    offsets = arrays.get("offsets")
    averaged = tuple(arrays.get("averaged", np.empty(0, np.int64)).tolist())
    tables, id_weights = 0 if offsets is None else tables, arrays.get("id_weights")
    bags = Bags(arrays["ids"], offsets, tables, averaged, id_weights)
    return Batch(arrays["dense"], bags, arrays["label"], arrays.get("weight"))
