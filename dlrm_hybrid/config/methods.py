"""Sections whose choices are records: types, bounds, defaults and help of their keys come from it.

`gradient=dct gradient.density=0.01` is `Dct(density=0.01)`. A method from outside the package is
chosen by its import path, `gradient=my_package.signsgd:SignSGD`, and imported for who types it.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, cast, final

from pydantic import TypeAdapter, ValidationError
from pydantic_core import InitErrorDetails, PydanticCustomError, core_schema
from typing_extensions import override

from dlrm_hybrid.bounds import SettingsError, types_of
from dlrm_hybrid.compress.gradient.methods import GradientMethod, find, help_of, load, methods
from dlrm_hybrid.types import ConfigError

if TYPE_CHECKING:
    from pydantic.json_schema import JsonSchemaValue

    from dlrm_hybrid.compress.gradient.compressor import Compressor
    from dlrm_hybrid.compress.gradient.context import StageContext

GROUP = "gradient"
_OUTSIDE = re.compile(r"[\w.]+:[\w.]+")
_loaded: dict[str, type[GradientMethod]] = {}


class RecordSection:
    """Marks a section of the configuration that is a record, chosen by `name`."""

    def __get_pydantic_core_schema__(self, source: Any, handler: Any) -> core_schema.CoreSchema:
        """What pydantic asks of metadata."""
        return core_schema.no_info_plain_validator_function(
            _record,
            serialization=core_schema.plain_serializer_function_ser_schema(
                lambda record: cast("GradientMethod", record).settings()
            ),
        )

    def __get_pydantic_json_schema__(self, schema: Any, handler: Any) -> JsonSchemaValue:
        """The keys of all choices, each with all types that it has somewhere."""
        kinds: dict[str, list[JsonSchemaValue]] = {"name": [{"enum": [*choices()]}]}
        for record in choices().values():
            for key, kind in types_of(record).items():
                if (one := _schema_of(kind)) not in kinds.setdefault(key, []):
                    kinds[key].append(one)
        return {"type": "object", "properties": {key: {"anyOf": all} for key, all in kinds.items()}}


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


Gradient = Annotated[GradientMethod, RecordSection()]


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


def summary_of(name: str) -> str:
    """What a choice is, in a line."""
    return (choices()[name].__doc__ or "").partition("\n")[0]


def lines_of(name: str) -> dict[str, str]:
    """A line of help for each key: of this choice, and for those it has not of any other."""
    lines: dict[str, str] = {}
    for record in (*choices().values(), choices().get(name)):
        if record is not None:
            lines |= {f"{GROUP}.{key}": line for key, line in help_of(record).items() if line}
    return lines


def readers_of(key: str) -> str | None:
    """The choices that have a key of the configuration; None where all others are told of it."""
    group, _, field = key.partition(".")
    names = [name for name, record in choices().items() if field in types_of(record)]
    if group != GROUP or not names:
        return None
    *others, last = names
    return f"{GROUP}={', '.join(others)} or {last}" if others else f"{GROUP}={last}"


@functools.cache
def _schema_of(kind: Any) -> JsonSchemaValue:
    return TypeAdapter(kind).json_schema()


def _record(section: Any) -> GradientMethod:
    """The record that a section is or describes; raises ValidationError, a fault for each key."""
    if isinstance(section, GradientMethod):
        return section
    if not isinstance(section, Mapping):
        raise _refused([("", section, "must be keys with values")])
    values = {**cast("Mapping[str, Any]", section)}
    name = values.pop("name", None)
    if (record := find(str(name))) is None:
        if _OUTSIDE.fullmatch(str(name)):
            return Unloaded(path=str(name), values=tuple(values.items()))
        raise _refused([("name", name, f"must be one of {', '.join(choices())}")])
    kinds = types_of(record)
    faults = [(key, None, "missing") for key in kinds if key not in values]
    faults += [
        (key, value, f"has no effect with {GROUP}={name}" + _applies(key))
        for key, value in values.items()
        if key not in kinds
    ]
    if faults:
        raise _refused(faults)
    try:
        return record(**{key: _tuples(value) for key, value in values.items()})
    except SettingsError as error:
        faults = [(key, values[key], _of_yaml(why)) for key, _, why in error.faults]
        raise _refused(faults) from None


def _applies(key: str) -> str:
    readers = readers_of(f"{GROUP}.{key}")
    return f"; only applies to {readers}" if readers else ""


def _of_yaml(reason: str) -> str:
    return reason.replace(" or None", " or null").replace("a tuple, each", "a list, each")


def _tuples(value: Any) -> Any:
    return tuple(cast("list[Any]", value)) if isinstance(value, list) else value


def _refused(faults: Sequence[tuple[str, Any, str]]) -> ValidationError:
    errors: list[InitErrorDetails] = [
        {
            "type": PydanticCustomError("setting", "{reason}", {"reason": reason}),
            "loc": (key,) if key else (),
            "input": value,
        }
        for key, value, reason in faults
    ]
    return ValidationError.from_exception_data(GROUP, errors)
