"""Every key of the configuration with its type, choices, help and effect.

All of it comes from the fields of records; see `dlrm_hybrid.record`.
"""

from __future__ import annotations

import difflib
import functools
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Literal, Union, cast, get_args, get_origin

from dlrm_hybrid.bounds import NAME_PATTERN, RATE_PATTERN, TIME_PATTERN, Bound, OneOf, types_of
from dlrm_hybrid.compress.gradient.methods import GradientMethod, help_of, methods
from dlrm_hybrid.config import outside
from dlrm_hybrid.config.schema import Config, Model, ModelConfig
from dlrm_hybrid.record import WEIGHTS, Choice, Effect, about, defaults_of

ROOT = "config"
CONF = "conf"  # the folder with experiments of a user's own
EXPERIMENT = "experiment"  # a group that config.yaml does not choose from: it needs a +
OF_METHODS = Effect.STATE  # effect of the keys of `gradient`
# Keys that papers or people know under another name, with the text to type instead.
REPLACED = {
    "gradient.sparsity": "gradient.density is the fraction that is sent, 0.01 one in a hundred",
}
# Names in other programs: of the last part of a key, or of a choice with the overrides for it.
KEYS_ELSEWHERE = {
    **dict.fromkeys(("learning_rate", "step_size"), "lr"),
    **dict.fromkeys(("max_steps", "num_steps", "total_steps", "max_iters"), "steps"),
    **dict.fromkeys(("max_epochs", "num_epochs"), "epochs"),
    **dict.fromkeys(("mini_batch_size", "bs"), "batch_size"),
}
CHOICES_ELSEWHERE = {"optimizer=adamw": "optimizer=adam optimizer.decoupled_weight_decay=true"}
MOST_SHOWN = 60  # characters of a value in a hint
MOST_NEAR = 3  # choices in a hint
LEAST_HEAD = 3  # characters that a name has in common with a longer one
EXACT = 2.0**53  # beyond it a float is not every integer
SHOWN_BOUND = 1_000_000  # a larger upper bound is no news to anybody
KINDS = {NAME_PATTERN: "name", RATE_PATTERN: "rate", TIME_PATTERN: "time"}  # of texts, in words
_CHOICE = re.compile(r"  - (?P<group>\w+): (?P<choice>\w+)$")


@dataclass(frozen=True, slots=True)
class Key:
    """A key of the configuration.

    Attributes:
        name: dotted, e.g. `train.batch_size`.
        kind: the type of its values, in words.
        choices: all values it takes, where they can be listed; else empty.
        only: the values beside which it has an effect; see `record.key`.
    """

    name: str
    kind: str
    choices: tuple[str, ...]
    effect: Effect
    only: str


def conf_folder() -> Path:
    """The folder of YAML files: inside an installed wheel, beside the package in a checkout."""
    package = Path(__file__).resolve().parent.parent
    installed = package / "conf"
    return installed if installed.is_dir() else package.parent / "conf"


@functools.cache
def sections() -> Mapping[str, Any]:
    """The sections by name, each with its record, or the base class of its choices' records."""
    kinds: Mapping[str, Any] = types_of(Config)
    return {name.rstrip("_"): kind for name, kind in kinds.items() if hasattr(kind, "settings")}


def records(section: str) -> Mapping[str, type]:
    """The records that a section may be, by the name of the choice; "" where it has no choices.

    Typed choices from outside the package are choices of any section that can have such.
    """
    base, from_outside = sections()[section], outside.loaded(section)
    if base is GradientMethod:
        return {**methods(), **from_outside}
    if not issubclass(base, Choice):
        return {"": ModelConfig if base is Model else base, **from_outside}
    choices = {record.name: record for record in _below(base) if "name" in vars(record)}
    return {**{name: record for name, record in choices.items() if ":" not in name}, **from_outside}


def with_new_keys(values: Mapping[str, Any]) -> dict[str, Any]:
    """The values that an earlier version has written, with keys that have come since.

    These get their defaults: a new key's default does what was done before there was the key.
    """
    filled = {**_defaults(Config), **values}
    for section in sections():
        section_values, choices = values.get(section, {}), records(section)
        if isinstance(section_values, Mapping):
            as_mapping = cast("Mapping[str, Any]", section_values)
            name = str(as_mapping.get("name"))
            record = choices.get(name if ":" in name or "" not in choices else "")
            filled |= {section: {**_defaults(record), **as_mapping}} if record else {}
    return filled


def _defaults(record: type) -> dict[str, Any]:
    """The defaults of a record's own keys; not of sections, which may be left out."""
    metadata = about(record)
    return {name: default for name, default in defaults_of(record).items() if metadata.get(name)}


def _below(base: type[Choice]) -> Iterator[type[Choice]]:
    for record in base.__subclasses__():
        yield record
        yield from _below(record)


def all_keys() -> Mapping[str, Key]:
    """All keys by name, in the order of the schema."""
    return _keys_with(outside.all_loaded())


def all_groups() -> Mapping[str, tuple[str, ...]]:
    """Groups and the names of their choices."""
    return _groups_with(outside.all_loaded())


def effect_of(key: str) -> Effect:
    """The effect of a key, or of the choice of a section."""
    if (entry := all_keys().get(key)) is not None:
        return entry.effect
    section, _, below = key.partition(".")
    base: Any = sections().get(section)
    return getattr(base, "effect" if below else "choice", OF_METHODS if base else WEIGHTS)


def keys_of(effect: Effect) -> tuple[str, ...]:
    """The keys that have an effect."""
    return tuple(name for name, key in all_keys().items() if effect & key.effect)


@functools.cache
def _keys_with(loaded: tuple[tuple[str, str], ...]) -> Mapping[str, Key]:
    keys: dict[str, Key] = {}
    for name, kind in types_of(Config).items():
        if (section := name.rstrip("_")) not in sections():
            _add(keys, name, kind, about(Config)[name], Config.effect)
            continue
        choices = records(section)
        if "" not in choices:
            kind, effect = Literal[(*choices,)], getattr(sections()[section], "choice", OF_METHODS)
            _add(keys, f"{section}.name", kind, {}, effect)
        for record in choices.values():
            _add_all(keys, f"{section}.", record)
    return keys


def _add_all(keys: dict[str, Key], prefix: str, record: type) -> None:
    """Add the keys of a record to those that other choices of its section have."""
    for name, kind in types_of(record).items():
        below = record_in(kind)
        if below is not None:
            _add_all(keys, f"{prefix}{name}.", below)
        else:
            effect: Effect = getattr(record, "effect", OF_METHODS)
            _add(keys, f"{prefix}{name}", kind, about(record)[name], effect)


def record_in(kind: Any) -> type | None:
    """The record of a section within a section, which may also be absent."""
    return next((part for part in (kind, *get_args(kind)) if hasattr(part, "settings")), None)


def _add(keys: dict[str, Key], name: str, kind: Any, about: Mapping[str, Any], of: Effect) -> None:
    kinds = dict(kinds_of(kind))
    present = keys.get(name)
    words = dict.fromkeys((*([present.kind] if present else ()), " | ".join(kinds)))
    parts = dict.fromkeys(part for text in words for part in text.split(" | "))
    choices = (*(present.choices if present else ()), *kinds) if all(kinds.values()) else ()
    is_listed = bool(choices) and (present is None or bool(present.choices))
    keys[name] = Key(
        name,
        " | ".join(parts),
        tuple(dict.fromkeys(choices)) if is_listed else (),
        present.effect if present else of if (effect := about.get("effect")) is None else effect,
        about.get("only", "") or (present.only if present else ""),
    )


@functools.cache
def _groups_with(loaded: tuple[tuple[str, str], ...]) -> Mapping[str, tuple[str, ...]]:
    folders = (path for path in conf_folder().iterdir() if path.is_dir())
    names = {path.name: [file.stem for file in path.glob("*.yaml")] for path in folders}
    for section in sections():
        if "" not in (choices := records(section)):
            names[section] = [*choices]
        elif section in names:
            names[section] += filter(None, choices)
    return {group: tuple(sorted(names[group])) for group in sorted(names)}


@functools.cache
def default_choices() -> Mapping[str, str]:
    """The choices that config.yaml makes from each group, in its order."""
    lines = (conf_folder() / f"{ROOT}.yaml").read_text(encoding="utf-8").splitlines()
    return {match["group"]: match["choice"] for line in lines if (match := _CHOICE.match(line))}


def line_of(key: str, choice: str = "") -> str:
    """The help of a key.

    Args:
        choice: choice of its section, whose line goes before those of other choices.
    """
    section, _, name = key.rpartition(".")
    if not section:
        return about(Config)[name].get("line", "")
    section, _, below = section.partition(".")
    choices = records(section)
    lines = [
        _lines(record).get(name, "")
        for record in (choices.get(choice), *choices.values())
        if record
    ]
    if below:
        record = record_in(types_of(next(iter(choices.values())))[below])
        lines = [] if record is None else [_lines(record).get(name, "")]
    only = all_keys()[key].only
    line = next(filter(None, lines), "")
    return f"{line}; only with {only.replace('|', ' or ')}" if only and line else line


def _lines(record: type) -> Mapping[str, str]:
    lines = {name: x["line"] for name, x in about(record).items() if "line" in x}
    return {**help_of(record), **lines}


def summary(group: str, choice: str) -> str:
    """A choice's help: the first sentences of its record, or the comment at its file's head."""
    if group in sections() and (record := records(group).get(choice)) is not None:
        return (record.__doc__ or "").partition("\n\n")[0].replace("\n    ", " ").strip()
    lines = (conf_folder() / group / f"{choice}.yaml").read_text(encoding="utf-8").splitlines()
    head: list[str] = []
    for line in lines:
        if not line.startswith("#"):
            break
        if not line.startswith("# @"):
            head.append(line.removeprefix("#").strip())
    return " ".join(head)


def readers_of(key: str) -> str | None:
    """The choices that have a key; None if all choices of its section have it, or none."""
    section, _, name = key.partition(".")
    choices: Mapping[str, type] = records(section) if section in sections() else {}
    having = [choice for choice, record in choices.items() if name in types_of(record)]
    if not having or len(having) == len(choices):
        return None
    # "" stands for all files of the group, beside choices from outside the package.
    own = [choice for choice in all_groups().get(section, ()) if choice not in choices]
    *rest, last = [name for choice in having for name in ([choice] if choice else own)]
    return f"{section}={', '.join(rest)} or {last}" if rest else f"{section}={last}"


def head_of(override: str) -> str:
    """The key or group of an override, without its sign and a place to move it to."""
    return override.lstrip("+~").partition("=")[0].partition("@")[0]


def unknown_key(key: str, value: str = "") -> str:
    """The message for a key that does not exist, with what replaced it or the nearest that do."""
    for old in (key, key.partition(".")[0]):
        if old in REPLACED:
            return f"{key}: unknown key; {REPLACED[old]}"
    shown = value if len(value) <= MOST_SHOWN else "=…"
    return f"{key}: unknown key{did_you_mean(f'{name}{shown}' for name in near_keys(key))}"


def near_keys(key: str) -> list[str]:
    """The keys, sections and groups that this one may stand for."""
    section, _, leaf = key.rpartition(".")
    leaf = KEYS_ELSEWHERE.get(leaf.lower(), leaf)
    same = [name for name in all_keys() if name.rpartition(".")[2] == leaf and name != key]
    if same:
        return [name for name in same if name == f"{section}.{leaf}"] or same
    sections = {name.rpartition(".")[0] for name in all_keys()} - {""}
    above = [name for name in (*sections, *all_groups()) if not key.startswith(f"{name}.")]
    names = [name for name in (*all_keys(), *above) if name != key]
    near = difflib.get_close_matches(key, names, n=1, cutoff=0.8)
    if not near:
        leaves = {name.rpartition(".")[2] for name in all_keys()}
        alike = difflib.get_close_matches(leaf, leaves, n=1, cutoff=0.75)
        near = [name for name in all_keys() if name.rpartition(".")[2] in alike and name != key]
    return near


def no_such_choice(group: str, names: Sequence[object], choices: Sequence[str]) -> str:
    """The message for names that are no choices of a group, with what may have been meant."""
    near = [override for name in names[:1] for override in near_choices(group, str(name), choices)]
    return f"no such choice; choose from {', '.join(choices)}{did_you_mean(near)}"


def near_choices(group: str, name: str, choices: Sequence[str]) -> list[str]:
    """The overrides that choose what a name may stand for."""
    if (elsewhere := CHOICES_ELSEWHERE.get(f"{group}={name.lower()}")) is not None:
        return [elsewhere]
    heads = [(choice, *sorted((choice, name.lower()), key=len)) for choice in choices]
    begin = [x for x, head, of in heads if len(head) >= LEAST_HEAD and of.startswith(head)]
    close = difflib.get_close_matches(name.lower(), choices, n=1)
    sign = "+" if group == EXPERIMENT else ""
    return [f"{sign}{group}={choice}" for choice in dict.fromkeys((*close, *begin))][:MOST_NEAR]


def did_you_mean(texts: Iterable[str]) -> str:
    """The end of a message that names what may have been meant; empty for nothing."""
    meant = " or ".join(texts)
    return f"; did you mean {meant}?" if meant else ""


def shown(value: Any) -> str:
    """A value as messages show it: as YAML has it, text in quotes."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, tuple | list):
        parts = cast("Sequence[Any]", value)
        return f"[{', '.join('null' if part is None else str(part) for part in parts)}]"
    return repr(value) if isinstance(value, str) else str(value)


def with_whole_numbers(values: Any, prefix: str = "") -> Any:
    """The values, with 1000 for 1e3 where a key takes integers and no other numbers."""
    if not isinstance(values, Mapping):
        return values
    mapping = cast("Mapping[str, Any]", values)
    return {
        name: _whole(value)
        if f"{prefix}{name}" in _integer_keys(outside.all_loaded())
        else with_whole_numbers(value, f"{prefix}{name}.")
        for name, value in mapping.items()
    }


def _whole(value: Any) -> Any:
    if isinstance(value, list):
        return [_whole(item) for item in cast("list[Any]", value)]
    is_whole = isinstance(value, float) and value.is_integer() and abs(value) <= EXACT
    return int(value) if is_whole else value


@functools.cache
def _integer_keys(loaded: tuple[tuple[str, str], ...]) -> frozenset[str]:
    kinds = {name: key.kind for name, key in all_keys().items()}
    return frozenset(x for x in kinds if "integer" in kinds[x] and "number" not in kinds[x])


def kinds_of(kind: Any) -> Iterator[tuple[str, bool]]:
    """The types of a field: each in words, or as a value, and whether it is a value."""
    origin, parts = get_origin(kind), get_args(kind)
    if origin in (Union, UnionType):
        for part in parts:
            yield from kinds_of(part)
    elif origin is Literal:
        yield from ((value, True) for value in parts)
    elif origin is tuple:
        yield f"[{' | '.join(text for text, _ in kinds_of(parts[0]))}, …]", False
    elif origin is Annotated and isinstance(parts[1], OneOf):
        yield from ((value, True) for value in parts[1].names())
    elif origin is Annotated:
        for text, _ in kinds_of(parts[0]):
            yield KINDS.get(parts[1].pattern) or f"{text}{_bounds(parts[1])}", False
    elif kind is bool:
        yield from (("true", True), ("false", True))
    else:
        words = {int: "integer", float: "number", str: "text"}
        yield words.get(kind, "null"), kind not in words


def _bounds(bound: Bound) -> str:
    signs = {"ge": "≥", "gt": ">", "le": "≤", "lt": "<"}
    limits = {sign: getattr(bound, name) for name, sign in signs.items()}
    shown = [
        f"{sign} {limit:g}"
        for sign, limit in limits.items()
        if limit is not None and limit <= SHOWN_BOUND
    ]
    return f" {', '.join(shown)}" if shown else ""
