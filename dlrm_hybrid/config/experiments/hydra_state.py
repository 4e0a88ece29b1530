"""Hydra's state, which is one for all threads of a program: lent to this one, and given back."""

from __future__ import annotations

import sys
import threading
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any, Final, cast

import hydra
from hydra.core.global_hydra import GlobalHydra

from dlrm_hybrid.config.keys import conf_folder

_TURN: Final = threading.RLock()
_NONE: Final = object()


@contextmanager
def composing() -> Generator[None, None, None]:
    """Hydra, ready to compose from the program's own `conf/` and nothing else.

    Hydra has one state for all threads. A program that uses Hydra itself finds its own afterwards.
    """
    with _TURN:
        theirs, plugins = GlobalHydra.instance().hydra, sys.modules.get("hydra_plugins", _NONE)
        GlobalHydra.instance().clear()
        # Its plugins are imported from wherever Python looks, the working folder for one.
        sys.modules["hydra_plugins"] = cast("Any", None)
        try:
            with hydra.initialize_config_dir(config_dir=str(conf_folder()), version_base="1.3"):
                yield
        finally:
            GlobalHydra.instance().hydra = theirs
            if plugins is _NONE:
                del sys.modules["hydra_plugins"]
            else:
                sys.modules["hydra_plugins"] = cast("Any", plugins)
