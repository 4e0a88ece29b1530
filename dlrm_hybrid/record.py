"""A key of the configuration: one field of a record, which says all that is to be said of it.

`rows: Count = key(4, "rows to keep", FREE)` is a type with its bounds, a default, a line of help
and an effect: what the key decides of a run. Whoever asks for one of these reads it here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from enum import Flag, auto
from typing import Any, ClassVar, Self, cast

from typing_extensions import override

from dlrm_hybrid.bounds import check
from dlrm_hybrid.outside import path_of


class Effect(Flag):
    """What a key decides; with none of these it decides weights, and never changes at a resume."""

    NOTHING = auto()
    """It changes nothing that a run's summary says."""
    FREE = auto()
    """It may differ between a run and the one that resumes from its checkpoint."""
    NEW_RUN = auto()
    """It may differ in a new run from an old checkpoint."""
    STATE = auto()
    """As `NEW_RUN`; of the checkpoint then go on weights and optimizers alone."""
    SEED = auto()
    """Runs that differ in it alone are samples of one thing."""
    EVALUATION = auto()
    """An evaluation takes it from its own command line."""
    ANOTHER = auto()
    """The key belongs to another command."""
    PATH = auto()
    """It names a file or folder: records have it from the root."""
    PLACE = auto()
    """It says where a run writes or sends to: no run folder decides that."""


WEIGHTS = Effect(0)
"""The effect of a key that decides weights."""


def key(default: Any, line: str, effect: Effect | None = None, *, only: str = "") -> Any:
    """A field that is a key of the configuration.

    Args:
        effect: what it decides; None for the effect of its record.
        only: the key and value it needs to have one, `sync=async`; or a key that must not be 0.
    """
    return field(default=default, metadata={"line": line, "effect": effect, "only": only})


@dataclass(frozen=True, kw_only=True)
class Record:
    """A section of the configuration, whose fields are its keys."""

    effect: ClassVar[Effect] = WEIGHTS
    """The effect of the keys that say none themselves."""
    choice: ClassVar[Effect] = WEIGHTS
    """The effect of the choice."""

    def __init_subclass__(cls, *, effect: Effect | None = None, choice: Effect | None = None):
        super().__init_subclass__()
        if effect is not None:
            cls.effect = cls.choice = effect
        if choice is not None:
            cls.choice = choice

    def __post_init__(self) -> None:
        check(self)

    def settings(self) -> dict[str, Any]:
        """The equivalent section of a configuration, as plain values."""
        return {
            f.name.rstrip("_"): plain(getattr(self, f.name))
            for f in fields(self)
            if not (f.default is None and not f.metadata)  # a section that is left out
            or getattr(self, f.name) is not None
        }

    def having(self, **values: Any) -> Self:
        """A copy with those of these values for which it has a key."""
        names = {f.name for f in fields(self)}
        return replace(self, **{name: value for name, value in values.items() if name in names})


class Choice(Record):
    """One choice of a section: a name, and the keys that it has.

    A base of several choices is no dataclass: what it has itself are the values of all choices
    that have no such key.
    """

    name: ClassVar[str]
    """Its name; for a choice from outside the package, its import path."""

    def __init_subclass__(cls, *, effect: Effect | None = None, choice: Effect | None = None):
        super().__init_subclass__(effect=effect, choice=choice)
        if not cls.__module__.startswith("dlrm_hybrid."):
            cls.name = path_of(cls)

    @override
    def settings(self) -> dict[str, Any]:
        return {"name": self.name, **super().settings()}


def about(record: type) -> Mapping[str, Mapping[str, Any]]:
    """The metadata of each field of a record, as `key` has made it."""
    return {f.name: f.metadata for f in fields(record)}


def defaults_of(record: type) -> dict[str, Any]:
    """The default of each key of a record; not all of them need be values that it can have."""
    values: dict[str, Any] = {f.name: plain(f.default) for f in fields(record)}
    return {"name": name, **values} if isinstance(name := vars(record).get("name"), str) else values


def plain(value: Any) -> Any:
    """A value as a configuration file has it."""
    if callable(settings := getattr(value, "settings", None)):
        return plain(settings())
    if isinstance(value, Mapping):
        return {key: plain(item) for key, item in cast("Mapping[str, Any]", value).items()}
    if isinstance(value, tuple | list):
        return [plain(item) for item in cast("Sequence[Any]", value)]
    return value
