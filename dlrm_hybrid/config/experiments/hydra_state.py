"""Hydra's state, which is one for all threads of a program: lent to one thread, and given back."""

from __future__ import annotations

import sys
import threading
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, cast

import hydra
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra

from dlrm_hybrid.config.options import store_options

_TURN: Final = threading.RLock()
_NONE: Final = object()


@contextmanager
def composing() -> Generator[None, None, None]:
    """Make Hydra ready to compose from the program's own options and nothing else.

    Hydra has one state for all threads. A program that uses Hydra itself finds its own afterwards.
    """
    with _TURN:
        theirs, plugins = GlobalHydra.instance().hydra, sys.modules.get("hydra_plugins", _NONE)
        store = ConfigStore.instance()
        stored = store.repo
        GlobalHydra.instance().clear()
        # Its plugins are imported from wherever Python looks, the working folder for one.
        sys.modules["hydra_plugins"] = cast("Any", None)
        try:
            store_options(stored["hydra"])
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
