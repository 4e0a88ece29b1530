"""DCT-MP as a module: what the codec sends, the gradients it lets through, what it counts."""

import copy

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from dlrm_hybrid.compress import SparseBoundary
from dlrm_hybrid.compress.activation.codec import Key
from dlrm_hybrid.compress.activation.dct import ThresholdCodec
from dlrm_hybrid.wire.section import Dtype, Section

KEY = Key(3, 1, 2)
WIDTHS = [1, 2, 7, 64, 255, 256, 257, 300]
DENSITIES = [0.01, 0.05, 0.1, 0.25, 0.5, 1.0]


def drawn(rows: int, width: int, seed: int, step: float = 0.0) -> Tensor:
    """Normal numbers; in steps of `step` many are equal and many 0."""
    x_BN = torch.randn(rows, width, generator=torch.Generator().manual_seed(seed))
    return (x_BN / step).round() * step if step else x_BN


def travelled(module: nn.Module, x_BN: Tensor, g_BN: Tensor) -> tuple[Tensor, Tensor]:
    """What goes on, and the gradient that comes back."""
    x_BN = x_BN.clone().requires_grad_()
    y_BN = module(x_BN)
    y_BN.backward(g_BN)
    assert x_BN.grad is not None
    return y_BN.detach(), x_BN.grad


def payload(sections: tuple[Section, ...]) -> int:
    return sum(len(section.payload) for section in sections)


@given(
    rows=st.integers(1, 9),
    width=st.sampled_from(WIDTHS),
    density=st.sampled_from(DENSITIES),
    step=st.sampled_from([0.0, 0.5, 2.0]),
    dtype=st.sampled_from([Dtype.FLOAT32, Dtype.BFLOAT16, Dtype.FLOAT16]),
    seed=st.integers(0, 2**20),
)
def test_the_module_does_what_the_codec_does_at_two_ends_of_a_wire(
    rows: int, width: int, density: float, step: float, dtype: Dtype, seed: int
) -> None:
    module = SparseBoundary(density)
    x_BN, g_BN = drawn(rows, width, seed, step), drawn(rows, width, seed + 1)
    if dtype is not Dtype.FLOAT32:  # numbers that the wire need not round
        x_BN, g_BN = (one.to(getattr(torch, dtype.name.lower())) for one in (x_BN, g_BN))
    y_BN, back_BN = travelled(module, x_BN, g_BN)

    codec = ThresholdCodec(sparsity=1 - density, dtype=dtype, allow_rice=False)
    sections, sent_K = codec.encode(x_BN.float(), KEY)
    received_BN, received_K = codec.decode(sections, x_BN.shape, KEY)
    gradients = codec.encode_gradient(g_BN.float(), received_K, KEY)
    returned_BN = codec.decode_gradient(gradients, x_BN.shape, sent_K, KEY)

    for got_BN, expected_BN in ((y_BN, received_BN), (back_BN, returned_BN)):
        assert torch.equal(got_BN.float().view(torch.int32), expected_BN.view(torch.int32))
    report = module.report()
    assert (report.forward_bytes, report.backward_bytes) == (payload(sections), payload(gradients))
    sent = codec.report()
    assert sent is not None
    assert (report.elements, report.kept) == (sent.elements, sent.sent)


@given(
    rows=st.integers(1, 5),
    width=st.sampled_from(WIDTHS),
    density=st.sampled_from(DENSITIES),
    step=st.sampled_from([0.0, 0.5]),
    seed=st.integers(0, 2**20),
)
def test_torch_alone_keeps_and_counts_what_the_kernel_does(
    rows: int, width: int, density: float, step: float, seed: int
) -> None:
    x_BN, g_BN = drawn(rows, width, seed, step), drawn(rows, width, seed + 1)
    by_kernel, by_torch = SparseBoundary(density), SparseBoundary(density)
    expected = travelled(by_kernel, x_BN, g_BN)
    got = travelled(by_torch, x_BN.double(), g_BN.double())
    assert all(torch.equal(a, b.double()) for a, b in zip(got, expected, strict=True))
    ours, theirs = by_kernel.report(), by_torch.report()
    assert (ours.elements, ours.kept) == (theirs.elements, theirs.kept)
    assert 2 * ours.backward_bytes == theirs.backward_bytes


def test_as_many_of_every_row_as_the_density_says() -> None:
    module = SparseBoundary(0.1)
    y_BN, _ = travelled(module, drawn(8, 256, 1), torch.ones(8, 256))
    assert (y_BN != 0).sum(dim=1).tolist() == [26] * 8
    report = module.report()
    assert report.density == 26 / 256
    # A byte for each row's count and each position; values are 4 bytes.
    assert report.forward_bytes == 8 + 8 * 26 * (1 + 4)
    assert report.backward_bytes == 8 * 26 * 4
    assert module.report().elements == 0


def test_more_than_two_dimensions_are_rows_too() -> None:
    x = drawn(12, 20, 2)
    whole = SparseBoundary(0.25)(x)
    assert torch.equal(SparseBoundary(0.25)(x.view(3, 4, 20)), whole.view(3, 4, 20))
    assert torch.equal(SparseBoundary(0.25)(x.T.contiguous().T), whole)  # not contiguous
    assert SparseBoundary(0.25)(torch.empty(0, 20)).shape == (0, 20)
    assert torch.equal(SparseBoundary(0.25)(x[0]), whole[0])


def test_its_gradient_is_that_of_a_constant_mask() -> None:
    x = drawn(3, 10, 3).double().requires_grad_()
    assert torch.autograd.gradcheck(SparseBoundary(0.3), (x,))
    assert torch.autograd.gradgradcheck(SparseBoundary(0.3), (x,))


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_what_is_not_finite_goes_on(bad: float, dtype: torch.dtype) -> None:
    x_BN = drawn(4, 20, 4).to(dtype)
    x_BN[2, 5] = bad
    y_BN, _ = travelled(SparseBoundary(0.05), x_BN, torch.ones_like(x_BN))
    assert torch.equal(y_BN[2, 5].isnan(), x_BN[2, 5].isnan())
    assert not y_BN[2, 5].isfinite()
    assert (y_BN != 0).sum(dim=1).tolist() == [1, 1, 20 if bad != bad else 1, 1]
    _, back_BN = travelled(SparseBoundary(0.05), drawn(4, 20, 4), torch.full((4, 20), bad))
    assert int((~back_BN.isfinite()).sum()) == 4  # and none where 0 was sent


def test_compiled_it_is_one_graph_with_the_same_numbers() -> None:
    net = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), SparseBoundary(0.1), nn.Linear(32, 4))
    x_BN, g_BN = drawn(5, 8, 6), drawn(5, 4, 7)
    twin = copy.deepcopy(net)
    compiled = torch.compile(twin, backend="aot_eager", fullgraph=True)
    for seed in range(3):
        x_BN = drawn(5, 8, seed)
        assert all(map(torch.equal, travelled(net, x_BN, g_BN), travelled(compiled, x_BN, g_BN)))
    assert net[2].report() == twin[2].report()
    torch._dynamo.reset()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_torch_finds_nothing_wrong_with_the_operator(dtype: torch.dtype) -> None:
    operator = torch.ops.dlrm_hybrid.largest_of_rows.default
    for x in (drawn(3, 5, 1), drawn(5, 3, 1).T):
        torch.library.opcheck(operator, (x.to(dtype), 2, True))


def test_it_runs_where_all_must_be_deterministic() -> None:
    torch.use_deterministic_algorithms(True)
    try:
        assert SparseBoundary(0.5)(drawn(3, 5, 1).double()).count_nonzero() == 3 * 3
    finally:
        torch.use_deterministic_algorithms(False)


def test_it_selects_in_the_type_that_autocast_gives() -> None:
    net = nn.Sequential(nn.Linear(8, 40), SparseBoundary(0.1), nn.Linear(40, 1))
    with torch.autocast("cpu", torch.bfloat16):
        net(drawn(5, 8, 8)).sum().backward()
    report = net[1].report()
    assert report.backward_bytes == 2 * report.kept >= 2 * 5 * 4
    assert net[0].weight.grad is not None and net[0].weight.grad.isfinite().all()


def test_functions_of_functions() -> None:
    x_BN = drawn(3, 10, 9)
    module = SparseBoundary(0.2)
    gradient_BN = torch.func.grad(lambda x: module(x).square().sum())(x_BN)
    assert torch.equal(gradient_BN, 2 * module(x_BN))


def test_a_transformer_layer_keeps_it_in_evaluations() -> None:
    module = SparseBoundary(0.1)
    layer = nn.TransformerEncoderLayer(
        16, 2, 40, batch_first=True, activation=nn.Sequential(nn.ReLU(), module)
    )
    layer.eval()
    with torch.no_grad():
        layer(drawn(6, 16, 10).view(2, 3, 16))
    report = module.report()
    assert 0 < report.kept <= 2 * 3 * 4
    assert report.backward_bytes == 0


def test_evaluations_may_be_let_alone() -> None:
    x_BN = drawn(3, 10, 11)
    module = SparseBoundary(0.1, evaluate_masked=False)
    assert not torch.equal(module(x_BN), x_BN)
    assert torch.equal(module.eval()(x_BN), x_BN)
    assert torch.equal(SparseBoundary(0.1).eval()(x_BN), module.train()(x_BN))


def test_it_holds_nothing_that_ranks_or_checkpoints_would_share() -> None:
    module = SparseBoundary(0.1)
    module(drawn(3, 10, 12))
    assert not module.state_dict()
    assert not list(module.buffers())
    assert repr(module) == "SparseBoundary(density=0.1, evaluate_masked=True)"


@pytest.mark.parametrize("density", [0.0, -0.1, 1.01, float("nan"), "0.1", None])
def test_a_density_out_of_bounds_is_refused(density: float) -> None:
    with pytest.raises(ValueError, match=r"density=.* is not in \(0, 1\]"):
        SparseBoundary(density)


@pytest.mark.parametrize("x", [torch.tensor(1.0), torch.ones(3, 4, dtype=torch.int64)])
def test_what_has_no_rows_of_floats_is_refused(x: Tensor) -> None:
    with pytest.raises(ValueError, match=f"{x.dtype} of shape .* is not rows of floats"):
        SparseBoundary(0.5)(x)
