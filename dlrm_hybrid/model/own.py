"""A model of a user's own: a `torch.nn.Module` whose children are its parts, in their order.

The child named `interaction` takes the output of the part before it and the pooled rows of all
tables; every other child takes one tensor. All give float32 (B, width), the last one (B, 1), or a
logit for each of several labels. Cuts come after any child but the last, by its name.

Free of torch: what the module consists of is found out by making it once.

Shapes: B rows, I dense columns, F categorical columns, D embedding dimension.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from inspect import signature
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, final, get_type_hints

from dlrm_hybrid.bounds import described
from dlrm_hybrid.model.spec import DataShape, StagePart
from dlrm_hybrid.outside import path_of

if TYPE_CHECKING:
    from torch.nn import Module

    from dlrm_hybrid.compress.embedding.widths import Widths

INTERACTION = "interaction"
"""Name of the part that takes the rows of the tables."""
NO_SETTINGS: Mapping[str, Any] = MappingProxyType({})


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Features:
    """Sizes of a model's inputs and output: the first argument of its constructor.

    Attributes:
        dense: I, width of the first part's input.
        tables: F; columns that share a table count each.
        embedding_dim: D; the interaction is given float32 (B, F, D).
        labels: width of the last part's output, a logit for each.
    """

    dense: int
    tables: int
    embedding_dim: int
    labels: int = 1


@final
@dataclass(frozen=True, slots=True)
class Part:
    """A part of a model: its output's width, and the shapes of its parameters by full name."""

    name: str
    width: int
    parameters: Mapping[str, tuple[int, ...]]


Settings = tuple[tuple[str, Any], ...]
"""Arguments of a module's constructor by name."""


@final
@dataclass(frozen=True, kw_only=True)
class OwnModel(DataShape):
    """A model of your own for a `World`, in the place of a `ModelSpec`.

    Attributes:
        module: class of the model; its constructor takes `Features`, then settings by name.
        num_dense: I, the dense columns.
        embedding_dim: D, the width of every table.
        settings: arguments of the constructor by name.
        table_rows, frozen, loss_weights, table_of_column: as in a `ModelSpec`.

    Raises:
        ConfigError: only when it is used: the module cannot be trained; says why.
    """

    module: type[Module]
    num_dense: int
    embedding_dim: int
    settings: Mapping[str, Any] = field(default_factory=lambda: NO_SETTINGS)

    @property
    def path(self) -> str:
        """Its import path, `MODULE:CLASS`."""
        return path_of(self.module)

    @property
    def inputs(self) -> Features:
        """The first argument of its constructor."""
        return Features(
            dense=self.num_dense,
            tables=len(self.columns),
            embedding_dim=self.embedding_dim,
            labels=self.labels,
        )

    @cached_property
    def parts(self) -> tuple[Part, ...]:
        """Its parts, in the order of the forward pass; raises ConfigError."""
        return parts_of(self.module, _hashable(self.settings), self.inputs)

    @property
    def widths(self) -> Widths:
        """Widths of the tables: D each."""
        from dlrm_hybrid.compress.embedding.widths import Widths  # not without numpy

        return Widths((self.embedding_dim,) * len(self.table_rows), self.embedding_dim)

    @property
    def layer_names(self) -> tuple[str, ...]:
        """Names of the parts of the model, in the order of computing."""
        return tuple(part.name for part in self.parts)

    @property
    def last_layer(self) -> str:
        """Name of the last module with parameters."""
        return [*self.dense_shapes()][-1].rpartition(".")[0]

    def dense_shapes(self) -> dict[str, tuple[int, ...]]:
        """Shape of every parameter of the module by name, in the order of its parts."""
        return {name: shape for part in self.parts for name, shape in part.parameters.items()}

    def statistics_shapes(self) -> dict[str, tuple[int, ...]]:
        """No shapes, as the model has no running statistics."""
        return {}

    def part(self, index: int, layers: range) -> StagePart:
        """Make the stage of some parts, indices in `layer_names`."""
        parts = self.parts[layers.start : layers.stop]
        names = tuple(part.name for part in parts)
        return StagePart(
            index=index,
            layer_names=names,
            is_first=layers.start == 0,
            has_interaction=INTERACTION in names,
            is_last=layers.stop == len(self.parts),
            input_width=self.parts[layers.start - 1].width if layers.start else self.num_dense,
            output_width=parts[-1].width,
            parameter_names=tuple(name for part in parts for name in part.parameters),
        )


@lru_cache(maxsize=64)
def parts_of(module: type[Module], settings: Settings, inputs: Features) -> tuple[Part, ...]:
    """Make a module and try its parts on a few rows; ConfigError if it cannot be trained."""
    from dlrm_hybrid.model.layers.own import tried  # torch takes a second

    return tried(module, dict(settings), inputs)


def _hashable(settings: Mapping[str, Any]) -> Settings:
    return tuple((name, _tuples(value)) for name, value in settings.items())


def _tuples(value: Any) -> Any:
    return tuple(map(_tuples, value)) if isinstance(value, list | tuple) else value  # pyright: ignore


def settings_of(module: object) -> list[tuple[str, Any, Any]]:
    """Name, type and default of each argument beside `Features` of a module's constructor.

    Raises:
        ValueError: it is no module, or an argument is none that a configuration can have.
    """
    from torch.nn import Module  # takes a second

    if not (isinstance(module, type) and issubclass(module, Module)):
        raise ValueError("is no subclass of torch.nn.Module")
    constructor: Any = vars(module).get("__init__", module.__init__)
    parameters = [*signature(constructor).parameters.values()][1:]
    if not parameters:
        raise ValueError("its constructor takes nothing; must take dlrm_hybrid.Features first")
    kinds = get_type_hints(constructor, include_extras=True)
    settings: list[tuple[str, Any, Any]] = []
    for item in parameters[1:]:
        kind = kinds.get(item.name)
        if item.kind in (item.VAR_POSITIONAL, item.VAR_KEYWORD) or item.default is item.empty:
            raise ValueError(f"argument `{item.name}` of its constructor needs a default")
        try:
            list(described(kind))
        except (KeyError, IndexError, TypeError):
            raise ValueError(
                f"argument `{item.name}` of its constructor needs a type that a key can have: int, "
                "float, bool, str, a Literal, a tuple of these such as tuple[int, ...], or None"
            ) from None
        settings.append((item.name, kind, item.default))
    return settings
