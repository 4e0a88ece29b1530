"""Choices from outside the package: their records, and who may have them imported.

Such a choice is an import path, `gradient=my_package.signsgd:SignSGD`, and imported for who types
it. What a file names is data: a run folder or a checkpoint makes nothing run.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import MISSING, dataclass, field, fields, make_dataclass
from typing import Any, ClassVar, Never, cast

from dlrm_hybrid.compress.gradient import methods
from dlrm_hybrid.compress.gradient.methods import GradientMethod
from dlrm_hybrid.config.choices import Sync
from dlrm_hybrid.config.schema import OwnModelConfig
from dlrm_hybrid.model.own import settings_of
from dlrm_hybrid.outside import imported, is_path
from dlrm_hybrid.parallel.schedule import Schedule
from dlrm_hybrid.record import Choice
from dlrm_hybrid.types import ConfigError

GROUPS = ("gradient", "model", "schedule", "sync")
"""Groups that have choices from outside."""
_OUTSIDE = re.compile(r"[\w.]+:[\w.]+")
_loaded: dict[tuple[str, str], type] = {}


@dataclass(frozen=True, kw_only=True)
class Unloaded:
    """A choice from outside that a file names and nobody here has loaded: data only."""

    name: ClassVar[str] = "unloaded"
    group: ClassVar[str]
    path: str = ""
    values: tuple[tuple[str, Any], ...] = ()

    def __post_init__(self) -> None:
        """Check nothing: nobody knows what its settings may be."""

    def settings(self) -> dict[str, Any]:
        """The section as it was read."""
        return {"name": self.path, **dict(self.values)}

    def refuse(self, *_: object) -> Never:
        """Raise ConfigError: only the loaded choice can do what it is asked for."""
        raise ConfigError(f"{self.group} = {self.path!r}: {unloaded(self.group, self.path)}")


def _of_group(group: str, base: type, act: str | None) -> type:
    """The class of such choices of a group, which refuses the act of those that are loaded."""
    acts = {} if act is None else {act: Unloaded.refuse}
    return make_dataclass(
        f"Unloaded{base.__name__}",
        (),
        bases=(Unloaded, base),
        namespace={"__module__": __name__, "group": group, **acts},
        frozen=True,
        kw_only=True,
    )


_DATA: Mapping[str, Any] = {
    "gradient": _of_group("gradient", GradientMethod, "build"),
    "model": _of_group("model", OwnModelConfig, None),
    "schedule": _of_group("schedule", Schedule, "__call__"),
    "sync": _of_group("sync", Sync, "policy"),
}
_BASES: Mapping[str, type[Choice]] = {"schedule": Schedule, "sync": Sync}


def loaded(group: str) -> dict[str, type]:
    """The records of a group's choices from outside that were typed, by path."""
    return {path: record for (of, path), record in _loaded.items() if of == group}


def all_loaded() -> tuple[tuple[str, str], ...]:
    """Group and path of all choices from outside that were typed."""
    return tuple(_loaded)


def unloaded(group: str, path: str) -> str | None:
    """The fault of a choice from outside that is not loaded; None if it is, or is none."""
    if not _OUTSIDE.fullmatch(path) or record_of(group, path) is not None:
        return None
    return f"is from outside the package, and imported only where {group}={path} is typed"


def record_of(group: str, path: str) -> type | None:
    """The record of a choice from outside; None if it is not loaded.

    A gradient method is loaded with its module: it is a record itself, and says so by its base.
    """
    return methods.find(path) if group == "gradient" else _loaded.get((group, path))


def as_data(group: str, path: str, values: Mapping[str, Any]) -> Unloaded | None:
    """The data of a choice from outside that is not loaded; None if a name is no path."""
    if group not in GROUPS or not _OUTSIDE.fullmatch(path):
        return None
    sizes = ("embedding_dim", "dense", "tables") if group == "model" else ()  # others ask for them
    known = {name: values[name] for name in sizes if isinstance(values.get(name), int)}
    return _DATA[group](path=path, values=tuple(values.items()), **known)


def load_typed(overrides: Iterable[str]) -> None:
    """Import the choices from outside that overrides name; `fault_of` reports failures."""
    for text in overrides:
        head, _, value = text.lstrip("+").partition("=")
        if head in GROUPS:
            for path in _OUTSIDE.findall(value.replace("\\", "")):
                fault_of(head, path)


def load_chosen(values: Mapping[str, Any], groups: Iterable[str] = GROUPS) -> None:
    """Import the choices of a configuration that the parent of this process has checked.

    Raises:
        ConfigError: one cannot be imported here.
    """
    for group in groups:
        path = str(values[group]["name"])
        if ":" in path and (fault := fault_of(group, path)) is not None:
            raise ConfigError(f"{group} = {path}: {fault}")


def fault_of(group: str, path: str) -> str | None:
    """Load a group's choice from a path; returns why it is none, or None."""
    try:
        _loaded[group, path] = _record(group, path)
    except ValueError as error:
        return str(error)
    return None


def _record(group: str, path: str) -> type:
    """Import a path and make the record of a group's choice; raises ValueError."""
    if group == "gradient":
        return methods.load(path)
    cls: object = imported(path) if is_path(path) else None
    if group == "model":
        record = _loaded.get((group, path))
        same = record is not None and cast(type[OwnModelConfig], record).module is cls
        return record if record is not None and same else _of_module(path, cls)
    base = _BASES[group]
    if not (isinstance(cls, type) and issubclass(cls, base)):
        raise ValueError(f"is no subclass of {base.__module__}.{base.__name__}")
    if cls.policy is Sync.policy if issubclass(cls, Sync) else cls.__call__ is base.__call__:
        raise ValueError(f"has no method {'policy' if base is Sync else '__call__'}")
    if "__dataclass_params__" not in vars(cls):
        raise ValueError("must be a dataclass: @dataclass(frozen=True, kw_only=True)")
    return _with_defaults(cls)


def _of_module(path: str, module: object) -> type[OwnModelConfig]:
    """The record of a model: the keys of all models, and the settings of its constructor."""
    settings = settings_of(module)
    names = {key.name for key in fields(OwnModelConfig)} | {"name"}
    for name, _, _ in settings:
        if name in names:
            raise ValueError(f"setting `{name}`: every model has a key of this name; rename it")
    assert isinstance(module, type)
    record = make_dataclass(
        module.__name__,
        [(name, kind, field(default=default)) for name, kind, default in settings],
        bases=(OwnModelConfig,),
        namespace={"name": path, "module": module, "__doc__": module.__doc__ or ""},
        frozen=True,
        kw_only=True,
    )
    record.__module__ = module.__module__
    return cast("type[OwnModelConfig]", _with_defaults(record))


def _with_defaults(record: type) -> type:
    if missing := [setting.name for setting in fields(record) if setting.default is MISSING]:
        raise ValueError(f"must have defaults, also of {', '.join(missing)}")
    try:
        record()
    except Exception as error:
        raise ValueError(f"must have defaults that go together: {error}") from error
    return record
