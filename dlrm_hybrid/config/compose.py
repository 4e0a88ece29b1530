"""From YAML files and overrides to plain values: the only place that composes by Hydra.

Hydra composes and does nothing else here: its launchers, sweepers, callbacks and logging are never
made. It stops at the first fault, so faulty overrides are found one by one and all are listed.
"""

from __future__ import annotations

import copy
import datetime
import functools
import itertools
import math
import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from decimal import Decimal
from pathlib import Path
from typing import Any, cast

import hydra
from hydra.core.override_parser.types import OverrideType
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from dlrm_hybrid.config.experiments import OwnExperiments, drop_unfit
from dlrm_hybrid.config.identity import CONFIG_FILE, flat, is_below
from dlrm_hybrid.config.keys import (
    CONF,
    EXPERIMENT,
    ROOT,
    all_groups,
    head_of,
    readers_of,
    with_whole_numbers,
)
from dlrm_hybrid.config.model import (
    with_input_width,
    with_table_dims,
    with_world_size,
    without_unread,
)
from dlrm_hybrid.config.options import composing
from dlrm_hybrid.config.outside import GROUPS, load_typed, unloaded
from dlrm_hybrid.config.overrides import (
    ALLOWED,
    MOST_JOBS,
    UNCHECKED,
    Points,
    override_fault,
    parsed,
    points_of,
    read_override,
    with_density,
)
from dlrm_hybrid.config.paths import resumed
from dlrm_hybrid.config.validate import all_faults, faults_text, own_values, sound
from dlrm_hybrid.disk import RUN_FOLDER_KEY, SWEEP_FOLDER_KEY, read_object
from dlrm_hybrid.types import ConfigError

COMPOSE_ERRORS = (HydraException, OmegaConfBaseException, *UNCHECKED)
SWEEP = "sweep"
OF_SWEEPS = (SWEEP, SWEEP_FOLDER_KEY)
RESUME = "checkpoint.resume"
GOING_ON = {RESUME: "auto", "skip_completed": True}  # mean nothing in a new folder
# Of the section `hydra`: what composing itself writes there, and no override can change.
WRITTEN = ("hydra.overrides", "hydra.runtime", "hydra.job.override_dirname")


@dataclass(frozen=True, slots=True)
class _Tree:
    """A composed configuration: `config` is all of it, `values` without Hydra's part, resolved.

    `dropped` has a line for each value of an experiment that does not fit what was typed.
    """

    config: DictConfig
    values: dict[str, Any]
    dropped: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Job:
    """One configuration to run.

    Attributes:
        overrides: those that configure the program, as they were typed.
        dropped: a line for each value of an experiment that does not fit what was typed.
    """

    values: Mapping[str, Any]
    folder: Path
    overrides: tuple[str, ...]
    dropped: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Sweep:
    """Several configurations, none of them composed yet.

    Attributes:
        folder: the folder above those of all jobs.
        keys: keys that differ between jobs.
        submit: who is to run them, null for this machine.
    """

    points: tuple[tuple[str, ...], ...]
    folder: Path
    keys: tuple[str, ...]
    jobs: int
    submit: str | None
    sbatch: Sequence[str]

    def job(self, number: int) -> Job:
        """Compose one of the jobs; whether its values go together is left to `validate`."""
        with composing():
            tree = _compose(self.points[number])
            values, _ = _settled(tree.values)
        overrides = _own(self.points[number])
        return Job(values, self.folder / str(number), overrides, tree.dropped)


@dataclass(frozen=True, slots=True)
class Choice:
    """The outcome of a command line with faults, for its help.

    Attributes:
        values: values of all keys that could be set, defaults elsewhere.
        ignored: a line for each override that could not be applied.
        faults: a line for each value that is wrong, alone or with others.
    """

    values: Mapping[str, Any]
    ignored: tuple[str, ...]
    faults: tuple[str, ...]


def values_of(overrides: Sequence[str]) -> dict[str, Any]:
    """The resolved configuration for `overrides`, as plain values.

    Raises:
        ConfigError: every override that cannot be composed, and every fault of the others' values.
    """
    return _composed(with_density(overrides), ()).values


def choice_of(
    overrides: Sequence[str], *, is_sweep: bool = False, has_model: bool = True
) -> Choice:
    """As much of a configuration as `overrides` give, whatever their faults are.

    Args:
        is_sweep: whether a key may have several values; the first one counts.
        has_model: whether the command makes a model, which must fit the rows.
    """
    overrides = with_density(overrides)
    load_typed(overrides)
    conf = OwnExperiments.of(overrides)
    wrong = _wrong(overrides, conf, is_sweep)
    lost = conf.faults_of([text for text in overrides if text not in wrong])
    if lost:  # without the folder nobody knows what its experiments are
        overrides = [text for text in overrides if not _is_of(text, CONF, EXPERIMENT)]
        conf = OwnExperiments()
    if is_sweep:
        wrong = _wrong(overrides, conf, True)
        overrides = [
            text if text in wrong else points_of(text, conf.names).overrides[0]
            for text in overrides
        ]
    tree, wrong, faults = _tried(overrides, _wrong(overrides, conf), conf, has_model, None)
    with composing():
        values = sound(tree.values, lambda: _without_values(overrides, wrong))
    return Choice(values, (*lost, *wrong.values()), tuple(faults))


def job_of(
    overrides: Sequence[str],
    faults: Sequence[str] = (),
    *,
    has_model: bool = True,
    trains: bool = True,
) -> Job:
    """Compose and validate one configuration.

    With `checkpoint.resume=auto` and a run in its folder it is that run's configuration, but for
    what the overrides set.

    Args:
        faults: of the command line, to be listed with all others.
        has_model: whether the command makes a model, which must fit the rows.
        trains: whether the command has a run folder.

    Raises:
        ConfigError: with all faults.
        DataError: the configuration in the run folder is damaged.
    """
    overrides = with_density(overrides)
    if trains:
        of_sweeps = [text for text in overrides if _is_of(text, *OF_SWEEPS)]
        faults = [*faults, *(f"{text}: only applies to a sweep; add -m" for text in of_sweeps)]
    tree = _composed(overrides, faults, has_model, RUN_FOLDER_KEY if trains else None)
    return Job(tree.values, _folder(tree, RUN_FOLDER_KEY), _own(overrides), tree.dropped)


def sweep_of(overrides: Sequence[str], faults: Sequence[str] = ()) -> Sweep:
    """List the jobs of a sweep; see `job_of`.

    Each value of each swept key is tried once, the other keys at their first value.

    Raises:
        ConfigError: with all faults of all values.
    """
    _register_resolvers()
    overrides = with_density(overrides)
    load_typed(overrides)
    conf = OwnExperiments.of(overrides)
    wrong = _wrong(overrides, conf, True)
    typed = [points_of(text, conf.names) for text in overrides if text not in wrong]
    conf.check([text for point in typed for text in point.overrides], [*faults, *wrong.values()])
    with composing():
        tree, more = _sift([text for x in typed if not x.is_swept for text in x.overrides])
    lines = [*faults, *wrong.values(), *more.values()]
    params, bad = _params(tree)
    swept = [] if bad else [points_of(text) for text in params]
    # What is typed replaces what conf/ sweeps.
    points = list({point.key.lstrip("+"): point for point in (*swept, *typed)}.values())
    size = math.prod(len(point.overrides) for point in points)
    if size > MOST_JOBS:
        lines.append(f"-m: {size:,} jobs; a sweep has at most {MOST_JOBS:,}")
    options: list[Mapping[str, Any]] = []
    for point in _each_value_once(points) if size <= MOST_JOBS else ():
        try:
            options.append(_composed(point, (), folder_key=SWEEP_FOLDER_KEY).values[SWEEP])
        except ConfigError as error:
            lines += map(str.strip, str(error).splitlines()[1:])
    lines += _sweep_faults(options)
    if lines:
        raise ConfigError(faults_text(lines))
    keys = tuple(point.key.lstrip("+") for point in points if point.is_swept or point in swept)
    jobs = tuple(itertools.product(*(point.overrides for point in points)))
    return Sweep(jobs, _folder(tree, SWEEP_FOLDER_KEY), keys, **options[0])


def given_keys(overrides: Sequence[str]) -> list[str]:
    """Keys and sections to which these overrides, and the files of experiments, give a value."""
    pairs = [read_override(text) for text in overrides if head_of(text) != EXPERIMENT]
    # A path lets a choice be imported, and has no say on its settings.
    keys = [f"{key}.name" if key in GROUPS and ":" in str(x) else key for key, x in pairs]
    return keys + OwnExperiments.of(overrides).keys_set(overrides)


def shown(overrides: Sequence[str], which: str, package: str | None, resolve: bool) -> str:
    """The composed configuration as YAML.

    Args:
        overrides: without faults.
        which: `job`, `hydra` or `all` sections.
        package: show only what is below this key.
        resolve: replace interpolations by their values.

    Raises:
        ConfigError: there is no such key, or something cannot be resolved.
    """
    overrides = with_density(overrides)
    with composing():
        config = _by_hydra(overrides)
        drop_unfit(config, overrides)
    is_all = which == "all"
    names = [str(key) for key in config if is_all or (key == "hydra") == (which == "hydra")]
    try:
        part: Any = OmegaConf.masked_copy(config, names)
        if package not in (None, "_global_"):
            part = OmegaConf.select(part, package)
        if part is None:
            raise ConfigError(faults_text([f"--package {package}: no such section"]))
        if not OmegaConf.is_config(part):
            return f"{part}\n"
        return OmegaConf.to_yaml(part, resolve=resolve)
    except COMPOSE_ERRORS as error:
        raise ConfigError(faults_text([f"--cfg {which}: {_first_line(error)}"])) from error


def _composed(
    overrides: Sequence[str],
    faults: Sequence[str],
    has_model: bool = True,
    folder_key: str | None = None,
) -> _Tree:
    """Compose overrides.

    Raises:
        ConfigError: with all faults, `faults` too.
        DataError: as `job_of`.
    """
    load_typed(overrides)
    conf = OwnExperiments.of(overrides)
    wrong = _wrong(overrides, conf)
    conf.check([text for text in overrides if text not in wrong], [*faults, *wrong.values()])
    tree, wrong, more = _tried(overrides, wrong, conf, has_model, folder_key)
    if every_fault := [*faults, *wrong.values(), *more]:
        raise ConfigError(faults_text(every_fault))
    return tree


def _wrong(
    overrides: Sequence[str], conf: OwnExperiments, is_sweep: bool = False
) -> dict[str, str]:
    """A message for each override that is wrong by itself."""
    faults = {text: override_fault(text, is_sweep, conf.names) for text in overrides}
    return {text: fault for text, fault in faults.items() if fault}


def _tried(
    overrides: Sequence[str],
    wrong: Mapping[str, str],
    conf: OwnExperiments,
    has_model: bool,
    folder_key: str | None,
) -> tuple[_Tree, Mapping[str, str], list[str]]:
    """Compose overrides but those wrong by themselves; files of experiments have no faults.

    Returns:
        what they lead to, a message for each that could not be applied, and faults of the rest.
    """
    _register_resolvers()
    good = [text for text in overrides if text not in wrong]
    with composing():
        # Nobody runs a configuration with faults: the defaults, composed once, serve for the rest.
        tree, more = _sift(good) if good or not wrong else (_defaults(), {})
        wrong = {**wrong, **more}
        applied = [text for text in good if text not in wrong]
        values, faults = _going_on(tree, applied, folder_key)
        values, unsettled = _settled(values, has_model)
        faults += [*unsettled, *_params(tree)[1]]
        keys = [head_of(text) for text in wrong]
        bad = all_faults(values, lambda: _without_values(overrides, wrong), keys)
        faults += (conf.located(fault, good) for fault in bad)
    return replace(tree, values=values), wrong, faults


def _going_on(
    tree: _Tree, overrides: Sequence[str], folder_key: str | None
) -> tuple[dict[str, Any], list[str]]:
    """The values of a run that goes on, and why it cannot; for other runs the composed values."""
    values = flat(tree.values)
    asked = [key for key, value in GOING_ON.items() if values.get(key) == value]
    if folder_key is None or not asked:
        return tree.values, []
    if not any(_is_of(text, folder_key) for text in overrides):
        needs = f"needs {folder_key}=FOLDER, the one to go on in; by default it is a new one"
        return tree.values, [f"{key} = {str(values[key]).lower()}: {needs}" for key in asked]
    folder = _folder(tree, folder_key)
    if folder_key != RUN_FOLDER_KEY or RESUME not in asked or not (folder / CONFIG_FILE).exists():
        return tree.values, []
    saved = own_values(folder / CONFIG_FILE, read_object(folder, CONFIG_FILE))
    before, keys = flat(saved), given_keys(overrides)
    for name in [f"{group}.name" for group in GROUPS]:  # another choice has other settings
        if name in keys and values[name] != before.get(name):
            keys.append(name.partition(".")[0])
    values, faults = resumed(saved, tree.values, keys)
    chosen = {group: str(values[group]["name"]) for group in GROUPS}
    lacking = {group: fault for group, name in chosen.items() if (fault := unloaded(group, name))}
    return values, [*faults, *(f"{x} = {chosen[x]!r}: {why}" for x, why in lacking.items())]


def _settled(values: dict[str, Any], has_model: bool = True) -> tuple[dict[str, Any], list[str]]:
    """The values, with nulls that follow from other values filled in; and faults of such keys."""
    values, unread = without_unread(with_world_size(with_whole_numbers(values)))
    values, width = with_input_width(values, has_model)
    values, dims = with_table_dims(values) if has_model else (values, [])
    return values, [*unread, *width, *dims]


def _without_values(overrides: Sequence[str], wrong: Collection[str]) -> dict[str, Any]:
    """The values by the overrides that choose from groups, without those that set values."""
    groups = (CONF, *all_groups())
    chosen = [text for text in overrides if text not in wrong and head_of(text) in groups]
    return _settled((_compose(chosen) if chosen else _defaults()).values)[0]


def _register_resolvers() -> None:
    stamp = datetime.datetime.now().strftime("%Y%m%d-%H%M%S")
    run_id = f"{stamp}-{os.urandom(3).hex()}"
    # Cached, so that one run has one name however often it is resolved.
    OmegaConf.register_new_resolver("run_id", lambda: run_id, use_cache=True, replace=True)
    OmegaConf.register_new_resolver("rest", _rest, replace=True)


def _rest(sparsity: float) -> float:
    return float(1 - Decimal(str(sparsity)))


def _compose(overrides: Sequence[str]) -> _Tree:
    """The values and Hydra's own settings; only `ALLOWED` of those may be set by overrides."""
    config = _quickly(overrides)
    config = _by_hydra(overrides) if config is None else config
    dropped = drop_unfit(config, overrides)
    job = ((str(key), config[key]) for key in config if key != "hydra")
    values = {key: _plain(value) for key, value in job}
    return _Tree(config, values, tuple(dropped))


def _plain(value: Any) -> Any:
    return OmegaConf.to_container(value, resolve=True) if OmegaConf.is_config(value) else value


def _quickly(overrides: Sequence[str]) -> DictConfig | None:
    """As `_by_hydra`, by setting values in choices composed before; None if that cannot be.

    Hydra, too, sets values when all choices are composed. Its notes of them, in its own section,
    are missing here.
    """
    chosen: list[str] = []
    values: list[tuple[str, Any]] = []
    # The defaults of a choice from outside the package may change.
    for text in overrides:
        override = parsed(text)
        key = override.key_or_group
        value: Any = override.value()
        if "${" in text or key == CONF or (key in GROUPS and ":" in str(value)):
            return None
        if is_below(key, ("hydra",)) and key not in ALLOWED:
            return None
        if key in all_groups() and not isinstance(value, Mapping):
            chosen.append(text)
        elif override.type == OverrideType.CHANGE:
            values.append((key, cast("Any", value)))
        else:
            return None
    config = copy.deepcopy(_chosen(tuple(chosen)))
    try:
        for key, value in values:
            OmegaConf.update(config, key, value)
    except OmegaConfBaseException:
        return None
    return config


@functools.lru_cache(maxsize=64)
def _chosen(overrides: tuple[str, ...]) -> DictConfig:
    return _by_hydra(overrides)


def _by_hydra(overrides: Sequence[str]) -> DictConfig:
    OwnExperiments.of(overrides).store(overrides)
    config = hydra.compose(ROOT, overrides=list(overrides), return_hydra_config=True)
    if overrides and (changed := _changed(_settings(config), _own_settings())):
        raise HydraException(f"Hydra's own settings cannot be changed ({', '.join(changed)})")
    return config


@functools.cache
def _defaults() -> _Tree:
    return _compose(())


@functools.cache
def _own_settings() -> Mapping[str, Any]:
    return _settings(_chosen(()))


def _settings(config: DictConfig) -> dict[str, Any]:
    """Hydra's section by dotted key, without what composing writes there and what may be set."""
    settings = OmegaConf.to_container(OmegaConf.masked_copy(config, ["hydra"]), resolve=False)
    found = flat(cast("dict[Any, Any]", settings))
    return {key: value for key, value in found.items() if not key.startswith((*ALLOWED, *WRITTEN))}


def _changed(settings: Mapping[str, Any], expected: Mapping[str, Any]) -> list[str]:
    keys = dict.fromkeys((*settings, *expected))
    changed = [key for key in keys if (key, settings.get(key)) not in expected.items()]
    changed += [key for key in expected if key not in settings]
    return list(dict.fromkeys(".".join(key.split(".")[:2]) for key in changed))


def _sift(overrides: Sequence[str]) -> tuple[_Tree, dict[str, str]]:
    """Compose what can be; and a message for each override that cannot join those before it."""
    try:
        return _compose(overrides), {}
    except COMPOSE_ERRORS:
        pass  # the loop below finds out by which of them
    accepted: list[str] = []
    wrong: dict[str, str] = {}
    # Choices come first: a value that belongs to another choice does not make this one wrong.
    for override in sorted(overrides, key=lambda text: head_of(text) not in all_groups()):
        try:
            _compose([*accepted, override])
            accepted.append(override)
        except COMPOSE_ERRORS as error:
            readers = readers_of(head_of(override))
            reason = f"only applies to {readers}" if readers else _first_line(error)
            if reason.startswith("Multiple values"):
                reason = f"another one is typed too; +{EXPERIMENT}=[A,B] applies both, B last"
            wrong[override] = f"{override}: {reason}"
    wrong = {override: wrong[override] for override in overrides if override in wrong}
    return _compose(accepted), wrong


def _first_line(error: Exception) -> str:
    if isinstance(error, UNCHECKED):
        return "cannot be composed"
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0] if lines else type(error).__name__


def _params(tree: _Tree) -> tuple[list[str], list[str]]:
    """The sweep in conf/ or `hydra.sweeper.params`, as overrides, and its faults."""
    sweeper: Any = OmegaConf.to_container(tree.config.hydra.sweeper, resolve=False)
    swept = sweeper["params"]
    if swept is None:
        return [], []
    if not isinstance(swept, dict):
        return [], [f"hydra.sweeper.params = {swept}: must be null or {{key: values, …}}"]
    params = cast("dict[Any, Any]", swept)
    texts = [f"{key}={value}" for key, value in params.items()]
    faults = [fault for text in texts if (fault := override_fault(text, is_sweep=True))]
    return texts, [f"hydra.sweeper.params: {fault}" for fault in faults]


def _each_value_once(points: Sequence[Points]) -> Iterator[list[str]]:
    """The sweep with every swept key at its first value, then each other value once."""
    first = [point.overrides[0] for point in points]
    yield first
    for position, point in enumerate(points):
        for override in point.overrides[1:]:
            yield [*first[:position], override, *first[position + 1 :]]


def _sweep_faults(options: Sequence[Mapping[str, Any]]) -> list[str]:
    """Faults of the section `sweep` where jobs differ in it: it is one for all of them."""
    return [
        f"{SWEEP}.{key} = {job[key]}: is of the whole sweep; another job has {options[0][key]}"
        for job in options
        for key in job
        if job[key] != options[0][key]
    ]


def _own(overrides: Sequence[str]) -> tuple[str, ...]:
    """Overrides that configure the run, not Hydra or a sweep."""
    return tuple(text for text in overrides if not _is_of(text, "hydra", SWEEP))


def _is_of(override: str, *sections: str) -> bool:
    return is_below(head_of(override), sections)


def _folder(tree: _Tree, key: str) -> Path:
    try:
        name = OmegaConf.select(tree.config, key)
    except COMPOSE_ERRORS as error:
        raise ConfigError(faults_text([f"{key}: {_first_line(error)}"])) from error
    if not isinstance(name, str) or not name:
        raise ConfigError(faults_text([f"{key} = {name}: must be a path"]))
    return Path(os.path.abspath(name))  # noqa: PTH100 - without following links
