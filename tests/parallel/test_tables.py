"""One set of tables that several trainers ask for distinct ids only."""

from typing import get_args

import pytest
import torch
from torch import Tensor

from dlrm_hybrid.bags import Bags
from dlrm_hybrid.bounds import WirePrecision
from dlrm_hybrid.model.embeddings import Embeddings
from dlrm_hybrid.model.exchange.floats import row_formats
from dlrm_hybrid.model.sharding import casts
from dlrm_hybrid.model.spec import ModelSpec
from dlrm_hybrid.model.tables import Fused, TableOptimizer
from dlrm_hybrid.model.tensors import draw_embeddings
from dlrm_hybrid.parallel.tables.shared import (
    AllIds,
    EachIdOnce,
    JointTables,
    LookupRequest,
    UpdateRequest,
)
from dlrm_hybrid.telemetry.spans import SpanClock
from dlrm_hybrid.types import BatchNumber

SPEC = ModelSpec(embedding_dim=4, bottom=(13, 4), top=(4, 1), table_rows=(3, 50, 1, 17))
ROWS_T = (6, 0, 11)


def embeddings_of(optimizer: str) -> Embeddings:
    options = Fused(optimizer=optimizer, eps=1e-8)
    embeddings = Embeddings(SPEC, options)
    draw_embeddings(embeddings.weights(), 1)
    return embeddings


def each_id_once(
    embeddings: Embeddings, precision: WirePrecision, trainers: int = len(ROWS_T)
) -> EachIdOnce:
    return EachIdOnce.of(embeddings, SPEC, row_formats(precision, SPEC.table_rows), trainers)


def step_of(seed: int) -> tuple[list[LookupRequest], list[UpdateRequest]]:
    generator = torch.Generator().manual_seed(seed)

    def ids_of(rows: int) -> Tensor:
        return torch.stack(
            [torch.randint(0, limit, (rows,), generator=generator) for limit in SPEC.table_rows]
        )

    batch = BatchNumber(seed)
    lookups = [LookupRequest(batch, Bags(ids_of(rows)), 0.05) for rows in ROWS_T]
    shape = (len(SPEC.table_rows), SPEC.embedding_dim)
    gradients = [torch.randn(rows, *shape, generator=generator) for rows in ROWS_T]
    return lookups, [UpdateRequest(batch, gradient_BFD) for gradient_BFD in gradients]


@pytest.mark.parametrize("optimizer", get_args(TableOptimizer))
def test_distinct_ids_learn_what_all_ids_learn(optimizer: str) -> None:
    found, expected = embeddings_of(optimizer), embeddings_of(optimizer)
    first = {name: weight.clone() for name, weight in expected.weights().items()}
    distinct = JointTables(each_id_once(found, "float32"), SpanClock())
    plain = JointTables(AllIds(expected, casts("float32")), SpanClock())
    for step in range(20):
        lookups, gradients = step_of(step)
        pairs = zip(distinct.lookup(lookups), plain.lookup(lookups), strict=True)
        assert all(torch.allclose(one, other, rtol=0, atol=1e-6) for one, other in pairs)
        distinct.update(gradients)
        plain.update(gradients)
    for name, weight in expected.weights().items():
        assert (found.weights()[name] - weight).abs().max() <= 1e-6, name
        assert (weight - first[name]).abs().max() >= 1e-3, name


@pytest.mark.parametrize("precision", ["float16", "bfloat16"])
def test_sums_of_equal_ids_are_rounded_not_their_parts(precision: WirePrecision) -> None:
    embeddings = embeddings_of("sgd")
    row_cast, gradient_cast = casts(precision)
    tables = JointTables(each_id_once(embeddings, precision, trainers=1), SpanClock())
    ids_FB = torch.zeros(4, 3, dtype=torch.int64)
    # The second and third vanish beside the first in half precision, unless they are summed first.
    gradient_BFD = torch.tensor([0.5, 0.0016, 0.0016]).view(3, 1, 1).expand(3, 4, 4)
    before = {name: weight.clone() for name, weight in embeddings.weights().items()}
    (pooled_BFD,) = tables.lookup([LookupRequest(BatchNumber(0), Bags(ids_FB), 1.0)])
    first_FD = torch.stack([weight[0] for weight in before.values()])
    assert torch.equal(pooled_BFD, row_cast.rounded(first_FD).expand(3, 4, 4))
    tables.update([UpdateRequest(BatchNumber(0), gradient_BFD)])
    total = gradient_BFD[0] + gradient_BFD[1] + gradient_BFD[2]
    for weight, old, sum_D in zip(
        embeddings.weights().values(), before.values(), gradient_cast.rounded(total), strict=True
    ):
        assert torch.equal(weight[0], old[0] - sum_D)
        assert torch.equal(weight[1:], old[1:])


@pytest.mark.parametrize("bad_id", [-1, 17, 2**32])
def test_an_id_that_is_no_row_is_refused(bad_id: int) -> None:
    ids_FB = torch.zeros(4, 3, dtype=torch.int64)
    ids_FB[3, 1] = bad_id
    for tables in (
        JointTables(AllIds(embeddings_of("sgd"), casts("float32")), SpanClock()),
        JointTables(each_id_once(embeddings_of("sgd"), "float32"), SpanClock()),
    ):
        with pytest.raises(RuntimeError, match="out of bounds|num_rows|Expected idx"):
            tables.predict([Bags(ids_FB)])
