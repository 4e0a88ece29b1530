"""Models with bags of any size: what is written pools as the model does."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dlrm_hybrid.bags import jagged, lengths_of
from dlrm_hybrid.data.loader import Batch
from dlrm_hybrid.export.formats import ModelFile
from dlrm_hybrid.model.dlrm import StageModel
from dlrm_hybrid.model.embeddings import Embeddings
from dlrm_hybrid.model.layers.products import Precision
from dlrm_hybrid.model.spec import ModelSpec, Partition
from dlrm_hybrid.model.tables import Fused
from dlrm_hybrid.model.tensors import draw_embeddings
from dlrm_hybrid.saved.inputs import ListInputs, inputs_of
from dlrm_hybrid.saved.model import SavedModel

SPEC = ModelSpec(embedding_dim=4, bottom=(3, 8, 4), top=(8, 1), table_rows=(50, 60, 70))
OPTIONS = Fused()
TOLERANCE = 1e-5


def drawn(
    rows: int,
    multi_hot: tuple[int, ...],
    most: int = 5,
    averaged: tuple[int, ...] = (),
    weighted: tuple[int, ...] = (),
) -> Batch:
    """Rows with empty bags among them."""
    rng = np.random.default_rng(rows)
    lengths_FB = np.ones((3, rows), np.int64)
    for number in multi_hot:
        lengths_FB[number] = rng.integers(0, most + 1, rows)
    sizes = zip(SPEC.table_rows, lengths_FB.sum(1), strict=True)
    values_N = np.concatenate([rng.integers(0, size, count) for size, count in sizes])
    dense_BI = rng.random((rows, 3), np.float32)
    is_weighted_F = np.isin(np.arange(3), weighted)
    weights_N = rng.normal(size=len(values_N)).astype(np.float32)
    weights_N[~np.repeat(is_weighted_F, lengths_FB.sum(1))] = 1
    bags = jagged(values_N, lengths_FB, averaged, weights_N if weighted else None)
    return Batch(dense_BI, bags, np.zeros(rows, np.float32))


@pytest.mark.parametrize(
    ("format", "int8", "multi_hot"),
    [
        pytest.param("pt2", False, (0, 1, 2), marks=pytest.mark.slow),
        pytest.param("onnx", False, (1,), marks=pytest.mark.slow),
        *(("pt2", True, (1,)), ("onnx", True, (0, 1, 2))),
        *(("safetensors", False, (1,)), ("safetensors", True, (0, 1, 2))),
    ],
)
def test_bags_are_pooled_as_they_should_an_unknown_id_is_zeros_and_one_too_large_an_error(
    format: Any, int8: bool, multi_hot: tuple[int, ...], tmp_path: Path
) -> None:
    """The program gives an unknown category the id behind the last row, whose weights are zero."""
    padded_rows = tuple(rows + 1 for rows in SPEC.table_rows)
    spec = replace(SPEC, table_rows=padded_rows)
    layers = StageModel(spec, Partition.of(spec, ()).stages[0], Precision.FLOAT32, 1)
    padded = SavedModel(spec, Embeddings(spec, OPTIONS), (layers,))
    draw_embeddings(padded.embeddings.weights(), 1)
    tensors = dict(padded.tensors)
    for name, rows in zip(SPEC.table_names, SPEC.table_rows, strict=True):
        tensors[f"{name}.weight"][rows:] = 0
        tensors[f"{name}.weight"] = tensors[f"{name}.weight"][:rows]
    averaged, weighted = multi_hot[-1:], multi_hot[:-1]
    lists = ListInputs(multi_hot, averaged, weighted)
    file = ModelFile(format=format, naming="ours", spec=SPEC, int8=int8, lists=lists)
    file.write(tmp_path, tensors)
    before = file.expected(tensors) if int8 else padded.score
    after = file.scorer(tmp_path)
    # batches and lists of any size, one without any id
    known, *others = (
        drawn(rows, multi_hot, most, averaged, weighted)
        for rows, most in ((500, 5), (1, 5), (7, 40), (3, 0))
    )
    for batch in (known, *others):
        for wanted, found in zip(before(batch), after(batch), strict=True):
            np.testing.assert_allclose(found, wanted, rtol=0, atol=TOLERANCE)

    sizes_N = np.repeat(SPEC.table_rows, lengths_of(known.bags).sum(1))
    values_N = known.bags.values.reshape(-1)
    is_unknown_N = np.random.default_rng(0).random(len(values_N)) < 0.3
    if averaged:  # whose -1 are not counted
        is_unknown_N[np.repeat(np.arange(3), lengths_of(known.bags).sum(1)) == averaged[0]] = False

    def of(ids_N: Any) -> Batch:
        return replace(known, bags=replace(known.bags, values=ids_N))

    expected = padded.score(of(np.where(is_unknown_N, sizes_N, values_N)))
    found = after(of(np.where(is_unknown_N, -1, values_N)))
    assert np.abs(found[0] - padded.score(known)[0]).max() > 0.01
    np.testing.assert_allclose(found[0], expected[0], rtol=0, atol=1e-2 if int8 else TOLERANCE)
    with pytest.raises(Exception, match="out of range|out of data bounds|invalid index"):
        after(of(np.where(is_unknown_N, sizes_N, values_N)))


def test_lists_are_padded_with_minus_one_row_by_row() -> None:
    lengths_FB = np.array([[1, 1], [0, 3], [1, 1]])
    bags = jagged(np.array([4, 5, 10, 11, 12, 6, 7]), lengths_FB)
    found = inputs_of(np.zeros((2, 3), np.float32), bags, ListInputs((1,)))
    assert found.keys() == {"dense", "ids", "ids_2"}
    assert found["ids"].tolist() == [[4, 6], [5, 7]]
    assert found["ids_2"].tolist() == [[-1, -1, -1], [10, 11, 12]]
    weighted = replace(bags, weights=np.array([1, 1, 0.5, 2, -3, 1, 1], np.float32))
    found = inputs_of(np.zeros((2, 0), np.float32), weighted, ListInputs((1,), weighted=(1,)))
    assert list(found) == ["ids", "ids_2", "weights_2"]
    assert found["weights_2"].tolist() == [[0, 0, 0], [0.5, 2, -3]]
