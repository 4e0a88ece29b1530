"""What the keys of `model` mean together: which interaction reads which."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from dlrm_hybrid.config.gradient import changed
from dlrm_hybrid.config.schema import Config, ModelConfig

SECTIONS = ("cross", "fm")
"""Of `model`, each read by the choice of `model.interaction` with its name."""


def unread_interactions(
    model: Mapping[str, Any], defaults: Mapping[str, Any]
) -> tuple[dict[str, Any], list[str]]:
    """Null for every section that the interaction does not read, and a fault for each value there.

    Args:
        model: the section `model` of a configuration, not yet validated.
        defaults: all sections as conf/ has them.
    """
    chosen, kept = model.get("interaction"), dict(model)
    faults: list[str] = []
    for section, values in defaults.items():
        if section == chosen or model.get(section) is None:
            continue
        kept[section] = None
        faults += [
            f"model.{section}{key} = {value!r}: only applies to model.interaction={section}, "
            f"not {chosen}"
            for key, value in changed(model[section], values)
        ]
    return kept, faults


def interaction_rules(config: Config) -> Iterator[str]:
    """Faults of `model.interaction`: settings that it lacks, or does not read."""
    chosen = config.model.interaction
    for section in SECTIONS:
        is_there = getattr(config.model, section) is not None
        if section == chosen and not is_there:
            yield f"model.{section} = null: model.interaction={chosen} needs its keys"
        if section != chosen and is_there:
            yield f"model.{section}: only applies to model.interaction={section}, not {chosen}"


def dense_tensors(model: ModelConfig) -> int:
    """How many dense parameters a model has."""
    of_mlps = 2 * (len(model.bottom) - 1 + len(model.top))
    of_cross = 0 if model.cross is None else 3 * model.cross.layers
    return of_mlps + of_cross + (0 if model.fm is None else 2 * len(model.fm.deep))
