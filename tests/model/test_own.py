"""What a module of a user's own must be, each refused by one message before anything begins."""

import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from outside_model import DeepFm
from torch import Tensor, nn

from dlrm_hybrid.model.dlrm import StageModel, draw_initial
from dlrm_hybrid.model.layers.products import Precision
from dlrm_hybrid.model.own import Features, OwnModel, settings_of
from dlrm_hybrid.model.spec import Partition
from dlrm_hybrid.types import ConfigError

SPEC = OwnModel(module=DeepFm, table_rows=(9, 8), num_dense=3, embedding_dim=4)


class Meets(nn.Module):
    def forward(self, x_BD: Tensor, pooled_BFD: Tensor) -> Tensor:
        return torch.cat((x_BD, pooled_BFD.flatten(1)), 1)


class Good(nn.Module):
    """A base of faulty ones: each changes something of it."""

    def __init__(self, features: Features) -> None:
        super().__init__()
        self.bottom = nn.Linear(features.dense, 4)
        self.interaction: nn.Module = Meets()
        self.logit = nn.Linear(4 + features.tables * features.embedding_dim, 1)
        self.change()

    def change(self) -> None: ...


class Mean(nn.Module):
    def forward(self, x_BN: Tensor) -> Tensor:
        return x_BN - x_BN.mean(0)


class Squeezed(nn.Module):
    def forward(self, x_BN: Tensor) -> Tensor:
        return x_BN.squeeze()[..., None] if len(x_BN) > 1 else x_BN.squeeze()


class Doubled(nn.Module):
    def forward(self, x_BN: Tensor) -> Tensor:
        return 2 * x_BN if self.training else x_BN


class Flat(nn.Module):
    def forward(self, x_BN: Tensor) -> Tensor:
        return x_BN.squeeze(1)


class Blind(nn.Module):
    def forward(self, x_BD: Tensor, pooled_BFD: Tensor) -> Tensor:
        return torch.cat((x_BD, pooled_BFD.detach().flatten(1)), 1)


class Listed(nn.Module):
    def forward(self, x_BN: Tensor) -> Any:
        return [x_BN]


def drawn_by_numpy(model: Any) -> None:
    model.bottom.weight.data.fill_(np.random.default_rng().random())


def shared(model: Any) -> None:
    model.last = nn.Sequential(model.logit)


def chained(*layers: nn.Module) -> Callable[[Any], None]:
    def change(model: Any) -> None:
        model.bottom = nn.Sequential(model.bottom, *layers)

    return change


def put(name: str, part: nn.Module) -> Callable[[Any], None]:
    return lambda model: setattr(model, name, part)


FAULTS: dict[str, tuple[Callable[[Any], None], str]] = {
    "no interaction": (
        lambda model: model.__delattr__("interaction"),
        "has the parts bottom, logit; one must be named `interaction`",
    ),
    "parameter in no part": (
        lambda model: setattr(model, "scale", nn.Parameter(torch.ones(1))),
        "parameter `scale` is in no part",
    ),
    "reserved": (put("embedding", nn.Linear(1, 1)), "part `embedding`: tensors of this name"),
    "shared": (shared, r"parameter `last\.0\.weight` is `logit\.weight` too"),
    "buffer": (chained(nn.BatchNorm1d(4)), r"buffer `bottom\.1\.running_mean` is kept with"),
    "dropout": (chained(nn.Dropout(0.5)), "part `bottom` draws random numbers"),
    "rows together": (chained(Mean()), "part `bottom` gives a row other numbers beside other rows"),
    "one row": (chained(nn.Linear(4, 1), Squeezed()), "part `bottom` gives a row other numbers"),
    "training": (put("last", Doubled()), "part `last` depends on `training`"),
    "ends": (lambda model: sys.exit(3), "its constructor raised SystemExit: 3"),
    "lazy": (put("logit", nn.LazyLinear(1)), r"parameter `logit\.weight` has no shape yet"),
    "double": (chained(nn.Linear(4, 4).double()), r"`bottom\.1\.weight` is float64 \(4, 4\); must"),
    "frozen": (
        lambda model: model.bottom.requires_grad_(False),
        r"parameter `bottom\.weight` takes no gradient",
    ),
    "wrong width": (
        put("logit", nn.Linear(5, 1)),
        r"part `logit` of float32 \(4, 12\) raised RuntimeError: mat1 and mat2",
    ),
    "no logit": (put("logit", nn.Linear(12, 2)), r"part `logit`, the last, gives float32 \(4, 2\)"),
    "flat": (
        put("logit", nn.Sequential(nn.Linear(12, 1), Flat())),
        r"gives float32 \(4,\), must be float32 \(4, width\)",
    ),
    "no tensor": (put("bottom", Listed()), "part `bottom` of .* gives a list, must be a tensor"),
    "no use of tables": (put("interaction", Blind()), "makes no use of the tables"),
    "in place": (
        put("logit", nn.Sequential(nn.ReLU(inplace=True), nn.Linear(12, 1))),
        "part `logit` .* a leaf Variable that requires grad is being used in an in-place",
    ),
    "other values each time": (drawn_by_numpy, r"`bottom\.weight` begins with other values"),
    "fails": (lambda model: model.nothing, "its constructor raised AttributeError: .*'nothing'"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_what_cannot_be_trained_is_refused_in_words(fault: str) -> None:
    change, told = FAULTS[fault]
    module = type("Faulty", (Good,), {"change": change, "__module__": "mine"})
    spec = replace(SPEC, module=module)
    with pytest.raises(ConfigError, match=rf"^model = 'mine:Faulty': .*{told}"):
        spec.layer_names  # noqa: B018
    assert replace(SPEC, module=Good).layer_names == ("bottom", "interaction", "logit")


class Whole(Good):
    """A module that can be called, and whose parts are what is trained."""

    factor = 1

    def forward(self, x_BI: Tensor, pooled_BFD: Tensor) -> Tensor:
        return self.factor * self.logit(self.interaction(self.bottom(x_BI), pooled_BFD))


def test_a_forward_of_the_whole_must_be_that_of_its_parts() -> None:
    assert replace(SPEC, module=Whole).layer_names == ("bottom", "interaction", "logit")
    other = type("Other", (Whole,), {"factor": 2, "__module__": "mine"})
    with pytest.raises(ConfigError, match="its `forward` gives other numbers than its parts"):
        replace(SPEC, module=other).layer_names  # noqa: B018
    needy = type("Needy", (Whole,), {"forward": lambda self: None, "__module__": "mine"})
    with pytest.raises(ConfigError, match=r"its `forward` of float32 \(4, 3\), .* raised TypeErr"):
        replace(SPEC, module=needy).layer_names  # noqa: B018


def test_stages_and_servers_begin_with_the_values_of_the_whole_module() -> None:
    before = torch.get_rng_state()
    whole = StageModel(SPEC, Partition.of(SPEC, ()).stages[0], Precision.FLOAT32, 7)
    expected = whole.dense_parameters()
    assert torch.equal(before, torch.get_rng_state())
    assert {name: tuple(one.shape) for name, one in expected.items()} == SPEC.dense_shapes()
    held: dict[str, Tensor] = {}
    for part in Partition.of(SPEC, ["bottom2", "interaction", "top2"][::2]).stages:
        stage = StageModel(SPEC, part, Precision.FLOAT32, 7)
        assert tuple(stage.dense_parameters()) == part.parameter_names
        held |= stage.dense_parameters()
    served = {name: torch.empty(shape) for name, shape in SPEC.dense_shapes().items()}
    draw_initial(SPEC, served, 7)
    for name, one in expected.items():
        assert torch.equal(one, held[name]) and torch.equal(one, served[name]), name
    other = StageModel(SPEC, Partition.of(SPEC, ()).stages[0], Precision.FLOAT32, 8)
    assert not torch.equal(other.dense_parameters()["logit.weight"], expected["logit.weight"])


def test_an_output_of_another_shape_than_tried_is_an_error() -> None:
    class Odd(nn.Module):
        def forward(self, x_BN: Tensor) -> Tensor:
            return x_BN if len(x_BN) < 5 else x_BN[:1]

    module = type("Late", (Good,), {"change": chained(Odd()), "__module__": "mine"})
    spec = replace(SPEC, module=module)
    first, *_ = Partition.of(spec, ["bottom"]).stages
    stage = StageModel(spec, first, Precision.FLOAT32, 0)
    told = r"model = 'mine:Late': 8 rows came out as float32 \(1, 4\), must be float32 \(8, 4\)"
    with pytest.raises(ConfigError, match=told):
        stage(torch.zeros(8, 3), None)


def test_a_cut_after_the_last_part_is_none() -> None:
    with pytest.raises(ConfigError, match=r"parallel.cuts: 'logit' is no layer"):
        Partition.of(SPEC, ["logit"])


class Takes:
    """Constructors whose arguments are no settings."""

    class Nothing(nn.Module):
        def __init__(self) -> None:
            super().__init__()

    class NoDefault(nn.Module):
        def __init__(self, features: Features, hidden: int) -> None:
            super().__init__()

    class NoType(nn.Module):
        def __init__(self, features: Features, hidden=3) -> None:  # noqa: ANN001
            super().__init__()

    class AnyList(nn.Module):
        def __init__(self, features: Features, hidden: tuple[int, ...] | list[int] = ()) -> None:
            super().__init__()

    class Rest(nn.Module):
        def __init__(self, features: Features, **rest: int) -> None:
            super().__init__()


@pytest.mark.parametrize(
    ("module", "told"),
    [
        (Takes.Nothing, "its constructor takes nothing; must take dlrm_hybrid.Features first"),
        (Takes.NoDefault, "argument `hidden` of its constructor needs a default"),
        (Takes.NoType, "argument `hidden` of its constructor needs a type that a key can have"),
        (Takes.AnyList, "argument `hidden` of its constructor needs a type that a key can have"),
        (Takes.Rest, "argument `rest` of its constructor needs a default"),
        (Takes, "is no subclass of torch.nn.Module"),
        (3, "is no subclass of torch.nn.Module"),
    ],
)
def test_arguments_that_are_no_settings_are_refused(module: object, told: str) -> None:
    with pytest.raises(ValueError, match=told):
        settings_of(module)
    assert [name for name, _, _ in settings_of(DeepFm)] == ["bottom", "top"]
