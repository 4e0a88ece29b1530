"""The file of a user's own experiment: as those in conf/experiment, but plain.

It has choices of groups and values of keys, nothing of Hydra's, and every fault has its line.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, cast

import yaml
from omegaconf import MISSING, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml.nodes import MappingNode, Node, ScalarNode, SequenceNode

from dlrm_hybrid.config.identity import is_below
from dlrm_hybrid.config.keys import (
    CONF,
    EXPERIMENT,
    all_groups,
    all_keys,
    no_such_choice,
    unknown_key,
)
from dlrm_hybrid.config.overrides import ALLOWED
from dlrm_hybrid.types import ConfigError

MOST_BYTES = 1 << 20
MOST_DIGITS = 100  # of an integer: Python neither reads nor writes one of thousands
NAME = "name"
DEFAULTS = "defaults"
SELF = "_self_"
_CHOICE = re.compile(r"override /(\w+)")
_NULL = "tag:yaml.org,2002:null"
_PLAIN = ("bool", "float", "int", "map", "null", "seq", "str", "timestamp")


@dataclass(frozen=True, slots=True)
class Experiment:
    """The content of a file.

    Attributes:
        values: its values, as Hydra is to have them.
        lines: file and line of each key.
        bases: file and line of each experiment that it builds upon.
    """

    values: Mapping[str, Any]
    lines: Mapping[str, str]
    bases: Mapping[str, str]


def read(path: Path, names: tuple[str, ...]) -> Experiment:
    """Read the file of an experiment.

    Raises:
        ConfigError: it is no such file; one line for each fault, with file and line.
    """
    try:
        if not path.is_file() or path.stat().st_size > MOST_BYTES:
            raise ConfigError(f"{path}: must be a file of at most {MOST_BYTES:,} bytes")
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8"
        raise ConfigError(f"{path}: cannot be read: {reason}") from error
    return _parsed(str(path), text, names)


@cache
def _parsed(path: str, text: str, names: tuple[str, ...]) -> Experiment:
    try:
        events = cast("Iterator[yaml.Event]", cast("Any", yaml).parse(text, yaml.SafeLoader))
        for event in events:
            if isinstance(event, yaml.AliasEvent):  # whose text can grow beyond all bounds
                line = event.start_mark.line + 1
                raise ConfigError(f"{path}:{line}: aliases (*) are not allowed")
        root: Any = cast("Any", yaml).compose(text, yaml.SafeLoader)
        if not isinstance(root, MappingNode):
            raise ConfigError(f"{path}: must be choices and values: {DEFAULTS}, sections and keys")
        lines: dict[str, str] = {}
        choices = [node for key, node, _ in _pairs(path, root) if key == DEFAULTS]
        bases: dict[str, str] = {}
        faults = [fault for node in choices for fault in _choice_faults(path, node, names, bases)]
        faults += _faults(path, "", root, lines)
        if not faults:
            values: Any = OmegaConf.to_container(OmegaConf.create(text), resolve=False)
            return Experiment({**values, DEFAULTS: values.get(DEFAULTS) or []}, lines, bases)
    except (yaml.YAMLError, OmegaConfBaseException, ValueError, RecursionError) as error:
        mark = error.problem_mark if isinstance(error, yaml.MarkedYAMLError) else None
        where = path if mark is None else f"{path}:{mark.line + 1}"
        reason = error.problem if isinstance(error, yaml.MarkedYAMLError) else type(error).__name__
        raise ConfigError(f"{where}: not YAML: {reason}") from error
    raise ConfigError("\n".join(faults))


def _choice_faults(
    path: str, node: Node, names: tuple[str, ...], bases: dict[str, str]
) -> Iterator[str]:
    """Faults of the choices of a file; notes in `bases` where each experiment is."""
    if node.tag == _NULL:
        return
    groups: set[str] = set()
    for entry in node.value if isinstance(node, SequenceNode) else [node]:
        where = _where(path, entry)
        if isinstance(entry, ScalarNode):
            if entry.value not in (*names, SELF):
                yield f"{where}: {entry.value}: {no_such_choice(EXPERIMENT, [entry.value], names)}"
            elif entry.value in bases:
                yield f"{where}: {entry.value}: stands here twice"
            bases[entry.value] = where
            continue
        pairs = list(_pairs(path, entry)) if isinstance(entry, MappingNode) else []
        head, choice, where = pairs[0] if len(pairs) == 1 else ("", entry, where)
        match = _CHOICE.fullmatch(head)
        group = "" if match is None else match[1]
        is_choice = group != EXPERIMENT and group in all_groups()
        if not is_choice or not isinstance(choice, ScalarNode):
            yield f"{where}: must be `override /GROUP: CHOICE`, or an experiment to build upon"
        elif choice.value not in all_groups()[group]:
            fault = no_such_choice(group, [choice.value], all_groups()[group])
            yield f"{where}: {group}={choice.value}: {fault}"
        elif group in groups:
            yield f"{where}: {group}={choice.value}: {group} is chosen twice"
        groups.add(group)


def _faults(path: str, above: str, section: MappingNode, lines: dict[str, str]) -> Iterator[str]:
    """Faults of the values of a section; notes in `lines` where each key is."""
    for name, node, where in _pairs(path, section):
        key = f"{above}{name}"
        if key == DEFAULTS:
            continue
        lines[key] = where
        if (fault := _key_fault(key, name)) is not None:
            yield f"{where}: {fault}"
        elif isinstance(node, MappingNode):
            yield from _faults(path, f"{key}.", node, lines)
        elif _is_section(key) and node.tag != _NULL:
            group = f"; in {DEFAULTS}, - override /{key}: … chooses" if key in all_groups() else ""
            yield f"{where}: {key}: is a section{group}"
        else:
            yield from (f"{_where(path, part)}: {key}: {why}" for part, why in _not_plain(node))


def _key_fault(key: str, name: str) -> str | None:
    """The fault of a key, whatever its value; None without one."""
    if is_below(key, ("hydra",)):
        return f"{key}: of Hydra's own keys {', '.join(ALLOWED)} can be typed, none is here"
    if key == CONF:
        return f"{key}: can be typed, and nowhere else"
    if name.startswith("_"):
        return f"{key}: not a plain value; nothing is made of it"
    if "." in name:
        return f"{key}: a section is a line of its own, with its keys indented below it"
    if not is_below(key, tuple(all_keys())) and not _is_section(key):
        return unknown_key(key)
    group, _, leaf = key.partition(".")
    if leaf == NAME and group in all_groups():
        return f"{key}: sets only the name; in {DEFAULTS}, - override /{group}: … chooses"
    return None


def _not_plain(node: Node) -> Iterator[tuple[Node, str]]:
    if node.tag.rpartition(":")[2] not in _PLAIN:
        yield node, f"{node.tag}: must be a plain value"
    elif isinstance(node, ScalarNode):
        if "${" in node.value:
            yield node, f"{node.value}: must be a plain value, without ${{…}}"
        elif node.value == MISSING:
            yield node, f"{MISSING}: must be a value"
        elif len(node.value) > MOST_DIGITS and node.tag.endswith(":int"):
            yield node, f"{node.value[:20]}…: {len(node.value):,} characters are no number"
    elif isinstance(node, SequenceNode):
        for item in node.value:
            yield from _not_plain(item)
    else:
        yield node, "must be a plain value, not keys with values"


def _is_section(key: str) -> bool:
    return any(name.startswith(f"{key}.") for name in all_keys())


def _pairs(path: str, node: MappingNode) -> Iterator[tuple[str, Node, str]]:
    for key, value in node.value:
        name: str = key.value if isinstance(key, ScalarNode) else "?"
        yield name, value, _where(path, key)


def _where(path: str, node: Node) -> str:
    return f"{path}:{node.start_mark.line + 1}"
