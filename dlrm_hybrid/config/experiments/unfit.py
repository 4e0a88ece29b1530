"""Values of experiments for a choice that a command line replaces: a typed choice beats them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from omegaconf import DictConfig, OmegaConf, open_dict

from dlrm_hybrid.config.experiments.own import OwnExperiments
from dlrm_hybrid.config.identity import is_below
from dlrm_hybrid.config.keys import (
    EXPERIMENT,
    all_keys,
    effect_of,
    records,
    sections,
    shown,
)
from dlrm_hybrid.config.options import option
from dlrm_hybrid.record import Effect, defaults_of


def drop_unfit(config: DictConfig, overrides: Sequence[str]) -> list[str]:
    """Take out of a configuration experiments' values that have no effect beside typed choices.

    Typed values stay, to be refused.

    Returns:
        a line for each value.
    """
    typed = {text.lstrip("+~").partition("=")[0] for text in overrides}
    if EXPERIMENT not in typed:
        return []
    lines: list[str] = []
    replaced = OwnExperiments.of(overrides).choices_of(overrides)
    for section in sections():
        if section in typed and section in replaced and config[section].name != replaced[section]:
            lines += _drop_from(config[section], section, typed)
    for name, key in all_keys().items():
        anchor, _, wanted_values = key.only.partition("=")
        section, _, field = name.rpartition(".")
        if not key.only or name in typed or not is_below(anchor, (*typed,)):
            continue
        node: Any = OmegaConf.select(config, section)
        record = records(section).get(str(node.get("name", "")))
        if record is None or field not in node or _is_met(config, anchor, wanted_values):
            continue
        if (value := _plain(node[field])) != (default := defaults_of(record)[field]):
            node[field] = default
            lines.append(f"{name} = {shown(value)}: needs {key.only}; left out of the experiment")
    return lines


def _drop_from(node: DictConfig, section: str, typed: set[str]) -> Iterator[str]:
    """Take out of a section keys that its choice does not have, and values of another choice.

    Those are files, and all values where choices are values of one record.
    """
    name: str = node.name
    record = records(section).get(name)
    defaults = option(section, name) if record is None else defaults_of(record)
    values: Any = OmegaConf.to_container(node, resolve=False)
    for field in [x for x in values if x != "name"]:
        key, value = f"{section}.{field}", values[field]
        is_whole = record is None or Effect.PATH in effect_of(key)
        if any(is_below(x, (key,)) for x in typed):
            continue
        if field not in defaults:
            with open_dict(node):
                del node[field]
        elif is_whole and value != defaults[field]:
            node[field] = defaults[field]
        else:
            continue
        chosen = f"{section}={name}"
        yield f"{key} = {shown(value)}: of another choice than {chosen}; left out of the experiment"


def _is_met(config: DictConfig, anchor: str, values: str) -> bool:
    """Whether a key's anchor has a value beside which the key has an effect."""
    key = anchor if "." in anchor else f"{anchor}.name"
    value: Any = OmegaConf.select(config, key, default=0)
    # None: a number that is still to follow from other values.
    return value is None or bool(value) if not values else str(value) in values.split("|")


def _plain(value: Any) -> Any:
    return OmegaConf.to_container(value) if OmegaConf.is_config(value) else value
