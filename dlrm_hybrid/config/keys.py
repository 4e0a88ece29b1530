"""Every key of the configuration with what a person asks of it: type, choices, one line of help.

Types and choices come from `schema`, the line from the comment beside the key in conf/: where a
choice of a group has none of its own, that of another file of the group serves.
"""

from __future__ import annotations

import difflib
import functools
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from pydantic import TypeAdapter

from dlrm_hybrid.bounds import NAME_PATTERN
from dlrm_hybrid.config.methods import GROUP, choices, lines_of, summary_of
from dlrm_hybrid.config.schema import Config

ROOT = "config"
CONF = "conf"  # the folder with experiments of a user's own
EXPERIMENT = "experiment"  # a group that config.yaml does not choose from: it needs a +
BASE = "base"  # a folder of what choices of a group share
# Keys that papers or people know under another name, with what is typed instead.
REPLACED = {
    "gradient.sparsity": "gradient.density is the fraction that is sent, 0.01 one in a hundred",
}
# What other programs call things: the last part of a key, or a choice with what else it takes.
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
_LINE = re.compile(r"(?P<indent> *)(?P<name>\w+):(?P<value>[^#]*)(#\s*(?P<comment>.*))?$")
_CHOICE = re.compile(r"  - (?P<group>\w+): (?P<choice>\w+)$")

Schema = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Key:
    """A key of the configuration.

    Attributes:
        name: dotted, e.g. `train.batch_size`.
        kind: what values it takes, in words.
        choices: all values it takes, where they can be listed; else empty.
    """

    name: str
    kind: str
    choices: tuple[str, ...]


def conf_folder() -> Path:
    """The folder of YAML files: inside an installed wheel, beside the package in a checkout."""
    package = Path(__file__).resolve().parent.parent
    installed = package / "conf"
    return installed if installed.is_dir() else package.parent / "conf"


def all_keys() -> Mapping[str, Key]:
    """All keys by name, in the order of the schema."""
    return _keys_with(tuple(choices()))


def all_groups() -> Mapping[str, tuple[str, ...]]:
    """Groups and the names of their choices."""
    return _groups_with(tuple(choices()))


@functools.cache
def _keys_with(records: tuple[str, ...]) -> Mapping[str, Key]:
    schema = TypeAdapter(Config).json_schema()
    return {key.name: key for key in _leaves(schema, schema["$defs"], "")}


@functools.cache
def _groups_with(records: tuple[str, ...]) -> Mapping[str, tuple[str, ...]]:
    names = {path.name: [one.stem for one in path.glob("*.yaml")] for path in _folders()}
    names[GROUP] = [*names.get(GROUP, ()), *records]
    return {group: tuple(sorted(names[group])) for group in sorted(names)}


def _folders() -> Iterator[Path]:
    return (path for path in conf_folder().iterdir() if path.is_dir())


@functools.cache
def default_choices() -> Mapping[str, str]:
    """What config.yaml chooses from each group, in its order."""
    lines = (conf_folder() / f"{ROOT}.yaml").read_text(encoding="utf-8").splitlines()
    return {found["group"]: found["choice"] for line in lines if (found := _CHOICE.match(line))}


@functools.cache
def help_lines(group: str, choice: str) -> Mapping[str, str]:
    """The comments beside the keys of a group or, of records, their docstrings' lines.

    The empty group has those of config.yaml.

    Args:
        group: its name.
        choice: the file whose comments count before those of others.
    """
    if not group:
        return dict(_comments(conf_folder() / f"{ROOT}.yaml", ""))
    if group == GROUP:
        return lines_of(choice)
    files = sorted((conf_folder() / group).glob("*.yaml"), key=lambda path: path.stem != choice)
    files[1:1] = sorted((conf_folder() / group / BASE).glob("*.yaml"))
    found: dict[str, str] = {}
    for path in files:
        for name, comment in _comments(path, f"{group}."):
            found.setdefault(name, comment)
    return found


def summary(group: str, choice: str) -> str:
    """The comment at the head of a choice's file, or a record's first line; empty if none."""
    if group == GROUP and choice in choices():
        return summary_of(choice)
    lines = (conf_folder() / group / f"{choice}.yaml").read_text(encoding="utf-8").splitlines()
    head: list[str] = []
    for line in lines:
        if not line.startswith("#"):
            break
        if not line.startswith("# @"):
            head.append(line.removeprefix("#").strip())
    return " ".join(head)


def unknown_key(key: str, value: str = "") -> str:
    """The message for a key that does not exist, with what replaced it or the nearest that do.

    Args:
        key: dotted.
        value: `=` and what was given, for the hint.
    """
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
    known = [name for name in (*all_keys(), *above) if name != key]
    near = difflib.get_close_matches(key, known, n=1, cutoff=0.8)
    if not near:
        leaves = {name.rpartition(".")[2] for name in all_keys()}
        alike = difflib.get_close_matches(leaf, leaves, n=1, cutoff=0.75)
        near = [name for name in all_keys() if name.rpartition(".")[2] in alike and name != key]
    return near


def no_such_choice(group: str, names: Sequence[object], choices: Sequence[str]) -> str:
    """The message for names that are no choices of a group, with what may have been meant."""
    near = [one for name in names[:1] for one in near_choices(group, str(name), choices)]
    return f"no such choice; choose from {', '.join(choices)}{did_you_mean(near)}"


def near_choices(group: str, name: str, choices: Sequence[str]) -> list[str]:
    """The overrides that choose what a name may stand for."""
    if (elsewhere := CHOICES_ELSEWHERE.get(f"{group}={name.lower()}")) is not None:
        return [elsewhere]
    heads = [(one, *sorted((one, name.lower()), key=len)) for one in choices]
    begin = [one for one, head, of in heads if len(head) >= LEAST_HEAD and of.startswith(head)]
    close = difflib.get_close_matches(name.lower(), choices, n=1)
    sign = "+" if group == EXPERIMENT else ""
    return [f"{sign}{group}={one}" for one in dict.fromkeys((*close, *begin))][:MOST_NEAR]


def did_you_mean(texts: Iterable[str]) -> str:
    """The end of a message that names what may have been meant; empty for nothing."""
    meant = " or ".join(texts)
    return f"; did you mean {meant}?" if meant else ""


def with_whole_numbers(values: Any, prefix: str = "") -> Any:
    """The values, with 1000 for 1e3 where a key takes integers and no other numbers.

    Args:
        values: of a configuration, not yet validated.
        prefix: name of the section they are of, and a dot.
    """
    if not isinstance(values, Mapping):
        return values
    given = cast("Mapping[str, Any]", values)
    return {
        name: _whole(value)
        if f"{prefix}{name}" in _integer_keys()
        else with_whole_numbers(value, f"{prefix}{name}.")
        for name, value in given.items()
    }


def _whole(value: Any) -> Any:
    if isinstance(value, list):
        return [_whole(one) for one in cast("list[Any]", value)]
    is_whole = isinstance(value, float) and value.is_integer() and abs(value) <= EXACT
    return int(value) if is_whole else value


@functools.cache
def _integer_keys() -> frozenset[str]:
    kinds = {name: key.kind for name, key in all_keys().items()}
    return frozenset(one for one in kinds if "integer" in kinds[one] and "number" not in kinds[one])


def _comments(path: Path, prefix: str) -> Iterator[tuple[str, str]]:
    parents: list[tuple[int, str]] = []
    for line in path.read_text(encoding="utf-8").splitlines():
        found = _LINE.match(line)
        if found is None:
            continue
        indent = len(found["indent"])
        while parents and parents[-1][0] >= indent:
            parents.pop()
        parents.append((indent, found["name"]))
        if found["comment"]:
            yield prefix + ".".join(name for _, name in parents), found["comment"]


def _leaves(schema: Schema, defs: Schema, prefix: str) -> Iterator[Key]:
    for name, field in schema["properties"].items():
        section = _section(field, defs)
        if section is not None:
            yield from _leaves(section, defs, f"{prefix}{name}.")
        else:
            kinds = dict(_kinds(field))
            yield Key(
                f"{prefix}{name}", " | ".join(kinds), tuple(kinds) if all(kinds.values()) else ()
            )


def _section(field: Schema, defs: Schema) -> Schema | None:
    """The schema of the keys below a key, if it has some; a section may also be null."""
    for one in (field, *field.get("anyOf", ())):
        if "properties" in one:
            return one
        if "$ref" in one:
            return defs[one["$ref"].rpartition("/")[2]]
    return None


def _kinds(field: Schema) -> Iterator[tuple[str, bool]]:
    """What a field takes: each of its types in words, or a value, and whether it is a value."""
    if "anyOf" in field:
        for one in field["anyOf"]:
            yield from _kinds(one)
    elif "const" in field:
        yield field["const"], True
    elif "enum" in field:
        yield from ((value, True) for value in field["enum"])
    elif field["type"] == "boolean":
        yield from (("true", True), ("false", True))
    elif field["type"] == "array":
        items = " | ".join(kind for kind, _ in _kinds(field.get("items", {"type": "string"})))
        yield f"[{items}, …]", False
    elif field["type"] == "string":
        yield "name" if field.get("pattern") == NAME_PATTERN else "text", False
    elif field["type"] in ("integer", "number"):
        yield f"{field['type']}{_bounds(field)}", False
    else:
        yield field["type"], field["type"] == "null"


def _bounds(field: Schema) -> str:
    signs = {"minimum": "≥", "exclusiveMinimum": ">", "maximum": "≤", "exclusiveMaximum": "<"}
    shown = [
        f"{sign} {field[name]:g}"
        for name, sign in signs.items()
        if name in field and field[name] <= SHOWN_BOUND
    ]
    if "multipleOf" in field:
        shown.append(f"multiple of {field['multipleOf']}")
    return f" {', '.join(shown)}" if shown else ""
