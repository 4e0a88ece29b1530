"""Random configurations: each is one that can be built, or is refused with exit 2 and its keys.

Overrides are drawn from the schema: values inside and outside the bounds of every key, choices of
every group, and what is no override at all.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from fuzz_told import Told
from pydantic import TypeAdapter

from dlrm_hybrid.config import compose
from dlrm_hybrid.config.keys import conf_folder
from dlrm_hybrid.config.schema import Config
from dlrm_hybrid.config.validate import flatten, validate
from dlrm_hybrid.run.assembly import build
from dlrm_hybrid.types import ConfigError, ExitCode

PATIENCE_SECONDS = 60.0
MOST_LINE_CHARACTERS = 1_000
WEIGHTS = (0.5, 0.3, 0.1, 0.07, 0.03)  # of lists of 1 to 5 overrides
NUMBERS = ("0", "1", "-1", "2", "7", "0.5", "1.0", "1e-3", "1e400", "-0.0", "nan", "inf", "1_000")
HUGE = (str(2**31), str(2**63), str(2**64), "9" * 400, "9" * 5_000, "1e308", f"-{2**63}")
WORDS = ("null", "true", "False", "''", '""', "x", "none", "a b", "'a b'", "é", "\u202e", "???")
NESTED = ("[]", "[1,2]", "[0.5,0.75]", "[null]", "[[1]]", "{}", "{a:1}", "{name:dct}", "[a,{b:1}]")
ODD = (
    *("${name}", "${nope}", "${name", "${oc.env:HOME}", "${run_id:}", "${train.seed}", "$", "\\"),
    *(
        "1,2",
        "range(1,3)",
        "glob(*)",
        "choice(1,2)",
        "sort(2,1)",
        "int(1)",
        "float(x)",
        "str(",
        "]",
    ),
    *("[1,", "{a:", "'", '"', "a=b", "=", "", "\0", "\n", "a\nb", "../../x", "-" * 3_000),
)
JUNK = (NUMBERS, HUGE, WORDS, NESTED, ODD)
HEADS = ("", "", "", "", "", "", "", "+", "++", "~")
LINES = (
    *("", "=", "==", "=1", "train", "train.seed", "~train", "~", "+", "++=", "a.b.c=1", "[]=1"),
    *("train..seed=1", ".train=1", "train.=1", "train.seed =1", "train.seed:1", "@x=1", "data@y=1"),
    *("model@gradient=dlrm_small", "defaults=[]", "_self_=1", "_target_=os.system", "+_target_=x"),
    *("+train._target_=os.system", "hydra/launcher=basic", "hydra/nope=1", "é=1", "hydra=1"),
    *("+hydra.callbacks.x._target_=os.system", "hydra.sweeper._target_=x", "hydra.nope=1"),
)


def fuzz(times: int, seed: int) -> Told:
    """Compose, validate and build so many lists of overrides in this process.

    Args:
        times: how many.
        seed: of all that is drawn.
    """
    told, known = Told(), known_keys()
    for overrides in drawn(times, seed):
        told.tried += 1
        try:
            buildable(overrides)
            told.accepted += 1
        except ConfigError as error:
            told.faults += [f"{overrides}: {x}" for x in unnamed(str(error), overrides, known)]
        except Exception as error:
            told.faults.append(f"{overrides}: {type(error).__name__}: {error}")
    return told


def fuzz_command(times: int, seed: int) -> Told:
    """The same with the program itself, which prints the configuration or says what is wrong."""
    told, known = Told(), known_keys()
    for overrides in drawn(times, seed):
        if any("\0" in one for one in overrides):
            continue  # no program can be given that
        told.tried += 1
        command = [sys.executable, "-m", "dlrm_hybrid", "train", "--cfg", "job", *overrides]
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=PATIENCE_SECONDS, check=False
        )
        told.accepted += done.returncode == ExitCode.DONE
        faults: list[str] = []
        if done.returncode == ExitCode.CONFIGURATION:
            faults += unnamed(done.stderr, overrides, known)
        elif done.returncode != ExitCode.DONE:
            faults.append(f"exit code {done.returncode}: {done.stderr}")
        told.faults += [f"{overrides}: {fault}" for fault in faults]
    return told


def buildable(overrides: Sequence[str]) -> None:
    """Raise ConfigError unless these compose; what does must hold together without a rank."""
    config = validate(compose.values_of(overrides))
    if build.many_processes(config):
        build.topology(config)
    build.emulation(config)
    build.link_rate(config)
    build.prepared_folder(config)
    build.raw_paths(config)
    build.retention(config)


def drawn(times: int, seed: int) -> Iterator[list[str]]:
    """Lists of overrides; about half of the values are of the type and range of their key."""
    draw = np.random.default_rng(seed)
    leaves, groups = _leaves(), _groups()
    for _ in range(times):
        length = 1 + int(draw.choice(len(WEIGHTS), p=WEIGHTS))
        yield [_override(draw, leaves, groups) for _ in range(length)]


def known_keys() -> set[str]:
    """Names of keys, sections and groups."""
    found = {"experiment", *_groups(), *_leaves()}
    for key in flatten(compose.values_of([])):
        parts = key.split(".")
        found |= {".".join(parts[:length]) for length in range(1, len(parts) + 1)}
    return found


def unnamed(message: str, overrides: Sequence[str], known: set[str]) -> list[str]:
    """What is wrong with a message: each line begins with a key or an override, none is long."""
    head, *lines = message.removesuffix("\n").split("\n")
    if not lines or head not in ("configuration: 1 fault", f"configuration: {len(lines)} faults"):
        return [f"no list of faults: {message[:300]}"]
    names = (*known, *(one for given in overrides for one in _names(given)))
    return [
        f"says {line[:300]!r}"
        for line in lines
        if not line[2:].isprintable()
        or len(line) > MOST_LINE_CHARACTERS
        or not line[2:].startswith(names)
    ]


def _names(override: str) -> tuple[str, ...]:
    """How a message may begin that means this override; of a new key it says the first section."""
    text = override.partition("=")[0]
    key = text.lstrip("+~")
    told = "".join(x if x.isprintable() else ascii(x)[1:-1] for x in override)
    return (
        told[: MOST_LINE_CHARACTERS // 4].lstrip(),
        text,
        key,
        f"{key.partition('.')[0]}: unknown key",
    )


def _override(
    draw: np.random.Generator, leaves: Mapping[str, Any], groups: Mapping[str, Sequence[str]]
) -> str:
    kind = draw.random()
    if kind < 0.25:
        name = _one(draw, sorted(groups))
        head = "+" if name == "experiment" else _one(draw, HEADS)
        choice = _one(draw, groups[name]) if draw.random() < 0.8 else _junk(draw)
        return f"{head}{name}={choice}"
    if kind < 0.95:
        key = _one(draw, sorted(leaves))
        value = _valid(draw, leaves[key]) if draw.random() < 0.6 else _junk(draw)
        return f"{_one(draw, HEADS)}{_misspelt(draw, key)}={value}"
    return _one(draw, LINES)


def _leaves() -> dict[str, Any]:
    """What the schema says of each key."""
    schema = TypeAdapter(Config).json_schema()
    return dict(_below(schema, schema, ""))


def _below(root: Mapping[str, Any], node: Mapping[str, Any], prefix: str) -> Iterator[Any]:
    for name, inner in node["properties"].items():
        # A section that may be null is one of two choices.
        choices = [_resolved(root, one) for one in inner.get("anyOf", [inner])]
        sections = [one for one in choices if "properties" in one]
        if sections:
            yield from _below(root, sections[0], f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", {"anyOf": choices}


def _resolved(root: Mapping[str, Any], node: Mapping[str, Any]) -> Any:
    name = node.get("$ref")
    return node if name is None else root["$defs"][name.rpartition("/")[2]]


def _groups() -> dict[str, list[str]]:
    folders = sorted(path for path in conf_folder().iterdir() if path.is_dir())
    return {path.name: sorted(one.stem for one in path.glob("*.yaml")) for path in folders}


def _valid(draw: np.random.Generator, node: Mapping[str, Any]) -> str:
    """A value that the schema of a key allows, most likely at its bounds."""
    if "anyOf" in node:
        return _valid(draw, _one(draw, node["anyOf"]))
    if "enum" in node or "const" in node:
        return str(_one(draw, node.get("enum", [node.get("const")])))
    kinds: Mapping[str, Callable[[], str]] = {
        "null": lambda: "null",
        "boolean": lambda: _one(draw, ("true", "false")),
        "integer": lambda: str(_number(draw, node, 1)),
        "number": lambda: str(_number(draw, node, 1e-6)),
        "string": lambda: _one(draw, ("a", "x1", "run_1", "100mbit", "5ms", "10.0.0.1", "a.html")),
        "array": lambda: f"[{','.join(_items(draw, node))}]",
    }
    return kinds[node["type"]]()


def _items(draw: np.random.Generator, node: Mapping[str, Any]) -> list[str]:
    return [_valid(draw, node["items"]) for _ in range(int(draw.integers(0, 4)))]


def _number(draw: np.random.Generator, node: Mapping[str, Any], least: Any) -> Any:
    low = node.get("minimum", node.get("exclusiveMinimum", 0) + least)
    high = node.get("maximum", node.get("exclusiveMaximum", low + 1_000) - least)
    return _one(draw, (low, high, low + least, low + (high - low) // 2))


def _misspelt(draw: np.random.Generator, key: str) -> str:
    if draw.random() < 0.9:
        return key
    place = int(draw.integers(0, len(key)))
    return key[:place] + _one(draw, ("", "x", "..", key[place] * 2, "@", " ")) + key[place + 1 :]


def _junk(draw: np.random.Generator) -> str:
    return _one(draw, _one(draw, JUNK))


def _one(draw: np.random.Generator, choices: Sequence[Any]) -> Any:
    return choices[int(draw.integers(0, len(choices)))]
