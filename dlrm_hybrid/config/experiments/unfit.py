"""What experiments set for a choice that a command line replaces: a typed choice beats it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from omegaconf import DictConfig, OmegaConf, open_dict

from dlrm_hybrid.config.identity import is_below
from dlrm_hybrid.config.keys import EXPERIMENT, all_keys, records, sections, shown
from dlrm_hybrid.record import Effect, defaults_of


def drop_unfit(config: DictConfig, overrides: Sequence[str]) -> list[str]:
    """Take values of experiments out of a configuration that have no effect beside what was typed.

    What was typed itself stays, to be refused.

    Args:
        config: as composed, with all values.
        overrides: that it was composed of.

    Returns:
        a line for each value.
    """
    typed = {text.lstrip("+~").partition("=")[0] for text in overrides}
    if EXPERIMENT not in typed:
        return []
    lines: list[str] = []
    for section in typed & {*sections()}:
        record = records(section).get(str(config[section].get("name")))
        if record is not None:
            chosen = f"{section}={config[section].name}"
            lines += _of_choice(config[section], defaults_of(record), section, chosen, typed)
    for name, key in all_keys().items():
        anchor, _, wanted = key.only.partition("=")
        section, _, field = name.rpartition(".")
        if not key.only or name in typed or not is_below(anchor, (*typed,)):
            continue
        node: Any = OmegaConf.select(config, section)
        record = records(section).get(str(node.get("name", "")))
        if record is None or field not in node or _is_met(config, anchor, wanted):
            continue
        if (value := _plain(node[field])) != (default := defaults_of(record)[field]):
            node[field] = default
            lines.append(f"{name} = {shown(value)}: needs {key.only}; left out of the experiment")
    return lines


def _of_choice(
    node: DictConfig, defaults: dict[str, Any], section: str, chosen: str, typed: set[str]
) -> Iterator[str]:
    """Take out of a section what its choice does not have, and files of another choice."""
    values: Any = OmegaConf.to_container(node, resolve=False)
    for field in values.keys() - {"name"}:
        key = f"{section}.{field}"
        value: Any = values[field]
        if key in typed:
            continue
        if field not in defaults:
            with open_dict(node):
                del node[field]
        elif Effect.PATH in all_keys()[key].effect and value != defaults[field]:
            node[field] = defaults[field]
        else:
            continue
        yield f"{key} = {shown(value)}: of another choice than {chosen}; left out of the experiment"


def _is_met(config: DictConfig, anchor: str, wanted: str) -> bool:
    """Whether the value is there beside which a key has an effect."""
    value: Any = OmegaConf.select(config, anchor if "." in anchor else f"{anchor}.name")
    return bool(value) if not wanted else str(value) in wanted.split("|")


def _plain(value: Any) -> Any:
    return OmegaConf.to_container(value) if OmegaConf.is_config(value) else value
