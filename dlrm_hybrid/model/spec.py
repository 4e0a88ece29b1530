"""The shape of a DLRM: widths, tables, names of tensors; and its pipeline stages.

A cut `bottom.2` or `top.2` is after that layer. The interaction and the tables belong to the
stage with the first layer of the top MLP: its activations need every table at once.

Shapes: D embedding dimension, F vectors that interact: one of each categorical column, and that of
the bottom MLP if there are dense columns.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from itertools import pairwise
from numbers import Integral
from typing import TYPE_CHECKING, Any, TypeAlias, cast

from dlrm_hybrid.model.interaction import Dot, Interaction
from dlrm_hybrid.types import ConfigError

if TYPE_CHECKING:
    from dlrm_hybrid.compress.embedding.widths import Widths
    from dlrm_hybrid.model.own import OwnModel

ModelShape: TypeAlias = "ModelSpec | OwnModel"
"""The shapes of tables, stages and servers: this package's model, or a user's own."""


def _is_number(value: Any) -> bool:
    return not isinstance(value, bool) and isinstance(value, Integral)  # numpy's too


@dataclass(frozen=True, slots=True, kw_only=True)
class DataShape:
    """The part of a model's shape that its rows decide; `ModelSpec` describes the fields."""

    table_rows: tuple[int, ...]
    frozen: tuple[bool, ...] = ()
    loss_weights: tuple[float, ...] = ()
    table_of_column: tuple[int, ...] = ()

    @property
    def of_rows(self) -> dict[str, Any]:
        """These fields by name, also of a whole model."""
        return {x.name: getattr(self, x.name) for x in fields(DataShape)}

    @property
    def labels(self) -> int:
        """Number of labels, each with a logit."""
        return len(self.loss_weights) or 1

    @property
    def columns(self) -> tuple[int, ...]:
        """Index of the table of each categorical column."""
        return self.table_of_column or tuple(range(len(self.table_rows)))

    @property
    def table_names(self) -> tuple[str, ...]:
        """Names of the tables, `embedding.1` …, in the order of their first columns."""
        return tuple(f"embedding.{table}" for table in range(1, len(self.table_rows) + 1))


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec(DataShape):
    """The shape of a model; layers and tables are numbered from 1.

    Attributes:
        embedding_dim: D, the width of the vectors that interact: the bottom MLP's output, and rows
            of every table without a width of its own.
        bottom: widths of the bottom MLP, its input first: (13, 512, 256, 64, 16); empty without
            dense columns.
        top: widths of the top MLP's layers; its input's width follows: (512, 256, 1). The last is
            the number of labels.
        table_rows: rows of every embedding table.
        interaction: interaction of the bottom MLP's output with the rows of the tables.
        dropout: share of the activations of hidden layers that is dropped in training.
        bottom_dropout: dropout of the bottom MLP; None for `dropout`.
        batch_norm: whether hidden layers have batch norm instead of biases.
        frozen: whether the rows of each table never change; empty if all learn.
        loss_weights: factor of the loss of each of two labels or more; empty for one label.
        table_dims: widths of the tables; empty if all have D. Rows of another width become vectors
            of D by a linear layer without bias (mixed dimension embeddings, Ginart et al., 2019).
        table_of_column: index of the table of each categorical column, where columns share tables,
            which are numbered as columns first name them; empty if each column has its own.

    Raises:
        ConfigError: the widths do not fit together; the message names the key.
    """

    embedding_dim: int
    bottom: tuple[int, ...]
    top: tuple[int, ...]
    interaction: Interaction = Dot()
    dropout: float = 0.0
    bottom_dropout: float | None = None
    batch_norm: bool = False
    table_dims: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        faults = list(self._no_numbers())
        if faults:
            raise ConfigError("\n".join(faults))
        if self.bottom and (len(self.bottom) < 2 or self.bottom[-1] != self.embedding_dim):
            faults.append(
                f"model.bottom: {list(self.bottom)} must have an input and end in "
                f"model.embedding_dim = {self.embedding_dim}, or be empty"
            )
        faults += shape_faults(self)
        if not self.top or self.top[-1] != self.labels:
            logits = "the logit" if self.labels == 1 else "a logit for each of loss_weights"
            faults.append(f"model.top: {list(self.top)} must end in {self.labels}, {logits}")
        if not self.table_rows:
            faults.append("model: at least one embedding table is needed")
        if not self.bottom and len(self.columns) == 1 and isinstance(self.interaction, Dot):
            faults.append("model.interaction = 'dot': one table and no bottom MLP make no pair")
        if self.table_dims and len(self.table_dims) != len(self.table_rows):
            faults.append(
                f"model.table_dims: {list(self.table_dims)} must have a width for each of the "
                f"{len(self.table_rows)} tables, or none"
            )
        widths = (self.embedding_dim, *self.bottom, *self.top, *self.table_dims)
        if min((*widths, *self.table_rows)) < 1:
            faults.append("model: every width and every number of rows must be at least 1")
        if faults:
            raise ConfigError("\n".join(faults))

    def _no_numbers(self) -> Iterator[str]:
        lists = ("bottom", "top", "table_rows", "table_dims", "table_of_column")
        for name in ("embedding_dim", *lists):
            value: Any = getattr(self, name)
            is_list = name != "embedding_dim"
            numbers = cast("Sequence[Any]", value) if type(value) in (tuple, list) else [value]
            is_right = is_list == (type(value) in (tuple, list))
            if not (is_right and all(map(_is_number, numbers))):
                form = "whole numbers" if is_list else "a whole number"
                yield f"model.{name} = {value!r:.80}: must be {form}"
        for name in ("frozen", "loss_weights"):
            value = getattr(self, name)
            if type(value) not in (tuple, list):
                yield f"model.{name} = {value!r:.80}: must be a tuple"

    @property
    def widths(self) -> Widths:
        """Widths of the tables."""
        from dlrm_hybrid.compress.embedding.widths import Widths  # not without numpy

        dims = self.table_dims or (self.embedding_dim,) * len(self.table_rows)
        return Widths(dims, max(dims))

    @property
    def projected(self) -> dict[int, int]:
        """Width by number of each table whose rows become vectors of D by a linear layer."""
        dims = enumerate(self.table_dims, 1)
        return {number: dim for number, dim in dims if dim != self.embedding_dim}

    @property
    def num_dense(self) -> int:
        """Width of the dense input; 0 without a bottom MLP."""
        return self.bottom[0] if self.bottom else 0

    @property
    def num_vectors(self) -> int:
        """Number F of interacting vectors: one per column, and the bottom MLP's output if any."""
        return len(self.columns) + bool(self.bottom)

    @property
    def interaction_width(self) -> int:
        """Width of the top MLP's input."""
        return self.interaction.width(self.num_vectors, self.embedding_dim, bool(self.bottom))

    @property
    def top_widths(self) -> tuple[int, ...]:
        """Widths of the top MLP, its input first."""
        return (self.interaction_width, *self.top)

    @property
    def layer_names(self) -> tuple[str, ...]:
        """Names of the MLPs' layers, `bottom.1` … `top.4`, in the order of the forward pass."""
        return mlp_layers(self.bottom, self.top)

    @property
    def last_layer(self) -> str:
        """Name of the layer with the logits."""
        return self.layer_names[-1]

    @property
    def normed_layers(self) -> dict[str, int]:
        """Width by name of every layer with batch norm, which are all hidden layers of MLPs."""
        if not self.batch_norm:
            return {}
        deep = () if isinstance(self.interaction, Dot) else self.interaction.deep
        hidden = {
            "bottom": self.bottom[1:-1],
            "interaction.deep": deep,
            "top": self.top[:-1],
        }
        return {
            f"{mlp}.{layer}": width
            for mlp, widths in hidden.items()
            for layer, width in enumerate(widths, 1)
        }

    def dense_shapes(self) -> dict[str, tuple[int, ...]]:
        """Shape of every dense parameter by name, in the order of the forward pass.

        `bottom.1.weight` (out, in), `bottom.1.bias` …, then those of the interaction
        (`interaction.1.v`, then `interaction.project.3.weight` of table 3 with a width of its own),
        then those of the top MLP. A layer with batch norm has
        `bottom.1.norm.weight` and `bottom.1.norm.bias` instead of `bottom.1.bias`.
        """
        interaction = self.interaction.shapes(self.num_vectors, self.embedding_dim)
        shapes = {
            **_shapes("bottom", self.bottom),
            **{f"interaction.{name}": shape for name, shape in interaction.items()},
            **{
                f"interaction.project.{number}.weight": (self.embedding_dim, dim)
                for number, dim in self.projected.items()
            },
            **_shapes("top", self.top_widths),
        }
        norms = {f"{layer}.bias": f"{layer}.norm" for layer in self.normed_layers}
        return {
            parameter: shape
            for name, shape in shapes.items()
            for parameter in (
                [f"{norms[name]}.weight", f"{norms[name]}.bias"] if name in norms else [name]
            )
        }

    def statistics_shapes(self) -> dict[str, tuple[int, ...]]:
        """Shape of the running mean and variance of every layer with batch norm, by name."""
        return {
            f"{layer}.norm.{kind}": (width,)
            for layer, width in self.normed_layers.items()
            for kind in ("running_mean", "running_var")
        }

    def part(self, index: int, layers: range) -> StagePart:
        """Make the stage of some layers, indices in `layer_names`."""
        num_bottom, names = len(self.bottom[1:]), self.layer_names
        bottom = range(layers.start + 1, min(layers.stop, num_bottom) + 1)
        top = range(max(layers.start - num_bottom, 0) + 1, layers.stop - num_bottom + 1)
        outputs = (*self.bottom[1:], *self.top)
        roots = [f"{name}." for name in names[layers.start : layers.stop]]
        roots += ["interaction."] * (1 in top)
        return StagePart(
            index=index,
            layer_names=names[layers.start : layers.stop],
            bottom=bottom,
            top=top,
            is_first=layers.start == 0,
            has_interaction=1 in top,
            is_last=layers.stop == len(names),
            input_width=outputs[layers.start - 1] if layers.start else self.num_dense,
            output_width=outputs[layers.stop - 1],
            parameter_names=tuple(
                name for name in self.dense_shapes() if name.startswith(tuple(roots))
            ),
        )


def mlp_layers(bottom: Sequence[int], top: Sequence[int]) -> tuple[str, ...]:
    """Names of the layers of MLPs of these widths, of which the bottom one's include its input."""
    counts = {"bottom": max(0, len(bottom) - 1), "top": len(top)}
    return tuple(f"{mlp}.{n}" for mlp, count in counts.items() for n in range(1, count + 1))


def shape_faults(spec: ModelShape) -> Iterator[str]:
    """The faults of the labels, tables and columns of a model of either kind."""
    weights, tables, columns = spec.loss_weights, len(spec.table_rows), spec.table_of_column
    head = f"loss_weights: {list(weights)}"
    if len(weights) == 1:
        yield f"{head}: of two labels or more; () for one"
    for weight in weights:
        if not 0 < weight < float("inf"):
            yield f"{head}: {weight} must be above 0 and finite"
    if spec.frozen and len(spec.frozen) != tables:
        yield f"model.frozen: {len(spec.frozen)} values for {tables} tables"
    if columns and [*dict.fromkeys(columns)] != [*range(tables)]:
        yield (
            f"model.table_of_column: {list(columns)} must number {tables} tables from 0, in the "
            "order in which columns name them"
        )


def _shapes(mlp: str, widths: Sequence[int]) -> dict[str, tuple[int, ...]]:
    return {
        f"{mlp}.{layer}.{name}": shape
        for layer, (fan_in, fan_out) in enumerate(pairwise(widths), 1)
        for name, shape in (("weight", (fan_out, fan_in)), ("bias", (fan_out,)))
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class StagePart:
    """The layers of one stage, named and numbered as in the full model.

    Attributes:
        index: number of the stage, from 0.
        layer_names: `bottom.3` …, in the order of the forward pass.
        is_first: whether it reads the integer features.
        has_interaction: whether it reads the ids and has the interaction before its top layers.
        is_last: whether it reads the labels and computes the logits.
        input_width: width of an input row: the integer features, if any, or the activations of the
            stage before.
        output_width: width of an output row: activations for the next stage, or the logits.
        parameter_names: `bottom.3.weight`, `bottom.3.bias` …, by order of
            `dense_shapes()`, with those of the interaction.
        bottom: numbers of its layers of the bottom MLP, may be empty.
        top: numbers of its layers of the top MLP, may be empty.
    """

    index: int
    layer_names: tuple[str, ...]
    is_first: bool
    has_interaction: bool
    is_last: bool
    input_width: int
    output_width: int
    parameter_names: tuple[str, ...]
    bottom: range = range(0)
    top: range = range(0)


@dataclass(frozen=True, slots=True)
class Partition:
    """A model cut into the stages of a pipeline.

    Attributes:
        cuts: names of layers in the order of the forward pass; boundary b is at `cuts[b]`.
        stages: one more than cuts.
    """

    cuts: tuple[str, ...]
    stages: tuple[StagePart, ...]

    @classmethod
    def of(cls, spec: ModelShape, cuts: Sequence[str]) -> Partition:
        """Cut `spec` after the layers named by `cuts`, given in any order.

        Raises:
            ConfigError: a cut is given twice, or is not after a layer before the last.
        """
        layers = spec.layer_names
        faults = [
            f"parallel.cuts: {cut!r} is no layer to cut this model after, or given twice; "
            f"possible are {', '.join(layers[:-1])}"
            for cut in cuts
            if cut not in layers[:-1] or cuts.count(cut) > 1
        ]
        if faults:
            raise ConfigError("\n".join(faults))
        ordered = tuple(cut for cut in layers if cut in cuts)
        ends = (0, *(layers.index(cut) + 1 for cut in ordered), len(layers))
        parts = tuple(
            spec.part(index, range(start, stop))
            for index, (start, stop) in enumerate(pairwise(ends))
        )
        return cls(ordered, parts)

    @property
    def interaction_stage(self) -> int:
        """Index of the stage with the interaction and the tables."""
        return next(part.index for part in self.stages if part.has_interaction)

    @property
    def stage_of(self) -> dict[str, int]:
        """Index of the stage of every dense parameter, in the order of `dense_shapes()`."""
        return {name: part.index for part in self.stages for name in part.parameter_names}


def microbatch_rows(batch_size: int, microbatches: int) -> int:
    """Number of rows of a micro-batch; ConfigError if a batch does not divide evenly."""
    if batch_size % microbatches:
        raise ConfigError(
            f"train.batch_size={batch_size} must be a multiple of "
            f"schedule.microbatches={microbatches}"
        )
    return batch_size // microbatches
