"""The options that Hydra composes: defaults of records and files of `conf/`, parsed once.

Hydra has one state for all threads of a program, which `composing` lends to one and gives back.
"""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from typing import Any, Final, cast

import hydra
import yaml
from hydra.core.config_store import ConfigNode, ConfigStore
from hydra.core.global_hydra import GlobalHydra
from omegaconf import DictConfig, OmegaConf

from dlrm_hybrid.bounds import types_of
from dlrm_hybrid.config.keys import (
    EXPERIMENT,
    all_groups,
    conf_folder,
    record_in,
    records,
    sections,
)
from dlrm_hybrid.config.outside import GROUPS, loaded
from dlrm_hybrid.config.schema import Config
from dlrm_hybrid.record import defaults_of, plain

_TURN: Final = threading.RLock()
_NONE: Final = object()
_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # in C, where it is built


@contextmanager
def composing() -> Generator[None, None, None]:
    """Make Hydra ready to compose from the program's own options and nothing else.

    A program that uses Hydra itself finds its own state afterwards.
    """
    with _TURN:
        theirs, plugins = GlobalHydra.instance().hydra, sys.modules.get("hydra_plugins", _NONE)
        store = ConfigStore.instance()
        stored = store.repo
        GlobalHydra.instance().clear()
        # Its plugins are imported from wherever Python looks, the working folder for one.
        sys.modules["hydra_plugins"] = cast("Any", None)
        try:
            _store_options(stored["hydra"])
            # A folder without YAML files: all there is to compose is in the store.
            folder = str(Path(__file__).parent)
            with hydra.initialize_config_dir(config_dir=folder, version_base="1.3"):
                yield
        finally:
            store.repo = stored
            GlobalHydra.instance().hydra = theirs
            if plugins is _NONE:
                del sys.modules["hydra_plugins"]
            else:
                sys.modules["hydra_plugins"] = cast("Any", plugins)


class _Options(dict[str, Any]):
    """The content of Hydra's store; Hydra copies all of it to read any of it."""

    def __deepcopy__(self, memo: Any) -> _Options:
        """Return itself: nothing changes it, and its readers copy what they read."""
        return self


def _store_options(hydras: Any) -> None:
    """Put all options into Hydra's store, in place of anybody else's."""
    store = ConfigStore.instance()
    packages = _of_package()
    store.repo = _Options({"hydra": hydras, **packages, EXPERIMENT: {**packages[EXPERIMENT]}})
    for group in GROUPS:
        if choices := loaded(group):
            store.repo[group] = {**packages[group]}
        for path, record in choices.items():
            store_option(path, defaults_of(record), group)


def store_option(name: str, values: Any, group: str | None) -> None:
    """Let Hydra find a choice of a group."""
    ConfigStore.instance().store(name, values, group, _package(group))


def _package(group: str | None) -> str | None:
    """The place for the values of a group's choices: its section, or anywhere."""
    return "_global_" if group == EXPERIMENT else None


def option(group: str, name: str) -> dict[str, Any]:
    """The values of a choice of the package."""
    values: Any = OmegaConf.to_container(_of_package()[group][f"{name}.yaml"].node)
    return values


def defaults(section: str) -> dict[str, Any]:
    """The defaults of a section without choices, with those of the sections in it."""
    record = records(section)[""]
    inside = {name: record_in(kind) for name, kind in types_of(record).items()}
    below = {name: defaults_of(record) for name, record in inside.items() if record is not None}
    return {**defaults_of(record), **below}


@functools.cache
def _of_package() -> dict[str, Any]:
    """All options of the package, as Hydra's store has them."""
    stored: dict[str, Any] = {}
    for name, group, values in (*_records(), *_files()):
        folder = stored if group is None else stored.setdefault(group, {})
        node = cast("DictConfig", OmegaConf.create(values))
        folder[f"{name}.yaml"] = ConfigNode(f"{name}.yaml", node, group, _package(group), None)
    return stored


def _records() -> Iterator[tuple[str, str, Any]]:
    for section in sections():
        for name, record in records(section).items():
            if name and ":" not in name:
                yield name, section, defaults_of(record)


def _files() -> Iterator[tuple[str, str | None, Any]]:
    """Name, group and values of each file of `conf/`, over the defaults of its keys."""
    for path in sorted(conf_folder().rglob("*.yaml")):
        group = path.parent.relative_to(conf_folder()).as_posix()
        values = cast("Any", yaml).load(path.read_text(encoding="utf-8"), _LOADER)
        if group in sections():
            values = OmegaConf.merge(defaults(group), values)
        elif group == ".":
            single = {x.name: plain(x.default) for x in fields(Config) if x.metadata}
            alone = [x for x in sections() if "" in records(x) and x not in all_groups()]
            values = {**values, **single, **{x: defaults(x) for x in alone}}
        yield path.stem, None if group == "." else group, values
