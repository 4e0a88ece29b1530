"""The choices of `gradient` and of `gradient.threshold`; every file of this folder is found.

A file has the tables `METHODS`, `RULES` or both. The configuration reads them: settings with their
bounds, and what goes with what. So these files import neither torch nor numba when they are loaded;
what a method is built of is imported when it is built.
"""

from __future__ import annotations

import functools
import importlib
import pkgutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from dlrm_hybrid.bounds import Fraction, Positive, PrecisionOrLevels
from dlrm_hybrid.wire.section import Dtype

if TYPE_CHECKING:
    from dlrm_hybrid.compress.gradient.compressor import Compressor
    from dlrm_hybrid.compress.gradient.layout import Layout
    from dlrm_hybrid.compress.gradient.thresholds.rule import ThresholdRule
    from dlrm_hybrid.kernels.ops import Ops

SettingsT = TypeVar("SettingsT")

EVERY_PRECISION = ("float32", "bfloat16", "float16", "levels")


@dataclass(frozen=True, kw_only=True)
class GradientKeys:
    """The keys of `gradient` that several methods read; null where the chosen one does not.

    `config.schema` adds a key for the settings of each single method and rule.
    """

    name: str
    sparsity: Fraction
    precision: PrecisionOrLevels
    threshold: str | None
    scope: Literal["tensor", "stage"] | None
    aggregation: Literal["own", "union", "leader"] | None
    lifespan: Positive | None
    renewal: Literal["controlled", "fixed"] | None
    staggered: bool | None
    residual: Literal["gradient", "update"] | None
    drain: Literal["none", "discard", "flush"] | None
    drain_every: Positive | None

    @property
    def dtype(self) -> Dtype:
        """The type of values on the wire; levels are exact in bfloat16."""
        return Dtype.BFLOAT16 if self.levels else Dtype[self.precision.upper()]

    @property
    def levels(self) -> bool:
        """Whether values are integer multiples of a quantum."""
        return self.precision == "levels"

    def find(self, settings: type[SettingsT]) -> SettingsT | None:
        """The settings of this type; None where the chosen method and rule read none such."""
        return next((one for one in vars(self).values() if isinstance(one, settings)), None)

    def of(self, settings: type[SettingsT]) -> SettingsT:
        """The settings of this type, which the chosen method or rule reads."""
        found = self.find(settings)
        assert found is not None, f"{settings.__name__}: validate() refuses this"
        return found


def module_of(parameter: str) -> str:
    """The name of the module that a parameter belongs to; "" if it is the model itself."""
    return parameter.rpartition(".")[0]


@dataclass(frozen=True, slots=True, kw_only=True)
class StageContext:
    """The worker that a compressor is built for.

    Attributes:
        layout: of the dense tensors of its stage.
        trainer: its number.
        trainers: how many there are.
        model_elements: of all dense tensors of the model.
        last_layer: name of the model's last layer; None if none is special.
        lr: learning rate by step.
        seed: of the run.
        ops: to compute with.
    """

    layout: Layout
    trainer: int
    trainers: int
    model_elements: int
    last_layer: str | None
    lr: Callable[[int], float]
    seed: int
    ops: Ops


@dataclass(frozen=True, slots=True, kw_only=True)
class Method:
    """A choice of `gradient`: what it reads, what it goes with, what it builds.

    Attributes:
        build: the compressor of one trainer.
        keys: of `GradientKeys`, beside name, sparsity and precision; null elsewhere.
        sections: keys and types of its own settings.
        thresholds: the only rules that may find its threshold; empty if any rule may.
        is_sparse: reads `gradient.sparsity` and keeps a residual; it is 0 elsewhere.
        precisions: of values on the wire.
        optimizers: choices of `optimizer`; empty for all.
        rounds: in which its trainers agree in every step, names of `collective.Op`.
        faults: lines for what its keys must not mean together.
    """

    build: Callable[[GradientKeys, StageContext], Compressor]
    keys: tuple[str, ...] = ()
    sections: Mapping[str, type] = field(default_factory=dict[str, type])
    thresholds: tuple[str, ...] = ()
    is_sparse: bool = True
    precisions: tuple[str, ...] = EVERY_PRECISION
    optimizers: tuple[str, ...] = ()
    rounds: Callable[[GradientKeys], tuple[str, ...]] = lambda keys: ()
    faults: Callable[[GradientKeys], Iterator[str]] = lambda keys: iter(())


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """A choice of `gradient.threshold`.

    Attributes:
        build: the rule for one trainer.
        sections: key and type of its own settings.
    """

    build: Callable[[GradientKeys, StageContext], ThresholdRule]
    sections: Mapping[str, type] = field(default_factory=dict[str, type])


@functools.cache
def methods() -> Mapping[str, Method]:
    """All choices of `gradient` by name."""
    return _found("METHODS")


@functools.cache
def rules() -> Mapping[str, Rule]:
    """All choices of `gradient.threshold` by name."""
    return _found("RULES")


@functools.cache
def sections() -> Mapping[str, type]:
    """The types of all settings that only one method or rule reads, by key below `gradient`."""
    return {
        key: kind
        for one in (*rules().values(), *methods().values())
        for key, kind in one.sections.items()
    }


def _found(table: str) -> dict[str, Any]:
    """The tables of this name in all files of this folder."""
    modules = [
        importlib.import_module(f"{__name__}.{found.name}")
        for found in pkgutil.iter_modules(__path__)
    ]
    return {name: one for module in modules for name, one in getattr(module, table, {}).items()}
