"""Masks that depend on the row alone, and plain PyTorch with the same masks."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from reference_step import Dlrm

from dlrm_hybrid.model.dlrm import DlrmLayers
from dlrm_hybrid.model.interaction import Fm
from dlrm_hybrid.model.layers.mlp import Dropout
from dlrm_hybrid.model.layers.products import Precision
from dlrm_hybrid.model.spec import ModelSpec
from dlrm_hybrid.model.tables import Fused

SEED, ROWS = 5, 64
SPEC = ModelSpec(
    embedding_dim=4,
    bottom=(6, 32, 16, 4),
    top=(32, 16, 1),
    table_rows=(9, 30, 4),
    interaction=Fm(deep=(24, 12)),
    dropout=0.3,
)


@given(
    first=st.integers(0, 2**40),
    rows=st.integers(1, 20),
    width=st.integers(1, 40),
    share=st.floats(0, 0.99),
)
def test_a_row_is_dropped_alike_in_any_company(first: int, rows: int, width: int, share: float):
    dropout = Dropout.of("top.2", share, SEED)
    together = dropout.dropped(range(first, first + rows), width)
    alone = [dropout.dropped(range(row, row + 1), width) for row in range(first, first + rows)]
    assert together.shape == (rows, width)
    assert torch.equal(together, torch.cat(alone))


@pytest.mark.parametrize("share", [0.0, 0.1, 0.5, 0.99])
def test_the_share_that_is_dropped_and_sums_on_average(share: float):
    dropped = Dropout.of("top.1", share, SEED).dropped(range(7, 4007), 101)
    assert dropped.float().mean() == pytest.approx(share, abs=0.003)
    kept = (~dropped).float() * Dropout.of("top.1", share, SEED).scale
    assert kept.mean() == pytest.approx(1, abs=0.06)
    rows, columns = dropped.float().mean(1), dropped.float().mean(0)
    deviation = (share * (1 - share)) ** 0.5
    assert rows.std() == pytest.approx(deviation / 101**0.5, rel=0.1, abs=1e-9)
    assert columns.std() == pytest.approx(deviation / 4000**0.5, rel=0.4, abs=1e-9)


def test_layers_and_seeds_drop_otherwise():
    masks = [
        Dropout.of(layer, 0.5, seed).dropped(range(100), 50)
        for layer, seed in (("top.1", 1), ("top.2", 1), ("bottom.1", 1), ("top.1", 2))
    ]
    for index, mask in enumerate(masks):
        for other in masks[:index]:
            assert 0.4 < (mask == other).float().mean() < 0.6


def _model(spec: ModelSpec = SPEC) -> Dlrm:
    tables = Fused()
    return Dlrm(spec, tables, Precision.FLOAT32, SEED)


def test_nothing_is_dropped_where_rows_have_no_numbers():
    torch.manual_seed(1)
    dense_BI, e_BED = torch.randn(ROWS, 6), torch.randn(ROWS, 3, 4)

    model, whole = _model(), _model(replace(SPEC, dropout=0.0))
    assert torch.equal(model.logits(dense_BI, e_BED), whole.logits(dense_BI, e_BED))
    assert torch.equal(model.logits(dense_BI, e_BED), whole.logits(dense_BI, e_BED, range(ROWS)))
    assert not torch.equal(
        model.logits(dense_BI, e_BED, range(ROWS)), whole.logits(dense_BI, e_BED)
    )


@pytest.mark.parametrize(("bottom", "share"), [(0.0, 0.3), (0.3, 0.0), (None, 0.3)])
def test_the_bottom_mlp_may_drop_another_share(bottom: float | None, share: float):
    model = _model(replace(SPEC, dropout=share, bottom_dropout=bottom))
    layers = model.stage.layers
    assert isinstance(layers, DlrmLayers) and layers.bottom is not None and layers.top is not None
    rows, x_BI = range(ROWS), torch.rand(ROWS, 6)
    same_bottom = torch.equal(layers.bottom(x_BI, rows), layers.bottom(x_BI, None))
    assert same_bottom == (bottom == 0)
    y_BW = torch.randn(ROWS, model.spec.interaction_width)
    assert torch.equal(layers.top(y_BW, rows), layers.top(y_BW, None)) == (share == 0)
