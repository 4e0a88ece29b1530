"""From the arguments of a world to a configuration, validated as that of a command."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, cast, final

import numpy as np

from dlrm_hybrid.compress.gradient.methods import GradientMethod
from dlrm_hybrid.config import compose
from dlrm_hybrid.config.identity import flat
from dlrm_hybrid.config.keys import EXPERIMENT
from dlrm_hybrid.config.outside import GROUPS
from dlrm_hybrid.config.overrides import override_text
from dlrm_hybrid.config.schema import Config
from dlrm_hybrid.config.validate import faults_text, validate
from dlrm_hybrid.model.interaction import Cross, Dot, Fm
from dlrm_hybrid.model.own import OwnModel
from dlrm_hybrid.model.spec import ModelShape, Partition, shape_faults
from dlrm_hybrid.outside import is_path
from dlrm_hybrid.run.readiness import require_memory
from dlrm_hybrid.types import ConfigError
from dlrm_hybrid.world.batches import Columns

NO_ROWS = "batches of a Python program"  # in place of a folder of prepared rows
ENDLESS = 2**62  # number of steps of a run of unknown length
Keys = Mapping[str, object] | Sequence[str]
"""Keys of the configuration with their values, or overrides as on a command line."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """The model and the configuration of a world.

    Attributes:
        spec: the model.
        values: the configuration, as plain values.
        config: the same, typed.
    """

    spec: ModelShape
    values: Mapping[str, Any]
    config: Config

    @property
    def columns(self) -> Columns:
        """The columns that batches must have."""
        return Columns(self.spec, self.config.train.batch_size)

    @property
    def steps(self) -> int:
        """Number of steps of the whole run, for learning rates."""
        return self.config.train.steps or ENDLESS


def named_keys(
    trainers: int | None, cuts: Sequence[str] | None, servers: int | None, batch_size: int | None
) -> dict[str, object]:
    """Configuration keys of the arguments with names of their own."""
    return {
        "parallel.trainers": trainers,
        "parallel.cuts": cuts,
        "parallel.servers": servers,
        "train.batch_size": batch_size,
    }


def settings_of(
    spec: ModelShape,
    world: str,
    named: Mapping[str, object],
    gradient: GradientMethod | str | None,
    keys: Keys,
) -> Settings:
    """Compose and validate the configuration of a world.

    Args:
        spec: the model.
        world: `in_process` or `processes`.
        named: keys with arguments of their own; None keeps the default.
        gradient: a method's record or name; None keeps the default.
        keys: all other keys.

    Raises:
        ConfigError: lists all faults, one per line, each with key and value.
        ResourceError: tables do not fit into this machine's memory.
    """
    overrides = [
        "parallel=hybrid",
        *_texts(keys),
        *_gradient_overrides(gradient),
        *_texts({name: value for name, value in named.items() if value is not None}),
        f"parallel.world={world}",
        "data=table",
        override_text("data.prepared", NO_ROWS),
        *_model_overrides(spec),
    ]
    values = compose.values_of(overrides)
    return settings_from(spec, values)


def settings_from(spec: ModelShape, values: Mapping[str, Any]) -> Settings:
    """Validate as `settings_of`, from values of a configuration; raises ConfigError."""
    config = validate(values)
    if faults := [*_faults(config), *shape_faults(spec)]:
        raise ConfigError(faults_text(faults))
    Partition.of(spec, config.parallel.cuts)  # refuses a model of the user's own by its labels
    require_memory(config, spec.table_rows)
    return Settings(spec=spec, values=values, config=config)


def _texts(keys: Keys) -> Iterator[str]:
    if not isinstance(keys, Mapping):
        if not _are_texts(keys):  # a single text is a sequence too
            fault = f"config = {keys!r:.80}: must be a mapping or a list of overrides"
            raise ConfigError(faults_text([fault]))
        yield from keys
        return
    for key, value in keys.items():
        key = f"+{key}" if key == EXPERIMENT else key
        if isinstance(value, str):
            yield override_text(key, value)
        elif _are_texts(value):
            yield override_text(key, cast("Sequence[str]", value))
        else:
            try:
                yield f"{key}={json.dumps(value, default=_plain)}"
            except TypeError:
                raise ConfigError(
                    faults_text([f"{key} = {value!r:.80}: must be a number, text, list or None"])
                ) from None
            except ValueError:  # Python refuses integers of thousands of digits
                raise ConfigError(faults_text([f"{key}: has too many digits"])) from None


def _are_texts(value: object) -> bool:
    if not isinstance(value, (list, tuple)):
        return False
    return all(isinstance(text, str) for text in cast("Sequence[object]", value))


def _plain(value: object) -> object:
    """Convert a NumPy number to Python; raises TypeError for other values."""
    if isinstance(value, np.generic):
        return cast("np.generic[Any]", value).item()
    raise TypeError


def _gradient_overrides(gradient: GradientMethod | str | None) -> Iterator[str]:
    """Overrides for a method and all values of its record."""
    if gradient is None:
        return
    if isinstance(gradient, str):
        yield override_text("gradient", gradient)
        return
    if isinstance(gradient, type) or not hasattr(gradient, "settings"):
        fault = (
            f"gradient = {gradient!r:.80}: must be a method such as Dct(density=0.01), or a name"
        )
        raise ConfigError(faults_text([fault]))
    settings = gradient.settings()
    yield override_text("gradient", settings.pop("name"))
    yield from _texts({f"gradient.{key}": value for key, value in flat(settings).items()})


def _model_overrides(spec: ModelShape) -> Iterator[str]:
    """Overrides of `model` that describe a spec, without the rows of its tables."""
    if isinstance(spec, OwnModel):
        if not is_path(spec.path):
            fault = f"model = {spec.path!r}: cannot be imported; needs a class of a module"
            raise ConfigError(faults_text([fault]))
        yield override_text("model", spec.path)
        inputs = asdict(spec.inputs)
        del inputs["labels"]  # these are the rows', not the model's
        yield from _texts(
            {f"model.{key}": value for key, value in (inputs | {**spec.settings}).items()}
        )
        return
    kinds = {Dot: "dot", Cross: "cross", Fm: "fm"}
    interaction = spec.interaction
    yield from _texts(
        {
            "model.embedding_dim": spec.embedding_dim,
            "model.bottom": spec.bottom,
            "model.top": (*spec.top[:-1], 1),
            "model.interaction": kinds[type(interaction)],
            "model.dropout": spec.dropout,
            "model.bottom_dropout": spec.bottom_dropout,
            "model.batch_norm": spec.batch_norm,
            "model.table_dims": spec.table_dims or None,
        }
    )
    if not isinstance(interaction, Dot):
        head = f"model.{kinds[type(interaction)]}"
        yield from _texts({f"{head}.{key}": value for key, value in asdict(interaction).items()})


def _program_faults(group: str, name: str) -> Iterator[str]:
    if name.startswith("__main__:"):
        yield (
            f"{group} = {name!r}: ranks are processes and cannot import it from the program "
            "itself; needs a class of a module"
        )


def _faults(config: Config) -> Iterator[str]:
    """Faults: settings that only a command supports, whose rows exist before its run."""
    for group in GROUPS if config.parallel.world == "processes" else ():
        yield from _program_faults(group, getattr(config, group).name)
    if config.sync.name == "async":
        yield (
            "sync = 'async': its servers give out batches by number, a program hands them over "
            "step by step; needs sync=sync or bounded"
        )
    if config.checkpoint.resume != "never":
        yield (
            f"checkpoint.resume = {config.checkpoint.resume!r}: a World goes on from a checkpoint "
            "by its method `load`; needs never"
        )
    if config.parallel.elastic:
        yield "parallel.elastic = true: no trainer of a World is started again; needs false"
    if config.embedding.staleness:
        yield (
            f"embedding.staleness = {config.embedding.staleness}: rows of batches to come are "
            "looked up, which a program has not handed over yet; needs 0"
        )
    if config.parallel.machines is not None:
        yield (
            f"parallel.machines = {config.parallel.machines}: a World starts its processes on this "
            "machine alone; needs null, and numbers of trainers and servers"
        )
    if config.network.name == "emulated":
        yield "network = 'emulated': only the command `train` makes networks; needs network=host"
    if config.train.patience is not None or config.optimizer.schedule == "plateau":
        yield (
            "train.patience, optimizer.schedule=plateau: evaluations of a World are the program's, "
            "which decides itself when to stop; needs null, and another schedule"
        )
    if config.optimizer.schedule == "linear" and config.train.steps is None:
        yield "optimizer.schedule = 'linear': needs train.steps, the length of the run"
