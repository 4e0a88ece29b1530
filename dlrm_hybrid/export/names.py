"""Names and layout of a model's tensors here, in facebookresearch/dlrm and in TorchRec.

    ours                dlrm               torchrec
    embedding.1.weight  emb_l.0.weight     sparse_arch.embedding_bag_collection.embedding_bags
                                           .t_cat_0.weight
    bottom.1.weight     bot_l.0.weight     dense_arch.model._mlp.0._linear.weight
    bottom.2.weight     bot_l.2.weight     dense_arch.model._mlp.1._linear.weight
    top.1.weight        top_l.0.weight     over_arch.model.0._mlp.0._linear.weight
    top.3.weight        top_l.4.weight     over_arch.model.1.weight      (the last layer)
    interaction.1.v     –                  inter_arch.crossnet.V_kernels.0   (w: W_kernels, bias)

facebookresearch/dlrm numbers the modules of an MLP, of which every second one is an activation. The
tensors are equal but for one: TorchRec orders the dot products of pairs of vectors by the first of
a pair, (0, 1), (0, 2), …, the others by the second, (0, 1), (0, 2), (1, 2), …; so the columns of
the first top layer are in another order there. TorchRec's model with cross layers is `DLRM_DCN`.
Neither has batch norm, or here columns that share tables.

Shapes: M outputs of a layer, W inputs of the first top layer, D embedding dimension.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor
from typing_extensions import TypeIs

from dlrm_hybrid.config.commands import Naming
from dlrm_hybrid.model.interaction import Cross, Dot
from dlrm_hybrid.model.spec import ModelShape, ModelSpec
from dlrm_hybrid.types import ConfigError

TORCHREC_TABLES = "sparse_arch.embedding_bag_collection.embedding_bags"
MIXED = "top.1.weight"  # the tensor whose columns TorchRec orders differently


def shapes_of(spec: ModelShape) -> dict[str, tuple[int, ...]]:
    """Shapes of all tensors of a model, by their names here."""
    rows = zip(spec.table_names, spec.table_rows, spec.widths.dims, strict=True)
    tables = {f"{table}.weight": (count, dim) for table, count, dim in rows}
    return {**tables, **spec.dense_shapes(), **spec.statistics_shapes()}


def names_of(naming: Naming, spec: ModelShape, names: Iterable[str]) -> dict[str, str]:
    """Names of a model's tensors in another program; ConfigError if it has no such model."""
    if naming == "ours":
        return {name: name for name in names}
    fault = _not_in(naming, spec) if isinstance(spec, ModelSpec) else "of your own"
    if fault or not isinstance(spec, ModelSpec):  # the latter for type checkers
        raise ConfigError(
            f"{naming!r} (export.names, import.names): has no model {fault}; use ours"
        )
    if naming == "dlrm":
        return {name: _in_dlrm(name) for name in names}
    if len(spec.top) < 2:
        raise ConfigError(
            f"model.top = {list(spec.top)}: TorchRec's OverArch has at least two layers"
        )
    return {name: _in_torchrec(name, len(spec.top)) for name in names}


def _not_in(naming: Naming, spec: ModelSpec) -> str | None:
    """What another program has no model with; None if it has this one."""
    interaction = spec.interaction
    is_other = isinstance(interaction, Cross) and (interaction.rank is None or interaction.deep)
    interactions = {"ours": (), "dlrm": (Dot,), "torchrec": (Dot, Cross)}[naming]
    faults = {
        f"with the interaction of this one, {interaction}": is_other
        or not isinstance(interaction, interactions),
        "without dense columns (model.bottom=[])": not spec.bottom,
        "whose columns share tables (categorical[].table of the schema)": spec.table_of_column,
        "with batch norm (model.batch_norm)": spec.batch_norm,
        "with tables of several widths (model.table_dims)": spec.projected,
    }
    return next((fault for fault, has in faults.items() if has), None)


def to_theirs(naming: Naming, spec: ModelShape, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Convert tensors to the names and layout of `naming`; raises like `names_of`."""
    ours = dict(tensors)
    if naming == "torchrec" and _is_dot(spec):
        ours[MIXED] = ours[MIXED][:, columns_in_torchrec(spec)]
    return {their: ours[our] for our, their in names_of(naming, spec, tensors).items()}


def to_ours(
    naming: Naming, spec: ModelShape, names: Iterable[str], tensors: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """The inverse of `to_theirs`, for the tensors with these names here."""
    ours = {our: tensors[their] for our, their in names_of(naming, spec, names).items()}
    if naming == "torchrec" and _is_dot(spec):
        mixed_MW = torch.empty_like(ours[MIXED])
        mixed_MW[:, columns_in_torchrec(spec)] = ours[MIXED]
        ours[MIXED] = mixed_MW
    return ours


def columns_in_torchrec(spec: ModelSpec) -> Tensor:
    """For each input of TorchRec's first top layer, the index of ours: int64 (W,)."""
    first_P, second_P = torch.triu_indices(spec.num_vectors, spec.num_vectors, offset=1)
    pairs_P = spec.embedding_dim + second_P * (second_P - 1) // 2 + first_P
    return torch.cat((torch.arange(spec.embedding_dim), pairs_P))


def _is_dot(spec: ModelShape) -> TypeIs[ModelSpec]:
    return isinstance(spec, ModelSpec) and isinstance(spec.interaction, Dot)


def _in_dlrm(name: str) -> str:
    part, number, kind = name.split(".")
    if part == "embedding":
        return f"emb_l.{int(number) - 1}.{kind}"
    return f"{'bot_l' if part == 'bottom' else 'top_l'}.{2 * (int(number) - 1)}.{kind}"


def _in_torchrec(name: str, top_layers: int) -> str:
    part, number, kind = name.split(".")
    index = int(number) - 1
    if part == "embedding":
        return f"{TORCHREC_TABLES}.t_cat_{index}.{kind}"
    if part == "interaction":
        crossed = {"v": "V_kernels", "w": "W_kernels", "bias": "bias"}[kind]
        return f"inter_arch.crossnet.{crossed}.{index}"
    if part == "bottom":
        return f"dense_arch.model._mlp.{index}._linear.{kind}"
    if index == top_layers - 1:
        return f"over_arch.model.1.{kind}"
    return f"over_arch.model.0._mlp.{index}._linear.{kind}"
