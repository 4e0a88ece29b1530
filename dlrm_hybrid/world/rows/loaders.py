"""Loaders by name, which each rank imports and calls."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from functools import partial
from importlib import import_module
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any, cast, final

from dlrm_hybrid.types import ConfigError
from dlrm_hybrid.world.rows.batches import Loader

MAIN = "__main__"
MAIN_OF_RANKS = "__mp_main__"  # multiprocessing's name of the program's file in other processes
FIX = (
    "each rank imports the loader by its name: it must be a function at the top of a module, or a "
    "functools.partial of one with plain values"
)

_LOADING: list[str] = []  # names of loaders being imported, in a rank


def require_guard() -> None:
    """Refuse to start a world in a rank of another world, which imports its program.

    Raises:
        ConfigError: this process is a rank.
    """
    if _LOADING:
        raise ConfigError(
            f"loader = {_LOADING[0]}: its module starts a world where it is imported, which every "
            'rank does; put that below `if __name__ == "__main__":`'
        )


@final
@dataclass(frozen=True, slots=True)
class NamedLoader:
    """Name of a loader for import, with arguments that precede trainer and trainers.

    Attributes:
        module: name of the module that defines it.
        name: name of the function.
        file: file of the module if it is the program itself; else None.
        args: first positional arguments.
        keywords: keyword arguments.
    """

    module: str
    name: str
    file: str | None = None
    args: list[Any] = field(default_factory=list[Any])
    keywords: Mapping[str, Any] = field(default_factory=dict[str, Any])

    @classmethod
    def of(cls, loader: Loader) -> NamedLoader:
        """Name a function.

        Raises:
            ConfigError: another process cannot import it.
        """
        args, keywords, function = list[Any](), dict[str, Any](), cast("Any", loader)
        while isinstance(function, partial):
            given = cast("partial[Any]", function)
            args, keywords = [*given.args, *args], {**given.keywords, **keywords}
            function = given.func
        module, name = (getattr(function, key, None) for key in ("__module__", "__qualname__"))
        try:
            if json.loads(json.dumps([args, keywords])) != [args, keywords]:
                raise TypeError
        except (TypeError, ValueError):
            raise ConfigError(
                f"loader = {loader!r:.200}: its arguments must be texts, numbers, lists and "
                f"dictionaries; {FIX}"
            ) from None
        file = None
        found = None if module is None else sys.modules.get(module)
        if module == MAIN and (own := _module_of(sys.modules[MAIN])) is not None:
            module = own
        elif module == MAIN:
            file = getattr(found, "__file__", None)
            if file is None or not Path(file).is_file():  # such as `<stdin>`
                raise ConfigError(
                    f"loader = {name}: is defined in a notebook or an interactive session, which "
                    f"ranks cannot import; put it into a file (%%writefile rows.py); {FIX}"
                )
        if not isinstance(name, str) or getattr(found, name, None) is not function:
            raise ConfigError(f"loader = {loader!r:.200}: {FIX}")
        return cls(cast("str", module), name, file, args, keywords)

    def to_json(self) -> Mapping[str, Any]:
        """Plain values from which to make the object again."""
        return asdict(self)

    def load(self) -> Loader:
        """Import the function.

        Raises:
            ConfigError: it cannot be imported.
        """
        _LOADING.append(self.name)
        try:
            module = import_module(self.module) if self.file is None else _main(self.file)
            return partial(getattr(module, self.name), *self.args, **self.keywords)
        except Exception as error:
            raise ConfigError(
                f"loader = {self.module}.{self.name}: cannot be imported: {error!r}"
            ) from error


def _module_of(main: ModuleType) -> str | None:
    """Name of a program started by `python -m`, whose imports may be relative to it."""
    name = getattr(getattr(main, "__spec__", None), "name", None)
    return None if name == MAIN else name  # for a folder or zip file with a __main__.py


def _main(file: str) -> ModuleType:
    """Import the program's own file under another name, without what it guards by its name.

    It does as multiprocessing does, so that processes started by a loader
    (`DataLoader(num_workers=2)`) find what the file defines.
    """
    spec = spec_from_file_location(MAIN_OF_RANKS, file)
    assert spec is not None and spec.loader is not None
    module = module_from_spec(spec)
    module.__spec__ = None  # as for a script, which is found by its file
    sys.modules[MAIN] = sys.modules[MAIN_OF_RANKS] = module
    spec.loader.exec_module(module)
    return module
