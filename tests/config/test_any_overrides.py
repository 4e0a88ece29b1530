"""Any overrides compose to what can be built, or are refused, every line naming a key of theirs.

Values are drawn from the schema, inside and outside the bounds of every key; beside them stand
choices of every group and what is no override at all.
"""

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import TypeAdapter

from dlrm_hybrid.bounds import types_of
from dlrm_hybrid.cli.main import run
from dlrm_hybrid.config import compose
from dlrm_hybrid.config.identity import flat
from dlrm_hybrid.config.keys import all_groups, record_in, records, sections
from dlrm_hybrid.config.schema import Config
from dlrm_hybrid.config.validate import validate
from dlrm_hybrid.run.assembly import build
from dlrm_hybrid.types import ConfigError, ExitCode

MOST_LINE_CHARACTERS = 1_000
# Composing takes a tenth of a second: a tenth of the examples that the profile asks for.
EXAMPLES = settings.default.max_examples // 10 if settings.default else 10
COMMANDS = EXAMPLES // 2

JUNK = (
    *("0", "1", "-1", "2", "7", "0.5", "1.0", "1e-3", "1e400", "-0.0", "nan", "inf", "1_000"),
    *(str(2**31), str(2**63), str(2**64), "9" * 400, "9" * 5_000, "1e308", f"-{2**63}"),
    *("null", "true", "False", "''", '""', "x", "none", "a b", "'a b'", "é", "\u202e", "???"),
    *("[]", "[1,2]", "[0.5,0.75]", "[null]", "[[1]]", "{}", "{a:1}", "{name:dct}", "[a,{b:1}]"),
    *("${name}", "${nope}", "${name", "${oc.env:HOME}", "${run_id:}", "${train.seed}", "$", "\\"),
    *("1,2", "range(1,3)", "glob(*)", "choice(1,2)", "sort(2,1)", "int(1)", "float(x)", "str("),
    *("]", "[1,", "{a:", "'", '"', "a=b", "=", "", "\0", "\n", "a\nb", "../../x", "-" * 3_000),
)
LINES = (
    *("", "=", "==", "=1", "train", "train.seed", "~train", "~", "+", "++=", "a.b.c=1", "[]=1"),
    *("train..seed=1", ".train=1", "train.=1", "train.seed =1", "train.seed:1", "@x=1", "data@y=1"),
    *("model@gradient=dlrm_small", "defaults=[]", "_self_=1", "_target_=os.system", "+_target_=x"),
    *("+train._target_=os.system", "hydra/launcher=basic", "hydra/nope=1", "é=1", "hydra=1"),
    *("+hydra.callbacks.x._target_=os.system", "hydra.sweeper._target_=x", "hydra.nope=1"),
    *("+@x=[]", "model=1", "bench.what=step"),
)
HEADS = st.sampled_from(("",) * 7 + ("+", "++", "~"))
TEXTS = ("a", "x1", "run_1", "100mbit", "5ms", "10.0.0.1", "a.html")


@functools.cache
def leaves() -> dict[str, list[Mapping[str, Any]]]:
    """What records say of each key: the types that its value may have, as JSON schema has them."""
    kinds: dict[str, list[Mapping[str, Any]]] = {}
    for name, kind in types_of(Config).items():
        section = name.rstrip("_")
        if section not in sections():
            kinds[name] = [TypeAdapter(kind).json_schema()]
            continue
        for record in records(section).values():
            for field, one in _below(record):
                kinds.setdefault(f"{section}.{field}", []).append(TypeAdapter(one).json_schema())
    return kinds


def _below(record: type) -> Iterator[tuple[str, Any]]:
    for name, kind in types_of(record).items():
        inside = record_in(kind)
        if inside is None:
            yield name, kind
        else:
            yield from ((f"{name}.{field}", one) for field, one in _below(inside))


def allowed(node: Mapping[str, Any]) -> st.SearchStrategy[str]:
    """Values that the schema of a key allows, most likely at its bounds."""
    if "anyOf" in node:
        return st.one_of([allowed(one) for one in node["anyOf"]])
    if "enum" in node or "const" in node:
        return st.sampled_from(node.get("enum", [node.get("const")])).map(str)
    kinds: Mapping[str, Callable[[], st.SearchStrategy[str]]] = {
        "null": lambda: st.just("null"),
        "boolean": lambda: st.sampled_from(("true", "false")),
        "integer": lambda: numbers(node, 1),
        "number": lambda: numbers(node, 1e-6),
        "string": lambda: st.sampled_from(TEXTS),
        "array": lambda: st.lists(
            st.one_of([allowed(one) for one in node.get("prefixItems") or [node["items"]]]),
            max_size=3,
        ).map(lambda items: f"[{','.join(items)}]"),
    }
    return kinds[node["type"]]()


def numbers(node: Mapping[str, Any], least: float) -> st.SearchStrategy[str]:
    low = node.get("minimum", node.get("exclusiveMinimum", 0) + least)
    high = node.get("maximum", node.get("exclusiveMaximum", low + 1_000) - least)
    return st.sampled_from((low, high, low + least, low + (high - low) // 2)).map(str)


@st.composite
def overrides(draw: st.DrawFn) -> str:
    kind = draw(st.sampled_from(("group", "key", "key", "key", "line")))
    if kind == "line":
        return draw(st.sampled_from(LINES))
    junk = st.sampled_from(JUNK)
    if kind == "group":
        name = draw(st.sampled_from(sorted(all_groups())))
        head = "+" if name == "experiment" else draw(HEADS)
        return f"{head}{name}={draw(st.sampled_from(all_groups()[name]) | junk)}"
    key = draw(st.sampled_from(sorted(leaves())))
    value = draw(st.one_of([allowed(one) for one in leaves()[key]]) | junk)
    if draw(st.integers(0, 9)) == 9:  # misspelt
        place = draw(st.integers(0, len(key) - 1))
        piece = draw(st.sampled_from(("", "x", "..", key[place] * 2, "@", " ")))
        key = key[:place] + piece + key[place + 1 :]
    return f"{draw(HEADS)}{key}={value}"


@functools.cache
def known_names() -> tuple[str, ...]:
    """Names of keys, sections and groups."""
    found = {"experiment", *all_groups(), *leaves()}
    for key in flat(compose.values_of([])):
        parts = key.split(".")
        found |= {".".join(parts[:length]) for length in range(1, len(parts) + 1)}
    return tuple(found)


def beginnings(override: str) -> tuple[str, ...]:
    """How a line may begin that means this override; of a new key it says the first section."""
    text = override.partition("=")[0]
    key = text.lstrip("+~")
    told = "".join(x if x.isprintable() else ascii(x)[1:-1] for x in override)
    section = key.partition(".")[0]
    return told[: MOST_LINE_CHARACTERS // 4].lstrip(), text, key, f"{section}: unknown key"


def check_named(message: str, given_overrides: Sequence[str]) -> None:
    """Each line of a refusal begins with a key or an override, is printable and not long."""
    head, *lines = message.removesuffix("\n").split("\n")
    assert lines
    assert head in ("configuration: 1 fault", f"configuration: {len(lines)} faults")
    names = (*known_names(), *(one for each in given_overrides for one in beginnings(each)))
    for line in lines:
        assert line[2:].isprintable(), ascii(line)
        assert len(line) <= MOST_LINE_CHARACTERS
        assert line[2:].startswith(names), line


def build_all(values: Mapping[str, Any]) -> None:
    """What composes must hold together without a rank."""
    config = validate(values)
    if build.many_processes(config):
        build.topology(config)
    build.emulation(config)
    build.link_rate(config)
    build.prepared_folder(config)
    build.raw_paths(config)
    build.retention(config)


LISTS = st.lists(overrides(), min_size=1, max_size=5)


@settings(max_examples=EXAMPLES)
@given(LISTS)
def test_any_overrides_can_be_built_or_are_refused_by_name(some: list[str]) -> None:
    try:
        build_all(compose.values_of(some))
    except ConfigError as error:
        check_named(str(error), some)


@settings(max_examples=COMMANDS)
@given(LISTS)
def test_any_command_shows_its_configuration_or_is_refused_by_name(
    capsys: pytest.CaptureFixture[str], some: list[str]
) -> None:
    capsys.readouterr()
    code = run(["dlrm_hybrid", "train", "--cfg", "job", *some])
    told = capsys.readouterr().err
    if told.startswith("not read by `train`: "):  # a note, of other commands' keys
        note, _, told = told.partition("\n")
        assert note.isprintable()
    assert code in (ExitCode.DONE, ExitCode.CONFIGURATION)
    if code == ExitCode.CONFIGURATION:
        check_named(told, some)
