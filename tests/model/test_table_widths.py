"""Tables with widths of their own, beside nn.EmbeddingBag and nn.Linear; and what holds them."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from reference_step import Dlrm
from torch import Tensor, nn
from torch.nn import functional

from dlrm_hybrid.bags import Bags
from dlrm_hybrid.compress.embedding.memory import Rows
from dlrm_hybrid.compress.embedding.widths import Widths
from dlrm_hybrid.model.interaction import Cross, Dot, Fm, Interaction
from dlrm_hybrid.model.layers.products import Precision
from dlrm_hybrid.model.row_storage import InFiles, RowStorage
from dlrm_hybrid.model.spec import ModelSpec
from dlrm_hybrid.model.table_rows import TableRows
from dlrm_hybrid.model.tables import Fused, TableOptimizer
from dlrm_hybrid.types import ConfigError

ROWS, LR = 24, 0.1
SPEC = ModelSpec(
    embedding_dim=8,
    bottom=(3, 8),
    top=(6, 1),
    table_rows=(40, 7, 300, 9),
    table_dims=(4, 8, 16, 4),
)
ODD = replace(SPEC, table_dims=(3, 8, 10, 3))  # which FBGEMM does not know


class Plain(nn.Module):
    """The model in torch's own modules, with the weights of another."""

    def __init__(self, spec: ModelSpec, tensors: dict[str, Tensor]) -> None:
        super().__init__()
        self.spec, sizes = spec, zip(spec.table_rows, spec.table_dims, strict=True)
        self.tables = nn.ModuleList(nn.EmbeddingBag(*size, mode="sum") for size in sizes)
        self.project = nn.ModuleDict(
            {str(n): nn.Linear(dim, 8, bias=False) for n, dim in enumerate(spec.table_dims, 1)}
        )
        del self.project["2"]  # it has the model's width
        self.bottom, self.top1 = nn.Linear(3, 8), nn.Linear(spec.interaction_width, 6)
        self.top2 = nn.Linear(6, 1)
        with torch.no_grad():
            for name, weight in self.weights().items():
                weight.copy_(tensors[name])

    def weights(self) -> dict[str, Tensor]:
        modules = {f"embedding.{n}": one for n, one in enumerate(self.tables, 1)}
        modules |= {f"interaction.project.{n}": one for n, one in self.project.items()}
        modules |= {"bottom.1": self.bottom, "top.1": self.top1, "top.2": self.top2}
        return {
            f"{name}.{kind}": weight
            for name, module in modules.items()
            for kind, weight in module.named_parameters()
        }

    def forward(self, dense_BI: Tensor, bags: Bags[Tensor]) -> Tensor:
        assert bags.offsets is not None
        x_BD, rows = torch.relu(self.bottom(dense_BI)), []
        for table, module in enumerate(self.tables):
            first, stop = bags.offsets[table * ROWS], bags.offsets[(table + 1) * ROWS]
            offsets = bags.offsets[table * ROWS : (table + 1) * ROWS] - first
            e_Bd = module(bags.values[first:stop], offsets)
            number = str(table + 1)
            rows.append(self.project[number](e_Bd) if number in self.project else e_Bd)
        z_BFD = torch.stack([x_BD, *rows], 1)
        first_P, second_P = torch.tril_indices(5, 5, offset=-1)
        dots_BP = (z_BFD[:, first_P] * z_BFD[:, second_P]).sum(2)
        return self.top2(torch.relu(self.top1(torch.cat((x_BD, dots_BP), 1)))).squeeze(1)


def drawn(step: int) -> tuple[Tensor, Bags[Tensor], Tensor]:
    """Dense columns, bags of none to three ids, and labels."""
    rng = np.random.default_rng(step)
    lengths = rng.integers(0, 4, (4, ROWS))
    ids = [rng.integers(0, n, lengths[table].sum()) for table, n in enumerate(SPEC.table_rows)]
    offsets = torch.from_numpy(np.cumsum([0, *lengths.reshape(-1)]))
    bags = Bags(torch.from_numpy(np.concatenate(ids)), offsets, 4)
    dense_BI = torch.from_numpy(rng.random((ROWS, 3), np.float32))
    return dense_BI, bags, torch.from_numpy((rng.random(ROWS) < 0.4).astype(np.float32))


def tensors_of(model: Dlrm) -> dict[str, Tensor]:
    dense = {name: one.detach() for name, one in model.dense_parameters().items()}
    return {**dense, **model.embeddings.weights()}


@pytest.mark.parametrize("spec", [SPEC, ODD], ids=["fbgemm", "own kernels"])
def test_twenty_steps_equal_bags_and_linear_layers_of_torch(spec: ModelSpec) -> None:
    model = Dlrm(spec, Fused(), Precision.FLOAT32, seed=1)
    model.embeddings.set_lr(LR)
    first = {name: one.clone() for name, one in tensors_of(model).items()}
    plain = Plain(spec, first)
    assert plain.weights().keys() == first.keys()
    theirs = torch.optim.SGD(plain.parameters(), lr=LR)
    ours = torch.optim.SGD(model.dense_parameters().values(), lr=LR)
    for step in range(20):
        dense_BI, bags, label_B = drawn(step)
        logit_B, expected_B = model(dense_BI, bags), plain(dense_BI, bags)
        torch.testing.assert_close(logit_B, expected_B, rtol=0, atol=1e-6)
        for one, optimizer in ((logit_B, ours), (expected_B, theirs)):
            optimizer.zero_grad()
            functional.binary_cross_entropy_with_logits(one, label_B).backward()
            optimizer.step()
    for name, weight in plain.weights().items():
        assert (weight - first[name]).abs().max() > 1e-4, name
        torch.testing.assert_close(tensors_of(model)[name], weight, rtol=0, atol=1e-6)


@pytest.mark.parametrize("chosen", [Dot(), Cross(layers=1, rank=2, deep=(5,)), Fm(deep=(5,))])
def test_widths_that_are_the_models_own_change_nothing(chosen: Interaction) -> None:
    as_ever = replace(SPEC, table_dims=(), interaction=chosen)
    named = replace(as_ever, table_dims=(8, 8, 8, 8))
    assert named.dense_shapes() == as_ever.dense_shapes()
    model, other = (Dlrm(one, Fused(), Precision.FLOAT32, seed=1) for one in (as_ever, named))
    dense_BI, bags, _ = drawn(0)
    assert torch.equal(model(dense_BI, bags), other(dense_BI, bags))


@pytest.mark.parametrize("chosen", [Dot(), Cross(layers=1, rank=2, deep=(5,)), Fm(deep=(5,))])
def test_parameters_are_named_and_drawn_in_one_order(chosen: Interaction) -> None:
    spec = replace(SPEC, interaction=chosen)
    model = Dlrm(spec, Fused(), Precision.FLOAT32, seed=1)
    held = {name: tuple(one.shape) for name, one in model.dense_parameters().items()}
    assert [*held.items()] == [*spec.dense_shapes().items()]
    assert held["interaction.project.3.weight"] == (8, 16)
    narrow = model.dense_parameters()["interaction.project.1.weight"]
    assert 0.5 < narrow.std() / (2 / 12) ** 0.5 < 1.5
    as_ever = Dlrm(replace(spec, table_dims=()), Fused(), Precision.FLOAT32, seed=1)
    assert torch.equal(*(one.dense_parameters()["top.1.weight"] for one in (model, as_ever)))
    tables = (one.embeddings.weights()["embedding.2.weight"] for one in (model, as_ever))
    assert torch.equal(*tables)


@pytest.mark.parametrize("optimizer", ["sgd", "adagrad", "rowwise_adagrad", "adam", "rowwise_adam"])
@pytest.mark.parametrize("in_files", [False, True], ids=["memory", "files"])
@pytest.mark.parametrize("spec", [SPEC, replace(SPEC, table_dims=())], ids=["widths", "one width"])
def test_servers_hold_and_update_what_one_process_does(
    spec: ModelSpec, optimizer: TableOptimizer, in_files: bool, tmp_path
) -> None:
    options = Fused(optimizer=optimizer, kernel="numba", eps=1e-2)
    alone = Dlrm(spec, options, Precision.FLOAT32, seed=4).embeddings
    storages: list[RowStorage] = [InFiles(tmp_path)] if in_files else []
    servers = [TableRows(spec, options, index, 2, *storages) for index in range(2)]
    for one in servers:
        one.draw(4)
    generator = torch.Generator().manual_seed(0)
    for _ in range(3):
        ids = [torch.randperm(n, generator=generator)[:6].sort().values for n in SPEC.table_rows]
        drawn_BW = torch.randn(6, sum(spec.widths.dims), generator=generator)
        gradient_BFW = spec.widths.padded(drawn_BW)
        alone.set_lr(LR)
        alone(Bags(torch.stack(ids))).backward(gradient_BFW)
        for index, server in enumerate(servers):
            mine = [one % 2 == index for one in ids]
            own = [one[is_mine].numpy() // 2 for one, is_mine in zip(ids, mine, strict=True)]
            asked = Rows(np.concatenate(own), np.array([len(one) for one in own]))
            parts = [gradient_BFW[is_mine, table] for table, is_mine in enumerate(mine)]
            server.update([(asked, torch.cat(parts))], LR)
            looked_up = server.look_up(asked)
            assert looked_up.shape == (len(asked.ids_K), max(spec.widths.dims))
            assert not looked_up[: len(own[0]), spec.widths.dims[0] :].any()
    expected = {**alone.weights(), **alone.optimizer_state()}
    found = {name: torch.full_like(one, torch.nan) for name, one in expected.items()}
    for piece in (piece for server in servers for piece in server.pieces()):
        assert piece.shape == tuple(expected[piece.name].shape)
        found[piece.name][piece.begin[0] :: piece.every] = piece.view
    for name, one in expected.items():
        assert torch.equal(found[name], one), name
    assert not list(tmp_path.iterdir())  # files need no names


def test_rows_are_packed_without_the_zeros_behind_them() -> None:
    widths, counts = Widths((2, 4, 1), 4), np.array([2, 0, 1])
    rows_KW = torch.tensor([[1.0, 2, 0, 0], [3, 4, 0, 0], [5, 0, 0, 0]])
    packed = widths.packed(rows_KW, counts)
    assert packed.tolist() == [1, 2, 3, 4, 5]
    assert widths.elements(counts) == 5
    assert torch.equal(widths.unpacked(packed, counts), rows_KW)
    of_others = widths.of([1])
    assert of_others.is_uniform
    assert torch.equal(of_others.unpacked(rows_KW.flatten(), np.array([3])), rows_KW)


@pytest.mark.parametrize(
    ("dims", "told"),
    [
        ((4, 8), r"model.table_dims: \[4, 8\] must have a width for each of the 4 tables"),
        ((4, 8, 0, 8), "every width and every number of rows must be at least 1"),
        ((4, 8, 8, True), "model.table_dims = .*: must be whole numbers"),
    ],
)
def test_widths_that_do_not_fit_are_refused(dims: tuple[int, ...], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        replace(SPEC, table_dims=dims)


@pytest.mark.parametrize("bad_id", [-1, 300])
@pytest.mark.parametrize("spec", [SPEC, ODD], ids=["fbgemm", "own kernels"])
def test_an_id_outside_its_table_is_named(spec: ModelSpec, bad_id: int) -> None:
    model = Dlrm(spec, Fused(), Precision.FLOAT32, seed=1)
    ids_FB = torch.zeros(4, ROWS, dtype=torch.int64)
    ids_FB[2, 5] = bad_id
    with pytest.raises(RuntimeError, match=r"table 3 has 300 rows|num_rows|out of bounds"):
        model.embeddings(Bags(ids_FB))
