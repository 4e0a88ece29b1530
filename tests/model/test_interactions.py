"""Dots, cross layers and factorization machines against loops, TorchRec and the paper's sums."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torchrec.models.deepfm import FMInteractionArch
from torchrec.modules.crossnet import CrossNet, LowRankCrossNet
from torchrec.modules.deepfm import FactorizationMachine as FlatMachine
from torchrec.sparse.jagged_tensor import KeyedTensor

from dlrm_hybrid.model.interaction import Cross, Dot, Fm, Interaction
from dlrm_hybrid.model.layers.interactions import CrossNetwork, DotInteraction, interaction
from dlrm_hybrid.model.layers.products import Precision
from dlrm_hybrid.model.spec import ModelSpec
from dlrm_hybrid.model.tensors import draw_dense

ROWS, TABLES, DIM = 24, 6, 16
WIDTH = (TABLES + 1) * DIM


def _spec(chosen: Interaction) -> ModelSpec:
    return ModelSpec(
        embedding_dim=DIM, bottom=(3, DIM), top=(1,), table_rows=(5,) * TABLES, interaction=chosen
    )


def _drawn(chosen: Interaction, precision: Precision = Precision.FLOAT32) -> nn.Module:
    module = interaction(_spec(chosen), precision, seed=0)
    draw_dense(dict(module.named_parameters()), seed=4)
    return module


def _inputs(rows: int = ROWS) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(rows)
    x_BD = torch.randn(rows, DIM, generator=generator, requires_grad=True)
    e_BED = torch.randn(rows, TABLES, DIM, generator=generator, requires_grad=True)
    return x_BD, e_BED


def _gradients(out_BW: Tensor, leaves: list[Tensor]) -> list[Tensor]:
    weight_BW = torch.linspace(-1, 1, out_BW.numel()).view_as(out_BW)
    return list(torch.autograd.grad((out_BW * weight_BW).sum() / ROWS, leaves))


def _assert_same(mine: list[Tensor], theirs: list[Tensor]) -> None:
    for one, other in zip(mine, theirs, strict=True):
        assert other.abs().max() > 1e-2
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-6)


@given(
    rows=st.integers(1, 5), tables=st.integers(2, 7), dim=st.integers(1, 6), bottom=st.booleans()
)
def test_dots_equal_a_loop_over_pairs(rows: int, tables: int, dim: int, bottom: bool):
    generator = torch.Generator().manual_seed(rows * 100 + tables * 10 + dim)
    x_BD = torch.randn(rows, dim if bottom else 0, generator=generator)
    e_BED = torch.randn(rows, tables, dim, generator=generator)
    out_BW = DotInteraction(tables + bottom, x_BD.shape[1])(x_BD, e_BED)
    vectors = [*([x_BD] if bottom else []), *e_BED.unbind(1)]
    dots = [(vectors[i] * vectors[j]).sum(1) for i in range(len(vectors)) for j in range(i)]
    torch.testing.assert_close(out_BW, torch.cat([x_BD, torch.stack(dots, 1)], 1))


@pytest.mark.parametrize(("tables", "dim"), [(1, 5), (4, 5), (4, 0)])
def test_gradients_of_dots_are_those_of_finite_differences(tables: int, dim: int):
    torch.manual_seed(1)
    x_BD = torch.randn(3, dim, dtype=torch.float64, requires_grad=True)
    e_BED = torch.randn(3, tables, 5, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(DotInteraction(tables + (dim > 0), dim), (x_BD, e_BED))


@pytest.mark.parametrize(("layers", "rank"), [(1, 1), (3, 8), (2, 64)])
def test_cross_layers_equal_those_of_torchrec(layers: int, rank: int):
    module = _drawn(Cross(layers=layers, rank=rank))
    theirs = LowRankCrossNet(WIDTH, num_layers=layers, low_rank=rank)
    named = dict(module.named_parameters())
    with torch.no_grad():
        for layer in range(layers):
            theirs.V_kernels[layer].copy_(named[f"{layer + 1}.v"])
            theirs.W_kernels[layer].copy_(named[f"{layer + 1}.w"])
            theirs.bias[layer].copy_(named[f"{layer + 1}.bias"])
    x_BD, e_BED = _inputs()
    out_BW = module(x_BD, e_BED)
    z_BFD = torch.cat((x_BD.unsqueeze(1), e_BED), 1)
    expected_BW = theirs(z_BFD.reshape(ROWS, -1))
    assert out_BW.shape == (ROWS, WIDTH)
    torch.testing.assert_close(out_BW, expected_BW, rtol=1e-6, atol=1e-6)
    ordered = [
        tensors[layer]
        for layer in range(layers)
        for tensors in (theirs.V_kernels, theirs.W_kernels, theirs.bias)
    ]
    _assert_same(
        _gradients(out_BW, [x_BD, e_BED, *named.values()]),
        _gradients(expected_BW, [x_BD, e_BED, *ordered]),
    )


def test_a_machine_and_its_deep_network_are_laid_out_as_those_of_torchrec():
    module = _drawn(Fm(deep=(32,)))
    keys = [str(table) for table in range(TABLES)]
    theirs = FMInteractionArch(WIDTH, keys, deep_fm_dimension=32)
    named = dict(module.named_parameters())
    linear = theirs.deep_fm.dense_module[0]
    with torch.no_grad():
        linear.weight.copy_(named["deep.1.weight"])
        linear.bias.copy_(named["deep.1.bias"])
    x_BD, e_BED = _inputs()
    out_BW = module(x_BD, e_BED)
    looked_up = KeyedTensor(keys, [DIM] * TABLES, e_BED.flatten(1))
    expected_BW = theirs(x_BD, looked_up)
    assert out_BW.shape == expected_BW.shape == (ROWS, DIM + 32 + 1)
    # All but the last column: TorchRec's machine takes every number for a vector.
    torch.testing.assert_close(out_BW[:, :-1], expected_BW[:, :-1], rtol=1e-6, atol=1e-6)
    z_BFD = torch.cat((x_BD.unsqueeze(1), e_BED), 1)
    by_column_BD = torch.cat([FlatMachine()([z_BFD[:, :, d : d + 1]]) for d in range(DIM)], 1)
    sums_B1 = by_column_BD.sum(1, keepdim=True)
    torch.testing.assert_close(out_BW[:, -1:], sums_B1, rtol=1e-5, atol=1e-5)
    plain_BW = torch.cat((expected_BW[:, :-1], sums_B1), 1)
    _assert_same(
        _gradients(out_BW, [x_BD, e_BED, *named.values()]),
        _gradients(plain_BW, [x_BD, e_BED, linear.weight, linear.bias]),
    )


def test_the_last_number_of_a_machine_is_the_sum_of_all_dots():
    x_BD, e_BED = _inputs(rows=5)
    out_BW = _drawn(Fm(deep=(4,)))(x_BD, e_BED)
    for row in range(5):
        vectors = [x_BD[row], *e_BED[row]]
        dots = [vectors[i] @ vectors[j] for i in range(TABLES + 1) for j in range(i)]
        torch.testing.assert_close(out_BW[row, -1], torch.stack(dots).sum(), rtol=1e-4, atol=1e-4)


def test_full_cross_layers_beside_a_deep_network_are_those_of_torchrec():
    module = _drawn(Cross(layers=3, rank=None, deep=(32, 8)))
    theirs = CrossNet(WIDTH, num_layers=3)
    named = dict(module.named_parameters())
    with torch.no_grad():
        for layer in range(3):
            theirs.kernels[layer].copy_(named[f"{layer + 1}.w"])
            theirs.bias[layer].copy_(named[f"{layer + 1}.bias"].view_as(theirs.bias[layer]))
    x_BD, e_BED = _inputs()
    out_BW = module(x_BD, e_BED)
    x0_BW = torch.cat((x_BD, e_BED.flatten(1)), 1)
    deep_BM = x0_BW
    for layer in (1, 2):
        weight, bias = named[f"deep.{layer}.weight"], named[f"deep.{layer}.bias"]
        deep_BM = nn.functional.linear(deep_BM, weight, bias).relu()
    expected_BW = torch.cat((theirs(x0_BW), deep_BM), 1)
    assert out_BW.shape == (ROWS, WIDTH + 8)
    torch.testing.assert_close(out_BW, expected_BW, rtol=1e-6, atol=1e-5)
    ordered = [one for pair in zip(theirs.kernels, theirs.bias, strict=True) for one in pair]
    leaves = [named[f"deep.{layer}.{kind}"] for layer in (1, 2) for kind in ("weight", "bias")]
    mine = _gradients(out_BW, [x_BD, e_BED, *named.values()])
    wanted = _gradients(expected_BW, [x_BD, e_BED, *ordered, *leaves])
    for one, other in zip(mine, wanted, strict=True):
        assert other.abs().max() > 1e-3
        torch.testing.assert_close(one, other.view_as(one), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    "chosen", [Cross(layers=2, rank=64), Cross(layers=2, rank=None, deep=(8,)), Fm(deep=(64, 32))]
)
def test_bfloat16_is_near_and_gradients_stay_float32(chosen: Interaction):
    x_BD, e_BED = _inputs()
    exact, rounded = (_drawn(chosen, one) for one in Precision)
    y_BW, z_BW = exact(x_BD, e_BED), rounded(x_BD, e_BED)
    assert z_BW.dtype == torch.float32
    assert not torch.equal(y_BW, z_BW)
    torch.testing.assert_close(y_BW, z_BW, rtol=0.05, atol=0.2)
    leaves = [x_BD, e_BED]
    for mine, theirs in zip(
        _gradients(y_BW, [*leaves, *exact.parameters()]),
        _gradients(z_BW, [*leaves, *rounded.parameters()]),
        strict=True,
    ):
        assert theirs.dtype == torch.float32
        assert torch.cosine_similarity(mine.flatten(), theirs.flatten(), dim=0) > 0.99


@given(
    tables=st.integers(1, 9),
    dim=st.integers(1, 8),
    chosen=st.one_of(
        st.just(Dot()),
        st.builds(
            Cross,
            layers=st.integers(1, 4),
            rank=st.none() | st.integers(1, 9),
            deep=st.lists(st.integers(1, 9), max_size=3).map(tuple),
        ),
        st.builds(Fm, deep=st.lists(st.integers(1, 9), min_size=1, max_size=3).map(tuple)),
    ),
)
def test_a_spec_knows_width_and_parameters(tables: int, dim: int, chosen: Interaction):
    spec = ModelSpec(
        embedding_dim=dim, bottom=(2, dim), top=(3, 1), table_rows=(4,) * tables, interaction=chosen
    )
    module = interaction(spec, Precision.FLOAT32, seed=0)
    out_BW = module(torch.ones(2, dim), torch.ones(2, tables, dim))
    assert out_BW.shape == (2, spec.interaction_width)
    found = {f"interaction.{name}": tuple(one.shape) for name, one in module.named_parameters()}
    shapes = spec.dense_shapes()
    assert {name: shapes[name] for name in shapes if name.startswith("interaction.")} == found
    assert list(shapes) == ["bottom.1.weight", "bottom.1.bias", *found, *list(shapes)[-4:]]
    assert shapes["top.1.weight"] == (3, spec.interaction_width)


def test_cross_layers_that_add_nothing_leave_the_vectors():
    cross = Cross(layers=2, rank=3)
    module = CrossNetwork(_spec(cross), cross, Precision.FLOAT32, seed=0)
    x_BD, e_BED = _inputs()
    assert torch.equal(module(x_BD, e_BED), torch.cat((x_BD, e_BED.flatten(1)), 1))
