"""What the keys of `gradient` mean together: who reads which, and what a method goes with."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, cast

from dlrm_hybrid.compress.gradient.methods import GradientKeys, methods, rules, sections
from dlrm_hybrid.compress.gradient.methods.dense import TernGradSettings
from dlrm_hybrid.config.schema import Config


def sections_read(method: str, threshold: str | None) -> tuple[str, ...]:
    """The sections that a method reads with a threshold rule; none of names that do not exist."""
    readers = (methods().get(method), rules().get(threshold or ""))
    return tuple(key for one in readers if one is not None for key in one.sections)


def reader_of(section: str) -> str:
    """Who reads a section, as an override."""
    for name, rule in rules().items():
        if section in rule.sections:
            return f"gradient.threshold={name}"
    return next(f"gradient={name}" for name, one in methods().items() if section in one.sections)


def section_reader(key: str) -> str | None:
    """Who alone reads a key of `gradient`, as an override; None if several methods read it."""
    group, _, below = key.partition(".")
    section = below.partition(".")[0]
    return reader_of(section) if group == "gradient" and section in sections() else None


def unread_sections(
    gradient: Mapping[str, Any], defaults: Mapping[str, Any]
) -> tuple[dict[str, Any], list[str]]:
    """Null for every section that the method does not read, and a fault for each value set there.

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
            for key, value in changed(gradient[section], values)
        ]
    return kept, faults


def changed(given: Any, default: Mapping[str, Any]) -> list[tuple[str, Any]]:
    """What differs from the defaults of a section, by key below it."""
    if not isinstance(given, Mapping):
        return [("", given)]
    values = cast("Mapping[str, Any]", given)
    return [(f".{key}", one) for key, one in values.items() if (key, one) not in default.items()]


def gradient_rules(config: Config) -> Iterator[str]:
    """Faults of `gradient`: what a method does not read, lacks, or does not go with."""
    gradient, method = config.gradient, methods()[config.gradient.name]
    missing = [
        key
        for key in sections_read(gradient.name, gradient.threshold)
        if getattr(gradient, key) is None
    ]
    yield from _keys(gradient, missing)
    if gradient.sparsity and not method.is_sparse:
        yield (
            f"gradient.sparsity = {gradient.sparsity}: has no effect with "
            f"gradient={gradient.name}; choose e.g. gradient=dct"
        )
    if gradient.precision not in method.precisions:
        yield (
            f"gradient.precision = {gradient.precision!r}: gradient={gradient.name} sends "
            f"{' or '.join(method.precisions)}"
        )
    if method.thresholds and gradient.threshold not in (*method.thresholds, None):
        yield (
            f"gradient.threshold = {gradient.threshold!r}: gradient={gradient.name} is defined by "
            f"{' or '.join(method.thresholds)}; gradient=dct works with any rule"
        )
    if config.optimizer.name not in (method.optimizers or (config.optimizer.name,)):
        yield (
            f"gradient = {gradient.name!r}: needs optimizer={' or '.join(method.optimizers)}, "
            f"not {config.optimizer.name}"
        )
    if gradient.name != "none" and not config.parallel.servers:
        add = (
            "add parallel=hybrid" if config.parallel.name == "single" else "set parallel.servers=1"
        )
        yield f"gradient = {gradient.name!r}: needs a parameter server to send to; {add}"
    if not missing:
        yield from method.faults(gradient)
        yield from _rounds(config, method.rounds(gradient))
    yield from _leader(config)
    yield from _residual(config)


def _keys(gradient: GradientKeys, missing: list[str]) -> Iterator[str]:
    """A null that is read, or a value that is not."""
    every = dict.fromkeys(key for method in methods().values() for key in method.keys)
    read = methods()[gradient.name].keys
    for key in every:
        value = getattr(gradient, key)
        if key in read and value is None:
            yield f"gradient.{key} = null: gradient={gradient.name} needs a value"
        if key not in read and value is not None:
            yield f"gradient.{key} = {value!r}: has no effect with gradient={gradient.name}"
    for section in missing:
        yield f"gradient.{section} = null: gradient={gradient.name} needs its keys"


def _rounds(config: Config, rounds: tuple[str, ...]) -> Iterator[str]:
    """Faults of trainers that agree in every step."""
    gradient = config.gradient
    if not rounds or (config.sync.name == "sync" and not config.parallel.elastic):
        return
    needs, found = "sync=sync", f", not {config.sync.name}"
    if config.sync.name == "sync":
        needs, found = "parallel.elastic=false", ""
    if gradient.aggregation in ("union", "leader"):
        yield (
            f"gradient.aggregation = {gradient.aggregation!r}: trainers synchronize in every step; "
            f"needs {needs}{found}"
        )
        return
    is_ternary = gradient.find(TernGradSettings) is not None
    alone = " or gradient.terngrad.sharing=false" if is_ternary else ""
    yield (
        f"gradient = {gradient.name!r}: its trainers synchronize in every step; needs "
        f"{needs}{alone}{found}"
    )


def _leader(config: Config) -> Iterator[str]:
    """Faults of `gradient.aggregation=leader`."""
    gradient = config.gradient
    if gradient.aggregation != "leader":
        return
    if gradient.drain == "flush":
        yield (
            "gradient.drain = 'flush': with gradient.aggregation=leader a trainer cannot send a "
            "residual of its own; use discard or none"
        )
    if gradient.renewal == "fixed" and gradient.lifespan != 1 and config.parallel.trainers > 1:
        yield (
            f"gradient.lifespan = {gradient.lifespan}: with gradient.aggregation=leader a trainer "
            "selects in turns, which may never fall on a fixed renewal; use 1, or "
            "gradient.renewal=controlled"
        )


def _residual(config: Config) -> Iterator[str]:
    """Faults of thresholds, of residuals, and of what is pulled."""
    gradient = config.gradient
    if gradient.staggered and gradient.renewal != "fixed":
        yield "gradient.staggered = True: only applies to gradient.renewal=fixed"
    if gradient.staggered and gradient.scope == "stage":
        yield "gradient.staggered = True: gradient.scope=stage has one threshold for all tensors"
    if gradient.residual == "update" and config.optimizer.name != "sgd":
        yield (
            f"gradient.residual = 'update': needs optimizer=sgd; optimizer={config.optimizer.name} "
            "must see gradients, not updates"
        )
    terngrad = gradient.find(TernGradSettings)
    reports_levels = terngrad is not None and terngrad.pull == "levels"
    if reports_levels and config.pull.precision != "float32":
        yield (
            f"pull.precision = {config.pull.precision!r}: gradient.terngrad.pull=levels does not "
            "round weights; needs gradient.terngrad.pull=weights"
        )
    if reports_levels and config.pull.sparsity is not None:
        yield (
            f"pull.sparsity = {config.pull.sparsity}: gradient.terngrad.pull=levels moves every "
            "weight of every replica; needs gradient.terngrad.pull=weights"
        )
