"""What Hydra composes of: the files of `conf/`, parsed once, and the records of `methods`."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any, cast

import yaml
from hydra.core.config_store import ConfigStore

from dlrm_hybrid.config.keys import EXPERIMENT, conf_folder
from dlrm_hybrid.config.methods import GROUP, choices

_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # in C, where it is built


class _Options(dict[str, Any]):
    """The content of Hydra's store, which Hydra copies with all that is in it to read some."""

    def __deepcopy__(self, memo: Any) -> _Options:
        """Nothing changes it: what is read from it is copied once more."""
        return self


def store_options(hydras: Any) -> None:
    """Put all options into Hydra's store, in place of what anybody else has put there.

    Args:
        hydras: what Hydra itself keeps in it.
    """
    store = ConfigStore.instance()
    packages = _of_package()
    store.repo = _Options({"hydra": hydras, **packages, EXPERIMENT: {**packages[EXPERIMENT]}})
    outside = {name: method for name, method in choices().items() if ":" in name}
    if outside:
        store.repo[GROUP] = {**packages[GROUP]}
    for name, method in outside.items():
        store_option(name, method().settings(), GROUP)


def store_option(name: str, values: Any, group: str | None) -> None:
    """Let Hydra find a choice of a group."""
    package = "_global_" if group == EXPERIMENT else None
    ConfigStore.instance().store(name, values, group, package)


@functools.cache
def _of_package() -> dict[str, Any]:
    """All options of the package, as Hydra's store has them."""
    store = ConfigStore.instance()
    store.repo = {}
    for name, group, values in _files():
        store_option(name, values, group)
    for name, method in choices().items():
        if ":" not in name:
            store_option(name, method().settings(), GROUP)
    return store.repo


def _files() -> Iterator[tuple[str, str | None, Any]]:
    """Name, group and content of each file of `conf/`."""
    for path in sorted(conf_folder().rglob("*.yaml")):
        group = path.parent.relative_to(conf_folder()).as_posix()
        values = cast("Any", yaml).load(path.read_text(encoding="utf-8"), _LOADER)
        yield path.stem, None if group == "." else group, values
