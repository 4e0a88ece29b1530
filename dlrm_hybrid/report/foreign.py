"""Run folders of anybody as data: what is not as the program writes it counts as not measured."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from typing import Any, cast

from dlrm_hybrid.telemetry.spans import Span
from dlrm_hybrid.telemetry.summary import summarise
from dlrm_hybrid.types import printable

MOST = 1e24  # of what is measured, and may be drawn
MOST_GIVEN = sys.float_info.max  # of what somebody has configured
UNKNOWN = "unknown"
STATUS_CHARACTERS = 40


def plain(value: Any, most: float = MOST) -> Any:
    """JSON values without escapes, None for numbers that are not finite or above `most`."""
    if isinstance(value, str):
        return printable(value)
    if isinstance(value, Mapping):
        items = cast("Mapping[str, Any]", value).items()
        return {printable(key): plain(inner, most) for key, inner in items}
    if isinstance(value, (list, tuple)):
        return [plain(inner, most) for inner in cast("list[Any]", value)]
    if isinstance(value, (int, float)) and not -most <= value <= most:
        return None
    return value


def read_summary(told: Mapping[str, Any]) -> dict[str, Any]:
    """All that a summary has, None where `told` says nothing of it or something else.

    Args:
        told: the content of `summary.json`, through `plain`.
    """
    summary = _like(told, summarise([], UNKNOWN, 1))
    status = told.get("status")
    summary["status"] = status[:STATUS_CHARACTERS] if isinstance(status, str) else UNKNOWN
    network, network_told = summary["network"], _mapping(told.get("network"))
    network["by_class"] = _entries(network_told.get("by_class"), _tally)
    shares = _entries(network_told.get("utilization_by_rank"), _number)
    network["utilization_by_rank"] = shares or None
    summary["roles"] = _entries(told.get("roles"), _role)
    return summary


def _like(value: Any, skeleton: Mapping[str, Any]) -> dict[str, Any]:
    given = _mapping(value)
    kept = {key: inner for key, inner in given.items() if key not in skeleton}
    for key, inner in skeleton.items():
        if isinstance(inner, Mapping):
            kept[key] = _like(given.get(key), cast("Mapping[str, Any]", inner))
        else:
            kept[key] = _number(given.get(key))
    return kept


def _mapping(value: Any) -> Mapping[str, Any]:
    return cast("Mapping[str, Any]", value) if isinstance(value, Mapping) else {}


def _number(value: Any) -> float | None:
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return value if is_number else None


def _entries(value: Any, read: Callable[[Any], Any]) -> dict[str, Any]:
    """Those entries that can be read."""
    found = {key: read(inner) for key, inner in _mapping(value).items()}
    return {key: inner for key, inner in found.items() if inner is not None}


def _tally(value: Any) -> dict[str, Any] | None:
    names = ("bytes", "dense_equivalent_bytes", "messages")
    tally = {name: _number(_mapping(value).get(name)) for name in names}
    return None if None in tally.values() else tally


def _role(value: Any) -> dict[str, Any] | None:
    told = _mapping(value)
    if not isinstance(told.get("role"), str):
        return None
    spans = _entries(told.get("seconds_by_span"), _number)
    phases = _entries(told.get("seconds_by_phase"), _number)
    figures = ("cpu_utilization", "bytes_sent", "bytes_received")
    return {
        **told,
        **{name: _number(told.get(name)) for name in figures},
        "seconds_by_span": spans if all(span in spans for span in Span) else {},
        "seconds_by_phase": phases if "train" in phases else None,
    }
