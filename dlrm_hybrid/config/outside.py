"""Methods of `gradient` from outside the package: their records, and who may have them imported.

Such a method is chosen by its import path, `gradient=my_package.signsgd:SignSGD`, and imported for
who types it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, final

from typing_extensions import override

from dlrm_hybrid.compress.gradient.methods import GradientMethod, find, load, methods
from dlrm_hybrid.types import ConfigError

if TYPE_CHECKING:
    from dlrm_hybrid.compress.gradient.compressor import Compressor
    from dlrm_hybrid.compress.gradient.context import StageContext

GROUP = "gradient"
_OUTSIDE = re.compile(r"[\w.]+:[\w.]+")
_loaded: dict[str, type[GradientMethod]] = {}


@final
@dataclass(frozen=True)
class Unloaded(GradientMethod):
    """A method from outside the package that a file names and nobody here has loaded: data only.

    Attributes:
        path: its import path.
        values: its settings by name.
    """

    name: ClassVar[str] = "unloaded"
    path: str = ""
    values: tuple[tuple[str, Any], ...] = ()

    @override
    def __post_init__(self) -> None:
        """Nobody knows what its settings may be."""

    @override
    def settings(self) -> dict[str, Any]:
        return {"name": self.path, **dict(self.values)}

    @override
    def build(self, context: StageContext) -> Compressor:
        raise ConfigError(f"{GROUP} = {self.path!r}: {unloaded(self.path)}")


def unloaded(path: str) -> str | None:
    """What to do for a method from outside the package that is not loaded; None where none is."""
    if not _OUTSIDE.fullmatch(path) or find(path) is not None:
        return None
    return f"is from outside the package, and imported only where {GROUP}={path} is typed"


def record_of(name: str, values: Mapping[str, Any]) -> GradientMethod | type[GradientMethod] | None:
    """The record of a method; of one from outside that is not loaded its data; else None."""
    found = find(name)
    if found is None and _OUTSIDE.fullmatch(name):
        return Unloaded(path=name, values=tuple(values.items()))
    return found


def choices() -> Mapping[str, type[GradientMethod]]:
    """All choices of `gradient` that are records: the package's, and what was typed besides."""
    return {**methods(), **_loaded}


def load_typed(overrides: Iterable[str]) -> None:
    """Import the methods from outside that overrides name; what cannot be is left to `fault_of`."""
    for text in overrides:
        head, _, value = text.partition("=")
        if head == GROUP:
            for name in _OUTSIDE.findall(value.replace("\\", "")):
                fault_of(name)


def load_method(values: Mapping[str, Any]) -> None:
    """Import the method of a configuration that the parent of this process has checked."""
    if ":" in (name := str(values[GROUP]["name"])):
        fault_of(name)


def fault_of(name: str) -> str | None:
    """Why a name is no method from outside the package; None where it is one."""
    try:
        _loaded[name] = load(name)
    except ValueError as error:
        return str(error)
    return None
