"""What every choice of `gradient` reads and goes with: a row for each method."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

# Keys that all methods with a threshold of their own read.
LOCAL_KEYS = (
    *("threshold", "scope", "aggregation", "lifespan", "renewal", "staggered"),
    *("residual", "drain", "drain_every"),
)
# The section that a rule reads beside the keys of all.
RULE_SECTIONS: Mapping[str, tuple[str, ...]] = {
    "exact": (),
    "histogram": (),
    "dgc": ("dgc",),
    "redsync": ("redsync",),
    "gaussian": ("gaussian",),
    "hard": ("hard",),
    "sidco": ("sidco",),
}
EVERY_RULE = tuple(RULE_SECTIONS)
EVERY_PRECISION = ("float32", "bfloat16", "float16")
EVERY_POLICY = ("sync", "bounded")
EVERY_OPTIMIZER = ("sgd", "momentum", "adagrad")


@dataclass(frozen=True, slots=True, kw_only=True)
class Method:
    """What one choice of `gradient` reads, and what it goes with.

    Attributes:
        keys: of those that not every method reads; null elsewhere.
        thresholds: rules that find its threshold; none where it has no threshold.
        sections: of its own, beside that of its rule.
        is_sparse: reads `gradient.sparsity` and keeps a residual; it is 0 elsewhere.
        precisions: of values on the wire.
        policies: choices of `sync`.
        optimizers: choices of `optimizer`.
    """

    keys: tuple[str, ...] = LOCAL_KEYS
    thresholds: tuple[str, ...] = EVERY_RULE
    sections: tuple[str, ...] = ()
    is_sparse: bool = True
    precisions: tuple[str, ...] = EVERY_PRECISION
    policies: tuple[str, ...] = EVERY_POLICY
    optimizers: tuple[str, ...] = EVERY_OPTIMIZER


METHODS: Mapping[str, Method] = {
    "none": Method(keys=(), thresholds=(), is_sparse=False, precisions=("float32",)),
    "dct": Method(),
    "topk": Method(thresholds=("histogram", "exact")),
    "dgc": Method(sections=("correction",), optimizers=("sgd",)),
    "redsync": Method(thresholds=("redsync",)),
    "gaussian": Method(thresholds=("gaussian",)),
    "hard": Method(thresholds=("hard",)),
    "sidco": Method(thresholds=("sidco",)),
    "cltk": Method(keys=(), thresholds=(), sections=("cltk",), policies=("sync",)),
    "deft": Method(keys=(), thresholds=(), sections=("deft",), policies=("sync",)),
    "terngrad": Method(
        keys=(),
        thresholds=(),
        sections=("terngrad",),
        is_sparse=False,
        precisions=("float32",),
        policies=("sync",),
    ),
}


def sections_read(method: str, threshold: str | None) -> tuple[str, ...]:
    """The sections that a method reads with a threshold rule; none of names that do not exist."""
    own = METHODS[method].sections if method in METHODS else ()
    return (*own, *RULE_SECTIONS.get(threshold or "", ()))


def reader_of(section: str) -> str:
    """Who reads a section, as an override."""
    for rule, sections in RULE_SECTIONS.items():
        if section in sections:
            return f"gradient.threshold={rule}"
    return next(f"gradient={name}" for name, one in METHODS.items() if section in one.sections)


def unread_sections(
    gradient: Mapping[str, Any], defaults: Mapping[str, Any]
) -> tuple[dict[str, Any], list[str]]:
    """Null for every section that nobody reads, and a fault for each value that was set there.

    Args:
        gradient: the section `gradient` of a configuration, not yet validated.
        defaults: all sections as conf/ has them.
    """
    name, threshold = gradient.get("name"), gradient.get("threshold")
    read = sections_read(str(name), None if threshold is None else str(threshold))
    kept = dict(gradient)
    faults: list[str] = []
    for section, values in defaults.items():
        if section in read or gradient.get(section) is None:
            continue
        kept[section] = None
        given = f"gradient={name}" if threshold is None else f"gradient.threshold={threshold}"
        here = f"gradient={name}" if reader_of(section).startswith("gradient=") else given
        faults += [
            f"gradient.{section}{key} = {value!r}: only applies to {reader_of(section)}, not {here}"
            for key, value in _changed(gradient[section], values)
        ]
    return kept, faults


def _changed(given: Any, default: Mapping[str, Any]) -> list[tuple[str, Any]]:
    """What differs from the defaults, by key below the section."""
    if not isinstance(given, Mapping):
        return [("", given)]
    values = cast("Mapping[str, Any]", given)
    return [(f".{key}", one) for key, one in values.items() if (key, one) not in default.items()]
