"""What a method of gradient compression is: one frozen record; every file of this folder has some.

A record is read alike by programs, `Dct(density=0.01)`, and by the configuration, `gradient=dct
gradient.density=0.01`: its fields are the settings with their types, bounds, defaults and, in the
docstring, a line of help. So these files import neither torch, numpy nor numba when they are
loaded; what a method is built of is imported when it is built.
"""

from __future__ import annotations

import difflib
import functools
import importlib
import pkgutil
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from decimal import Decimal
from inspect import cleandoc
from numbers import Real
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, Self

from typing_extensions import runtime_checkable

from dlrm_hybrid.bounds import SettingsError, check
from dlrm_hybrid.compress.gradient.context import Builder
from dlrm_hybrid.outside import imported, is_path, path_of, present
from dlrm_hybrid.wire.section import Dtype

if TYPE_CHECKING:
    from torch import Tensor
    from torch.distributed import ProcessGroup
    from torch.nn import Module

    from dlrm_hybrid.compress.gradient.rule import ThresholdRule
    from dlrm_hybrid.compress.library.compressor import ParameterCompressor
    from dlrm_hybrid.compress.library.ddp import DdpState

_PACKAGE = "dlrm_hybrid."
_SETTING = re.compile(r"    (\w+): (.*)")


@runtime_checkable
class GradientMethod(Builder, Protocol):
    """A method of gradient compression: which elements of a gradient are sent, and how.

    One from outside the package is such a record too: `@dataclass(frozen=True, kw_only=True)`, all
    fields with defaults, and `build`. It is `gradient=MODULE:CLASS` in the configuration.
    """

    name: ClassVar[str]
    """Its name in the configuration, `gradient=NAME`; from outside the package its import path."""
    is_sparse: ClassVar[bool] = True
    """Whether a step leaves most elements out."""
    optimizers: ClassVar[tuple[str, ...]] = ()
    """Choices of `optimizer` that it goes with; empty for all."""
    alone: ClassVar[str] = ""
    """The setting with which its trainers would not agree in every step, if there is one."""

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        if not cls.__module__.startswith(_PACKAGE):
            cls.name = path_of(cls)

    def __new__(cls, *values: object, **settings: object) -> Self:
        """Refuse unknown settings in words of ours, before the generated constructor does."""
        names = [field.name for field in fields(cls)]  # pyright: ignore[reportArgumentType]
        if values or not settings.keys() <= {*names}:
            raise TypeError(_unfit(cls.__name__, names, values, settings))
        return super().__new__(cls)

    def __post_init__(self) -> None:
        check(self)
        if faults := [(name, getattr(self, name), reason) for name, reason in self.faults()]:
            raise SettingsError(type(self), faults)

    def rounds(self) -> tuple[str, ...]:
        """The rounds in which its trainers agree in every step, names of `collective.Op`."""
        return ()

    def faults(self) -> Iterator[tuple[str, str]]:
        """Settings that do not go with others: the name of each, and why."""
        yield from ()

    def faults_among(self, trainers: int) -> Iterator[tuple[str, str]]:
        """Settings that do not go with so many trainers: the name of each, and why."""
        yield from ()

    @property
    def levels(self) -> bool:
        """Whether the values sent are integer multiples of a quantum."""
        return getattr(self, "precision", None) == "levels"

    @property
    def publishes_means(self) -> bool:
        """Whether servers publish means that replicas apply, in place of weights."""
        return False

    def settings(self) -> dict[str, Any]:
        """The equivalent section `gradient` of a configuration: its name and all its fields."""
        names = [field.name for field in fields(self)]  # pyright: ignore[reportArgumentType]
        return {"name": self.name, **{name: getattr(self, name) for name in names}}

    def for_parameters(
        self,
        named_parameters: Iterable[tuple[str, Tensor]],
        *,
        seed: int = 0,
        lr: Callable[[int], float] | None = None,
        last_layer: str | None = None,
        trainer: int = 0,
        trainers: int = 1,
    ) -> ParameterCompressor:
        """Create a compressor for the gradients of these parameters, for use in any training loop.

        Args:
            named_parameters: from `model.named_parameters()`; frozen ones are left out.
            seed: of all random choices; must be the same on all trainers.
            lr: function from step (counted from 0) to learning rate; for `residual="update"`.
            last_layer: module that TernGrad sends in float32; None for the last, "" for none.
            trainer: index of this trainer, for `encode`; `reduce_gradients` takes the rank instead.
            trainers: number of trainers, likewise.

        Raises:
            ValueError: names repeat, a parameter cannot be compressed, or `lr` is missing.
        """
        from dlrm_hybrid.compress.library.compressor import Options, ParameterCompressor

        options = Options(
            seed=seed, lr=lr, last_layer=last_layer, trainer=trainer, trainers=trainers
        )
        return ParameterCompressor(self, named_parameters, options)

    def ddp_state(
        self,
        model: Module | None = None,
        process_group: ProcessGroup | None = None,
        *,
        seed: int = 0,
        lr: Callable[[int], float] | None = None,
        last_layer: str | None = None,
    ) -> DdpState:
        """Create the state of a DDP communication hook, to be registered with `ddp_hook`.

        Args:
            model: the DDP module. With a plain model or None, gradients that are zero on all ranks
                count as those of unused parameters; with None the state cannot be saved, either.
            process_group: of the trainers; None for the DDP module's, or for the default group.
            seed: of all random choices; must be the same on all trainers.
            lr: function from step (counted from 0) to learning rate; for `residual="update"`.
            last_layer: name of the module that TernGrad sends in float32.

        Raises:
            ValueError: `lr` is missing, or other ranks hold parts of a parameter, as in FSDP.
        """
        from dlrm_hybrid.compress.library.compressor import Options
        from dlrm_hybrid.compress.library.ddp import DdpState

        options = Options(seed=seed, lr=lr, last_layer=last_layer)
        return DdpState(self, model, process_group, options)


def dtype_of(precision: str) -> Dtype:
    """The type of values on the wire; levels are exact in bfloat16."""
    return Dtype.BFLOAT16 if precision == "levels" else Dtype[precision.upper()]


@functools.cache
def methods() -> Mapping[str, type[GradientMethod]]:
    """All methods of the package, by name."""
    classes = [cls for cls in _classes() if GradientMethod in cls.__mro__ and "name" in vars(cls)]
    return {cls.name: cls for cls in classes}  # pyright: ignore


@functools.cache
def rules() -> Mapping[str, type[ThresholdRule]]:
    """All threshold rules, by name."""
    from dlrm_hybrid.compress.gradient.rule import ThresholdRule

    return {cls.name: cls for cls in _classes() if ThresholdRule in cls.__mro__}


def find(name: str) -> type[GradientMethod] | None:
    """The method of this name; one from outside the package only if its module is loaded.

    So a name in somebody's file makes nothing run: who types it loads it.
    """
    if not is_path(name):
        return methods().get(name)
    method = present(name)
    return method if isinstance(method, type) and GradientMethod in method.__mro__ else None


def load(name: str) -> type[GradientMethod]:
    """The method of this name, from outside the package imported by its path, `MODULE:CLASS`.

    Raises:
        ValueError: there is none; says why.
    """
    if is_path(name):
        imported(name)
    if (method := find(name)) is None:
        raise ValueError("is no subclass of dlrm_hybrid.compress.GradientMethod")
    if not is_dataclass(method):
        raise ValueError("must be a dataclass: @dataclass(frozen=True, kw_only=True)")
    try:
        method()
    except Exception as error:
        raise ValueError(f"must have defaults that go together: {error}") from error
    return method


def help_of(record: type) -> Mapping[str, str]:
    """A line for each field of a record, from the docstrings of it and of those it inherits."""
    lines: dict[str, str] = {}
    for base in reversed(record.__mro__):
        name = ""
        _, _, attributes = cleandoc(base.__doc__ or "").partition("Attributes:\n")
        for line in attributes.splitlines():
            if (setting := _SETTING.fullmatch(line)) is not None:
                name, lines[setting[1]] = setting[1], setting[2]
            elif name and line.startswith("     "):
                lines[name] += f" {line.strip()}"
            elif line.strip():
                break
    return {field.name: lines.get(field.name, "") for field in fields(record)}


def _classes() -> Iterator[type]:
    for file in pkgutil.iter_modules(__path__):
        module = importlib.import_module(f"{__name__}.{file.name}")
        for value in vars(module).values():
            if isinstance(value, type) and value.__module__ == module.__name__:
                yield value


def _unfit(
    method: str, names: Sequence[str], values: Sequence[object], settings: Mapping[str, object]
) -> str:
    """What is wrong with the arguments of a method, and what was meant."""
    if not names:
        return f"{method} has no settings"
    if values:
        return f"{method} takes its settings by name: {method}({names[0]}={values[0]!r})"
    name, value = next((name, value) for name, value in settings.items() if name not in names)
    text = f"{method} has no setting {name!r}"
    if name == "sparsity" and "density" in names:
        density = 1 - Decimal(str(value)) if isinstance(value, Real) else "1 - sparsity"
        return f"{text}; it has the fraction that is sent, density={density}"
    near = difflib.get_close_matches(name, names, n=1)
    return f"{text}; did you mean {near[0]}?" if near else f"{text}; it has {', '.join(names)}"
