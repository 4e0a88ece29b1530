"""What a DLRM looks like: widths, tables, and the names of its tensors.

Shapes: D embedding dimension, F = tables + 1 vectors that meet in the interaction.
"""

from __future__ import annotations

from dataclasses import dataclass

from dlrm_hybrid.types import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """The shape of a model; layers and tables are numbered from 1.

    Attributes:
        embedding_dim: D, the width of every table and of the bottom MLP's output.
        bottom: widths of the bottom MLP, its input first: (13, 512, 256, 64, 16).
        top: widths of the top MLP without its input, which follows from the rest: (512, 256, 1).
        table_rows: rows of every embedding table.

    Raises:
        ConfigError: the widths do not fit together; the message names the key.
    """

    embedding_dim: int
    bottom: tuple[int, ...]
    top: tuple[int, ...]
    table_rows: tuple[int, ...]

    def __post_init__(self) -> None:
        faults: list[str] = []
        if len(self.bottom) < 2 or self.bottom[-1] != self.embedding_dim:
            faults.append(
                f"model.bottom: {list(self.bottom)} must have an input and end in "
                f"model.embedding_dim = {self.embedding_dim}"
            )
        if not self.top or self.top[-1] != 1:
            faults.append(f"model.top: {list(self.top)} must end in 1, the logit")
        if not self.table_rows:
            faults.append("model: at least one embedding table is needed")
        if min((self.embedding_dim, *self.bottom, *self.top, *self.table_rows)) < 1:
            faults.append("model: every width and every number of rows must be at least 1")
        if faults:
            raise ConfigError("\n".join(faults))

    @property
    def num_vectors(self) -> int:
        """F: the bottom MLP's output and one vector of every table."""
        return len(self.table_rows) + 1

    @property
    def interaction_width(self) -> int:
        """Width of the top MLP's input: D and one dot product for every pair of vectors."""
        return self.embedding_dim + self.num_vectors * (self.num_vectors - 1) // 2

    @property
    def top_widths(self) -> tuple[int, ...]:
        """Widths of the top MLP, its input first."""
        return (self.interaction_width, *self.top)

    @property
    def layer_names(self) -> tuple[str, ...]:
        """`bottom.1` … `top.4`, in the order of the forward pass."""
        bottom = (f"bottom.{layer}" for layer in range(1, len(self.bottom)))
        top = (f"top.{layer}" for layer in range(1, len(self.top) + 1))
        return (*bottom, *top)

    @property
    def table_names(self) -> tuple[str, ...]:
        """`embedding.1` …, in the order of the categorical columns."""
        return tuple(f"embedding.{table}" for table in range(1, len(self.table_rows) + 1))

    def dense_shapes(self) -> dict[str, tuple[int, ...]]:
        """Shape of every dense parameter by name: `bottom.1.weight` (out, in), `bottom.1.bias`."""
        widths = [*zip(self.bottom, self.bottom[1:], strict=False)]
        widths += zip(self.top_widths, self.top, strict=False)
        shapes: dict[str, tuple[int, ...]] = {}
        for name, (fan_in, fan_out) in zip(self.layer_names, widths, strict=True):
            shapes[f"{name}.weight"] = (fan_out, fan_in)
            shapes[f"{name}.bias"] = (fan_out,)
        return shapes
