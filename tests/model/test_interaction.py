import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dlrm_hybrid.model.layers.interactions import DotInteraction


@given(rows=st.integers(1, 5), tables=st.integers(1, 7), dim=st.integers(1, 6))
def test_equals_a_loop_over_pairs(rows: int, tables: int, dim: int):
    generator = torch.Generator().manual_seed(rows * 100 + tables * 10 + dim)
    x_BD = torch.randn(rows, dim, generator=generator)
    e_BED = torch.randn(rows, tables, dim, generator=generator)
    out_BW = DotInteraction(tables + 1, dim)(x_BD, e_BED)
    for row in range(rows):
        vectors = [x_BD[row], *e_BED[row]]
        dots = [vectors[i] @ vectors[j] for i in range(tables + 1) for j in range(i)]
        expected_W = torch.cat([x_BD[row], torch.stack(dots)])
        torch.testing.assert_close(out_BW[row], expected_W)


@given(rows=st.integers(1, 5), tables=st.integers(2, 7), dim=st.integers(1, 6))
def test_without_a_bottom_mlp_there_are_the_tables_pairs_alone(rows: int, tables: int, dim: int):
    e_BED = torch.randn(rows, tables, dim, generator=torch.Generator().manual_seed(tables))
    out_BP = DotInteraction(tables, 0)(torch.empty(rows, 0), e_BED)
    dots = [(e_BED[:, i] * e_BED[:, j]).sum(1) for i in range(tables) for j in range(i)]
    torch.testing.assert_close(out_BP, torch.stack(dots, 1))


def test_gradients_without_a_bottom_mlp_are_those_of_finite_differences():
    torch.manual_seed(1)
    e_BED = torch.randn(3, 4, 5, dtype=torch.float64, requires_grad=True)
    module, x_B0 = DotInteraction(4, 0), torch.empty(3, 0, dtype=torch.float64)
    assert torch.autograd.gradcheck(lambda e: module(x_B0, e), (e_BED,))


@pytest.mark.parametrize("tables", [1, 4])
def test_gradients_are_those_of_finite_differences(tables: int):
    torch.manual_seed(1)
    x_BD = torch.randn(3, 5, dtype=torch.float64, requires_grad=True)
    e_BED = torch.randn(3, tables, 5, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(DotInteraction(tables + 1, 5), (x_BD, e_BED))
