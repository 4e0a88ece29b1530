"""Batch norm and dropout: those of torch in training, in evaluation, and folded norms."""

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from dlrm_hybrid.model.dlrm import StageModel
from dlrm_hybrid.model.interaction import Fm
from dlrm_hybrid.model.layers.mlp import Dropout, Mlp
from dlrm_hybrid.model.layers.norm import folded
from dlrm_hybrid.model.layers.norm import statistics as statistics_of
from dlrm_hybrid.model.layers.products import Precision
from dlrm_hybrid.model.optimizer import Adam, init_state
from dlrm_hybrid.model.spec import ModelSpec, Partition

ROWS, STEPS, LR, SEED, SHARE = 64, 20, 0.001, 5, 0.25
EPS = 1e-6  # with less, rounding would decide updates by gradients that are nearly 0
SPEC = ModelSpec(
    embedding_dim=8,
    bottom=(13, 96, 48, 8),
    top=(80, 40, 1),
    table_rows=(30,) * 5,
    interaction=Fm(deep=(72, 24)),
    dropout=SHARE,
    batch_norm=True,
)


class Masked(nn.Module):
    """torch.nn.Dropout with the masks of a run in place of torch's own."""

    def __init__(self, layer: str) -> None:
        super().__init__()
        self.dropout = Dropout.of(layer, SHARE, SEED)
        self.rows: range | None = None

    def forward(self, x_BM: Tensor) -> Tensor:
        if not self.training:
            return x_BM
        assert self.rows is not None
        return x_BM * ~self.dropout.dropped(self.rows, x_BM.shape[1]) / (1 - SHARE)


def hidden(name: str, widths: Sequence[int], *, normed: bool, bias: bool) -> list[nn.Module]:
    """Linear → BatchNorm → ReLU → dropout, as users of torch write it."""
    modules: list[nn.Module] = []
    for layer, (fan_in, fan_out) in enumerate(zip(widths, widths[1:], strict=False), 1):
        linear = nn.Linear(fan_in, fan_out, bias=bias)
        norm = nn.BatchNorm1d(fan_out) if normed else nn.Identity()
        modules += [linear, norm, nn.ReLU(), Masked(f"{name}.{layer}")]
    return modules


class Plain(nn.Module):
    """DeepFM out of torch's modules, with the weights of a model of ours."""

    def __init__(self, ours: StageModel, **how: bool) -> None:
        super().__init__()
        bottom = hidden("bottom", SPEC.bottom[:-1], **how)
        self.bottom = nn.Sequential(*bottom, nn.Linear(*SPEC.bottom[-2:]), nn.ReLU())
        assert isinstance(SPEC.interaction, Fm)
        widths = (SPEC.num_vectors * SPEC.embedding_dim, *SPEC.interaction.deep)
        self.deep = nn.Sequential(*hidden("interaction.deep", widths, **how))
        top = hidden("top", SPEC.top_widths[:-1], **how)
        self.top = nn.Sequential(*top, nn.Linear(*SPEC.top_widths[-2:]))
        for name, tensor in ours.dense_parameters().items():
            self.named(name).data.copy_(tensor.detach())

    def named(self, name: str) -> Tensor:
        """The tensor that is called so in a model of ours."""
        mlp, layer, kind = name.removeprefix("interaction.").split(".", 2)
        at = 4 * (int(layer) - 1) + kind.startswith("norm.")
        found: Tensor = getattr(getattr(self, mlp)[at], kind.removeprefix("norm."))
        return found

    def forward(self, dense_BI: Tensor, pooled_BFD: Tensor, rows: range) -> Tensor:
        for module in self.modules():
            if isinstance(module, Masked):
                module.rows = rows
        x_BD = self.bottom(dense_BI)
        z_BFD = torch.cat((x_BD.unsqueeze(1), pooled_BFD), 1)
        pairs_BD = z_BFD.sum(1).square() - z_BFD.square().sum(1)
        deep_BM = self.deep(z_BFD.flatten(1))
        return self.top(torch.cat((x_BD, deep_BM, pairs_BD.sum(1, keepdim=True) / 2), 1))


def batch(seed: int) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    dense_BI = torch.randn(ROWS, 13, generator=generator)
    pooled_BFD = torch.randn(ROWS, 5, 8, generator=generator)
    return dense_BI, pooled_BFD, (dense_BI[:, :1] + pooled_BFD[:, 0, :1] > 0).float()


def model(normed: bool = True) -> StageModel:
    spec = replace(SPEC, batch_norm=normed)
    (part,) = Partition.of(spec, ()).stages
    return StageModel(spec, part, Precision.FLOAT32, SEED)


def train(ours: StageModel, steps: int) -> list[float]:
    """The losses of some steps with this project's Adam."""
    weights, adam = ours.dense_parameters(), Adam(betas=(0.9, 0.999), eps=EPS)
    state, losses = init_state(adam, weights), list[float]()
    for step in range(steps):
        dense_BI, pooled_BFD, label_B = batch(step)
        rows = range(step * ROWS, (step + 1) * ROWS)
        logit_B = ours(dense_BI, pooled_BFD, rows)
        loss = nn.functional.binary_cross_entropy_with_logits(logit_B, label_B)
        gradients = torch.autograd.grad(loss, list(weights.values()))
        with torch.no_grad():
            for (name, weight), gradient in zip(weights.items(), gradients, strict=True):
                adam.apply(weight, gradient, state[name], LR)
        losses.append(float(loss.detach()))
    return losses


def train_plain(plain: Plain, steps: int) -> list[float]:
    optimizer, losses = torch.optim.Adam(plain.parameters(), LR, eps=EPS), list[float]()
    for step in range(steps):
        dense_BI, pooled_BFD, label_B = batch(step)
        optimizer.zero_grad()
        logit_B = plain(dense_BI, pooled_BFD, range(step * ROWS, (step + 1) * ROWS))
        loss = nn.functional.binary_cross_entropy_with_logits(logit_B, label_B)
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses


@pytest.mark.parametrize(("normed", "bias"), [(True, False), (True, True), (False, True)])
def test_twenty_steps_of_adam_are_those_of_plain_torch(normed: bool, bias: bool):
    ours = model(normed)
    first = {name: one.detach().clone() for name, one in ours.dense_parameters().items()}
    plain = Plain(ours, normed=normed, bias=bias)
    losses, expected = train(ours, STEPS), train_plain(plain, STEPS)
    assert losses == pytest.approx(expected, rel=0, abs=1e-6)
    for name, weight in ours.dense_parameters().items():
        torch.testing.assert_close(weight, plain.named(name), rtol=0, atol=1e-6)
        assert (weight - first[name]).abs().max() > 1e-3
    held = ours.statistics()
    assert set(held) == set(SPEC.statistics_shapes() if normed else ())
    for name, running in held.items():
        # A bias of a layer moves the mean, and the norm takes it away again.
        if not bias or name.endswith("var"):
            torch.testing.assert_close(running, plain.named(name), rtol=1e-6, atol=1e-6)
        assert not torch.equal(running, torch.full_like(running, name.endswith("var")))
    if normed and bias:
        return
    plain.eval()
    dense_BI, pooled_BFD, _ = batch(STEPS)
    with torch.no_grad():
        logit_B, same_B = ours(dense_BI, pooled_BFD), plain(dense_BI, pooled_BFD, range(0))
        trained_B = ours(dense_BI, pooled_BFD, range(ROWS))
    torch.testing.assert_close(logit_B, same_B, rtol=0, atol=1e-6)
    assert (logit_B - trained_B).abs().max() > 0.1


def test_evaluations_leave_statistics_alone_and_score_each_row_by_itself():
    ours = model()
    train(ours, 3)
    before = {name: one.clone() for name, one in ours.statistics().items()}
    dense_BI, pooled_BFD, _ = batch(3)
    with torch.no_grad():
        whole_B = ours(dense_BI, pooled_BFD)
        parts = [ours(dense_BI[some], pooled_BFD[some]) for some in (slice(0, 9), slice(9, None))]
        ours(dense_BI[:1], pooled_BFD[:1])  # one row has no variance, and needs none
    torch.testing.assert_close(torch.cat(parts), whole_B, rtol=0, atol=1e-6)
    for name, running in ours.statistics().items():
        assert torch.equal(running, before[name])


def test_a_norm_after_training_is_a_linear_layer():
    ours = model()
    train(ours, STEPS)
    held = {**ours.dense_parameters(), **ours.statistics()}
    for layer, width in SPEC.normed_layers.items():
        kinds = ("weight", "norm.weight", "norm.bias", "norm.running_mean", "norm.running_var")
        weight_MN, *of_norm = (held[f"{layer}.{kind}"].detach() for kind in kinds)
        x_BN = torch.randn(50, weight_MN.shape[1], generator=torch.Generator().manual_seed(1))
        norm = nn.BatchNorm1d(width).eval()
        for kind, one in zip(kinds[1:], of_norm, strict=True):
            getattr(norm, kind.removeprefix("norm.")).data.copy_(one)
        wanted_BM = norm(nn.functional.linear(x_BN, weight_MN))
        found_BM = nn.functional.linear(x_BN, *folded(weight_MN, *of_norm))
        torch.testing.assert_close(found_BM, wanted_BM, rtol=1e-5, atol=1e-5)
        assert wanted_BM.abs().max() > 0.5


WIDTHS = (5, 8, 6, 3)


@pytest.mark.parametrize("precision", list(Precision))
@pytest.mark.parametrize("cut", [1, 2])
@pytest.mark.parametrize(
    ("relu_last", "normed"), [(True, range(1, 3)), (True, range(0)), (False, range(0))]
)
def test_a_chain_cut_in_two_computes_the_same_bits(
    relu_last: bool, normed: range, cut: int, precision: Precision
):
    """Gradients of all parameters and of the input, and the statistics."""

    def chain(layers: range) -> Mlp:
        options = {"relu_last": relu_last, "precision": precision, "normed": normed}
        mlp = Mlp(WIDTHS, layers=layers, **options)
        generator = torch.Generator().manual_seed(2)
        for name, one in mlp.named_parameters():
            shift = int(name[0])  # the same values for a layer in either chain
            drawn = torch.randn(WIDTHS[-1] * 50, generator=generator.manual_seed(shift))
            one.data.copy_(drawn[: one.numel()].view_as(one))
        return mlp

    whole, parts = chain(range(1, 4)), [chain(range(1, cut + 1)), chain(range(cut + 1, 4))]
    x_BN = torch.randn(33, 5, generator=torch.Generator().manual_seed(7)).requires_grad_()
    rows = range(33)
    y_BM, z_BM = whole(x_BN, rows), parts[1](parts[0](x_BN, rows), rows)
    assert torch.equal(y_BM, z_BM)
    assert y_BM.std() > 0.1
    own = [one for part in parts for one in part.parameters()]
    gradients = torch.autograd.grad(y_BM.square().sum(), [x_BN, *whole.parameters()])
    of_parts = torch.autograd.grad(z_BM.square().sum(), [x_BN, *own])
    for mine, theirs in zip(gradients, of_parts, strict=True):
        assert theirs.abs().max() > 1e-3
        assert torch.equal(mine, theirs)
    cut_statistics = [one for part in parts for one in part.buffers()]
    for mine, theirs in zip(whole.buffers(), cut_statistics, strict=True):
        assert torch.equal(mine, theirs)


def test_gradients_by_running_statistics_are_those_of_torch():
    """Of a model in evaluation, which nothing here trains."""
    torch.manual_seed(4)
    mlp = Mlp((5, 8), relu_last=True, precision=Precision.FLOAT32, normed=range(1, 2))
    torch.nn.init.normal_(mlp.get_parameter("1.weight"))
    norm = nn.BatchNorm1d(8).eval()
    for name, one in statistics_of(mlp).items():
        one.uniform_(0.5, 2)
        getattr(norm, name.rpartition(".")[2]).copy_(one)
    x_BN = torch.randn(9, 5, requires_grad=True)
    plain_BM = norm(nn.functional.linear(x_BN, mlp.get_parameter("1.weight"))).relu()
    own = [x_BN, mlp.get_parameter("1.weight")]
    for mine, theirs in zip(
        torch.autograd.grad(mlp(x_BN).square().sum(), own),
        torch.autograd.grad(plain_BM.square().sum(), own),
        strict=True,
    ):
        assert theirs.abs().max() > 0.1
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-5)
