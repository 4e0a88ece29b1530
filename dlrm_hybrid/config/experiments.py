"""A user's own experiments: `conf=FOLDER` with `experiment/NAME.yaml` in it.

A file is as those in conf/experiment, but plain: choices of groups and values of keys, nothing of
Hydra's, and every fault has its line. Hydra never reads it: it gets the values that were checked.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, cast

import yaml
from hydra.errors import HydraException
from omegaconf import MISSING, DictConfig, OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException
from yaml.nodes import MappingNode, Node, ScalarNode, SequenceNode

from dlrm_hybrid.config.identity import flat, is_below
from dlrm_hybrid.config.keys import (
    CONF,
    EXPERIMENT,
    all_groups,
    all_keys,
    default_choices,
    effect_of,
    head_of,
    no_such_choice,
    records,
    sections,
    shown,
    unknown_key,
)
from dlrm_hybrid.config.model import SECTIONS_OF_SIZE, with_world_size
from dlrm_hybrid.config.options import option, store_option
from dlrm_hybrid.config.overrides import ALLOWED, UNCHECKED, read_override
from dlrm_hybrid.config.validate import faults_text
from dlrm_hybrid.record import Effect, defaults_of
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
    """Read the file of an experiment; ConfigError with the place of each fault."""
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


_FILE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]*")


@dataclass(frozen=True, slots=True)
class OwnExperiments:
    """The experiments in the folder that a command line names; none without such a folder.

    Attributes:
        fault: why there are none, though there is a folder; else None.
    """

    files: Mapping[str, Path] = field(default_factory=dict[str, Path])
    fault: str | None = None

    @property
    def names(self) -> tuple[str, ...] | None:
        """Names of all experiments; None where there is a fault, so that nobody knows."""
        return tuple(self.files) if self.fault is None else None

    @classmethod
    def of(cls, overrides: Sequence[str]) -> OwnExperiments:
        """Look for the user's experiments; never raises."""
        folder: Any = None
        for text in overrides:
            if text.partition("=")[0] == CONF:
                with suppress(HydraException, *UNCHECKED):
                    folder = read_override(text)[1]
                if not isinstance(folder, str) and folder is not None:
                    return cls(fault=f"{text}: must be one folder, with {EXPERIMENT}/NAME.yaml")
        return cls() if folder is None else cls.in_folder(folder)

    @classmethod
    def in_folder(cls, folder: str) -> OwnExperiments:
        """Look for experiments in a folder, if it is one."""
        if not Path(folder).is_dir():
            return cls(fault=f"{CONF} = {folder}: must be a folder, with {EXPERIMENT}/NAME.yaml")
        # Editors and systems keep files of theirs beside others, with a dot before the name.
        files = sorted((Path(folder) / EXPERIMENT).glob("[!.]*.yaml"))
        for path in files:
            if not _FILE_NAME.fullmatch(path.stem):
                return cls(fault=f"{path}: its name must be letters, digits, _ and -")
            if not isinstance(read_override(f"_={path.stem}")[1], str):
                return cls(fault=f"{path}: its name reads as a value, not as text; rename it")
            if path.stem in all_groups()[EXPERIMENT]:
                return cls(fault=f"{path}: the program has an experiment of this name; rename it")
        if not files:
            return cls(fault=f"{CONF} = {folder}: has no {EXPERIMENT}/*.yaml")
        return cls({path.stem: path for path in files})

    def chosen(self, overrides: Sequence[str]) -> list[str]:
        """Experiments that overrides without faults choose, and those that they build upon."""
        return self._with_bases([name for name in _named(overrides) if name in self.files])

    def check(self, overrides: Sequence[str], more: Sequence[str]) -> None:
        """Raise ConfigError if the folder, or a file that these overrides choose, has a fault."""
        if faults := self.faults_of(overrides):
            raise ConfigError(faults_text([*more, *faults]))

    def faults_of(self, overrides: Sequence[str]) -> list[str]:
        """Faults of the folder and of the files that these overrides, without faults, choose."""
        faults = [] if self.fault is None else [self.fault]
        for name in self.chosen(overrides):
            try:
                faults += self._base_faults(name)
            except ConfigError as error:
                faults += str(error).splitlines()
        return faults

    def store(self, overrides: Sequence[str]) -> None:
        """Let Hydra find the experiments that overrides choose, whose files have no faults."""
        for name in self.chosen(overrides):
            store_option(name, {NAME: name, **self._read(name).values}, EXPERIMENT)

    def located(self, fault: str, overrides: Sequence[str]) -> str:
        """A fault of a value, with the file and line that sets it, if an experiment does."""
        typed = tuple(map(head_of, overrides))
        for name in self.chosen(overrides):
            for key, line in self._read(name).lines.items():
                if re.match(rf"{re.escape(key)}(?![\w.])", fault) and not is_below(key, typed):
                    return f"{line}: {fault}"
        return fault

    def keys_set(self, overrides: Sequence[str]) -> list[str]:
        """Keys and groups to which the experiments among overrides without faults give a value."""
        return [key for name in _named(overrides) for key, _ in self._settings(name)]

    def choices_of(self, overrides: Sequence[str]) -> dict[str, str]:
        """The choices of the experiments among overrides without faults, by group."""
        settings = [pair for name in _named(overrides) for pair in self._settings(name)]
        chosen = {key: x for key, x in settings if key in all_groups() and isinstance(x, str)}
        return {**default_choices(), **chosen}

    def own_keys(self, overrides: Sequence[str]) -> list[str]:
        """The keys in the user's own files among the experiments that overrides choose."""
        return [key for name in self.chosen(overrides) for key in flat(self._read(name).values)]

    def _settings(self, name: str) -> Iterator[tuple[str, Any]]:
        """The groups and keys of an experiment and of those it builds upon, with their values."""
        is_own = name in self.files
        values = dict(self._read(name).values) if is_own else option(EXPERIMENT, name)
        for choice in values.pop(DEFAULTS, ()):
            if isinstance(choice, dict):
                pairs = cast("dict[str, str]", choice).items()
                yield from ((group.rpartition("/")[2], chosen) for group, chosen in pairs)
            elif choice != SELF:
                yield from self._settings(choice)
        for key, value in flat(values).items():
            if key != NAME and not key.startswith("hydra."):
                yield key, value

    def _read(self, name: str) -> Experiment:
        others = [other for other in self.files if other != name]
        return read(self.files[name], (*all_groups()[EXPERIMENT], *others))

    def _base_faults(self, name: str) -> list[str]:
        """Faults of a file's bases: experiments that build upon itself."""
        lines = self._read(name).bases
        return [
            f"{line}: {base}: builds upon {name}, which builds upon it"
            for base, line in lines.items()
            if base in self.files and name in self._with_bases([base])
        ]

    def _with_bases(self, names: Sequence[str]) -> list[str]:
        result: list[str] = []
        waiting = [*names]
        while waiting:
            name = waiting.pop(0)
            if name in result:
                continue
            result.append(name)
            with suppress(ConfigError):
                bases = self._read(name).values[DEFAULTS]
                waiting += (base for base in bases if isinstance(base, str) and base in self.files)
        return result


def _named(overrides: Sequence[str]) -> list[str]:
    names: list[str] = []
    for text in overrides:
        if text.startswith(f"+{EXPERIMENT}="):
            value = read_override(text)[1]
            names += cast("list[str]", value) if isinstance(value, list) else [value]
    return names


def drop_unfit(config: DictConfig, overrides: Sequence[str]) -> list[str]:
    """Take out of a configuration experiments' values that have no effect beside typed choices.

    Typed values stay, to be refused.

    Returns:
        a line for each value.
    """
    typed = {*map(head_of, overrides)}
    if EXPERIMENT not in typed:
        return []
    lines: list[str] = []
    own = OwnExperiments.of(overrides)
    replaced = own.choices_of(overrides)
    for section in sections():
        if section in typed and section in replaced and config[section].name != replaced[section]:
            lines += _drop_from(config[section], section, typed)
    wants_pulls = any(is_below(key, ("pull",)) for key in (*typed, *own.own_keys(overrides)))
    names = [*SECTIONS_OF_SIZE, *(["pull"] if wants_pulls else [])]
    chosen: Any = OmegaConf.to_container(OmegaConf.masked_copy(config, names))
    filled = with_world_size(chosen)["parallel"]
    size = {f"parallel.{leaf}": filled[leaf] for leaf in filled if config.parallel[leaf] is None}
    for name, key in all_keys().items():
        anchor, _, wanted_values = key.only.partition("=")
        section, _, leaf = name.rpartition(".")
        if not key.only or name in typed or not is_below(anchor, (*typed, *size)):
            continue
        node: Any = OmegaConf.select(config, section)
        record = records(section).get(str(node.get("name", "")))
        if record is None or leaf not in node or _is_met(config, size, anchor, wanted_values):
            continue
        values: Any = OmegaConf.to_container(node, resolve=False)
        if (value := values[leaf]) != (default := defaults_of(record)[leaf]):
            node[leaf] = default
            if anchor not in size:  # else nobody typed what leaves it without an effect
                lines.append(
                    f"{name} = {shown(value)}: needs {key.only}; left out of the experiment"
                )
    return lines


def _drop_from(node: DictConfig, section: str, typed: set[str]) -> Iterator[str]:
    """Take out of a section keys that its choice does not have, and values of another choice.

    Those are files, and all values where choices are values of one record.
    """
    name: str = node.name
    record = records(section).get(name)
    defaults = option(section, name) if record is None else defaults_of(record)
    values: Any = OmegaConf.to_container(node, resolve=False)
    for leaf in [x for x in values if x != "name"]:
        key, value = f"{section}.{leaf}", values[leaf]
        is_whole = record is None or Effect.PATH in effect_of(key)
        if any(is_below(x, (key,)) for x in typed):
            continue
        if leaf not in defaults:
            with open_dict(node):
                del node[leaf]
        elif is_whole and value != defaults[leaf]:
            node[leaf] = defaults[leaf]
        else:
            continue
        chosen = f"{section}={name}"
        yield f"{key} = {shown(value)}: of another choice than {chosen}; left out of the experiment"


def _is_met(config: DictConfig, size: Mapping[str, Any], anchor: str, values: str) -> bool:
    """Whether a key's anchor has a value, or gets one of `size`, beside which it has an effect."""
    key = anchor if "." in anchor else f"{anchor}.name"
    value: Any = size.get(key, OmegaConf.select(config, key, default=0))
    # None: a value that is still to follow from others.
    return value is None or bool(value) if not values else str(value) in values.split("|")
