"""From YAML files and overrides to plain values: the only place that knows Hydra and OmegaConf.

Hydra stops at the first fault. So the overrides are composed here first; when that fails they are
tried one after the other and every fault is told. What passes goes to Hydra proper, which makes
the run folders and the jobs of a sweep.
"""

from __future__ import annotations

import datetime
import os
import sys
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import hydra
from hydra._internal.utils import get_args_parser
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Glob, Override
from hydra.errors import HydraException, OverrideParseException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from dlrm_hybrid.config.gradient_methods import unread_sections
from dlrm_hybrid.config.hydra_rules import flag_faults, override_fault
from dlrm_hybrid.config.validate import faults_text, flatten, unknown_key, validate
from dlrm_hybrid.types import ConfigError

Job = Callable[[Mapping[str, Any], Path, Sequence[str]], None]
# What Hydra does not check itself comes through as one of Python's own: a group's choice that is a
# number, an integer of thousands of digits, a package without a group.
UNCHECKED = (ValueError, TypeError, AssertionError)
COMPOSE_ERRORS = (HydraException, OmegaConfBaseException, *UNCHECKED)
ROOT = "config"
EXPERIMENT = "experiment"
NAME = "name"


def conf_folder() -> Path:
    """The folder of YAML files: inside an installed wheel, beside the package in a checkout."""
    package = Path(__file__).resolve().parent.parent
    installed = package / "conf"
    return installed if installed.is_dir() else package.parent / "conf"


def values_of(overrides: Sequence[str]) -> dict[str, Any]:
    """The resolved configuration for `overrides`, as plain values.

    Raises:
        ConfigError: every override that cannot be composed, and every fault of the others' values.
    """
    _register_resolvers()
    faults = [fault for fault in map(_half_choice, overrides) if fault]
    overrides = [override for override in overrides if not _half_choice(override)]
    with _composing():
        try:
            values = _compose(overrides)
        except COMPOSE_ERRORS:
            values, more = _sift(overrides)
            faults += more
    values, unread = _without_unread(values)
    faults += unread
    try:
        validate(values)
    except ConfigError as error:
        faults = [*faults, *(line.strip() for line in str(error).splitlines()[1:])]
    if faults:
        raise ConfigError(faults_text(faults))
    return values


def check(arguments: Sequence[str]) -> None:
    """Compose and validate everything that these command-line arguments would run.

    Of a sweep each value of each swept key is tried once, the other keys at their first value.

    Raises:
        ConfigError: with all faults of all values.
    """
    faults = _refused(arguments)
    parsed = get_args_parser().parse_args(list(arguments))
    given = [override for override in parsed.overrides if override_fault(override) is None]
    for overrides in _points(given) if parsed.multirun else [given]:
        try:
            values_of(overrides)
        except ConfigError as error:
            faults += [line.strip() for line in str(error).splitlines()[1:]]
    if faults:
        raise ConfigError(faults_text(faults))


def asks_only(arguments: Sequence[str]) -> bool:
    """Whether Hydra will answer by itself (help, info) instead of running a job."""
    parsed = get_args_parser().parse_args(list(arguments))
    return bool(parsed.help or parsed.hydra_help or parsed.info or parsed.shell_completion)


def is_sweep(arguments: Sequence[str]) -> bool:
    """Whether the flag for several jobs (-m) is among the arguments."""
    return bool(get_args_parser().parse_args(list(arguments)).multirun)


def swept_keys(arguments: Sequence[str]) -> list[str]:
    """The keys that these arguments give several values."""
    parsed = get_args_parser().parse_args(list(arguments))
    return [
        text.partition("=")[0].lstrip("+") for text in parsed.overrides if len(_choices(text)) != 1
    ]


def given_keys(overrides: Sequence[str]) -> list[str]:
    """Keys and sections that these overrides give a value; of an experiment those in its file."""
    keys: list[str] = []
    for text in overrides:
        key, _, choice = text.lstrip("+~").partition("=")
        key = key.partition("@")[0].replace("/", ".")
        keys += _keys_of_experiment(choice) if key == EXPERIMENT else [key]
    return keys


def _keys_of_experiment(choice: str) -> list[str]:
    path = conf_folder() / EXPERIMENT / f"{choice}.yaml"
    values = cast("dict[str, Any]", OmegaConf.to_container(OmegaConf.load(path)))
    groups = [key.rpartition("/")[2] for choice in values.pop("defaults", ()) for key in choice]
    return groups + [key for key in flatten(values) if key != NAME and not key.startswith("hydra.")]


def sweep_facts() -> tuple[Path, list[str]]:
    """Inside a job of a sweep: the folder above all jobs', and what conf/ itself sweeps."""
    settings = HydraConfig.get()
    folder = Path(settings.runtime.cwd) / settings.sweep.dir
    return folder, [str(key).lstrip("+") for key in settings.sweeper.params or ()]


def launch(job: Job) -> None:
    """Let Hydra read sys.argv, make the run folder(s) and call `job` for each configuration.

    `job` gets the plain values, its folder and its overrides.

    Raises:
        ConfigError: sys.argv holds what could run code, or what Hydra refuses.
    """
    if faults := _refused(sys.argv[1:]):
        raise ConfigError(faults_text(faults))
    _register_resolvers()

    def task(config: DictConfig) -> None:
        settings = HydraConfig.get()
        values, _ = _without_unread(_plain(config))
        job(values, Path(settings.runtime.output_dir), list(settings.overrides.task))

    # Otherwise Hydra tells what happens in its own way, and exits with 1.
    os.environ["HYDRA_FULL_ERROR"] = "1"
    try:
        hydra.main(config_path=str(conf_folder()), config_name=ROOT, version_base="1.3")(task)()
    except (HydraException, OmegaConfBaseException) as error:
        raise ConfigError(faults_text([str(error)])) from error


def _refused(arguments: Sequence[str]) -> list[str]:
    parsed = get_args_parser().parse_args(list(arguments))
    return flag_faults(parsed) + [x for one in parsed.overrides if (x := override_fault(one))]


def _register_resolvers() -> None:
    stamp = datetime.datetime.now().strftime("%Y%m%d-%H%M%S")
    run_id = f"{stamp}-{os.urandom(3).hex()}"
    # Cached, so that one run has one name however often it is resolved.
    OmegaConf.register_new_resolver("run_id", lambda: run_id, use_cache=True, replace=True)


@contextmanager
def _composing() -> Generator[None, None, None]:
    """Hydra ready to compose, also inside a job that it runs."""
    state = GlobalHydra.instance()
    running = state.hydra
    state.clear()
    try:
        with hydra.initialize_config_dir(config_dir=str(conf_folder()), version_base="1.3"):
            yield
    finally:
        GlobalHydra.instance().hydra = running


def _compose(overrides: Sequence[str]) -> dict[str, Any]:
    return _plain(hydra.compose(ROOT, overrides=list(overrides)))


def _plain(config: DictConfig) -> dict[str, Any]:
    return cast("dict[str, Any]", OmegaConf.to_container(config, resolve=True))


def _without_unread(values: dict[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Null for the sections of `gradient` that nobody reads, and the faults of those set there."""
    if not isinstance(values.get("gradient"), Mapping):
        return values, []
    given = cast("Mapping[str, Any]", values["gradient"])
    sections = OmegaConf.load(conf_folder() / "gradient" / "base" / "sections.yaml")
    gradient, faults = unread_sections(given, _plain(cast(DictConfig, sections)))
    return {**values, "gradient": gradient}, faults


def _half_choice(override: str) -> str | None:
    """What to write instead of an override that names a choice without bringing its keys."""
    key, _, choice = override.lstrip("+~").partition("=")
    group, _, leaf = key.rpartition(".")
    if leaf != "name" or not (group and (conf_folder() / group).is_dir()):
        return None
    return f"{override}: a name alone brings none of its keys; write {group}={choice}"


def _sift(overrides: Sequence[str]) -> tuple[dict[str, Any], list[str]]:
    """What can be composed, and one message for each override that cannot join those before it."""
    accepted: list[str] = []
    faults: list[str] = []
    for override in overrides:
        try:
            _compose([*accepted, override])
            accepted.append(override)
        except COMPOSE_ERRORS as error:
            faults.append(_message(override, error))
    return _compose(accepted), faults


def _message(override: str, error: Exception) -> str:
    if isinstance(error, OverrideParseException):
        return f"{override}: cannot be read as key=value"
    if isinstance(error, UNCHECKED):
        return f"{override}: is no choice of a group, nor a value of a key"
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if lines and lines[0].startswith("Could not override"):
        key = override.lstrip("+~").partition("=")[0]
        return unknown_key(key, list(flatten(_compose([]))))
    if "Available options in" in str(error):
        head = next(i for i, line in enumerate(lines) if line.startswith("Available options"))
        tail = next(i for i, line in enumerate(lines) if line.startswith("Config search path"))
        return f"{override}: no such choice; there are {', '.join(lines[head + 1 : tail])}"
    if lines and "Could not find" in lines[0]:
        return f"{override}: no such choice"
    return f"{override}: {lines[0] if lines else type(error).__name__}"


def _points(overrides: Sequence[str]) -> Iterator[list[str]]:
    """The sweep with every swept key at its first value, then each other value once."""
    choices = [values for override in overrides if (values := _choices(override))]
    first = [values[0] for values in choices]
    yield first
    for position, values in enumerate(choices):
        for value in values[1:]:
            yield [*first[:position], value, *first[position + 1 :]]


def _choices(text: str) -> list[str]:
    """The single overrides that a swept one stands for; none for a glob, which Hydra expands."""
    try:
        override: Override = OverridesParser.create().parse_override(text)
    except OverrideParseException:
        return [text]
    if not override.is_sweep_override():
        return [text]
    if isinstance(override.value(), Glob):
        return []
    head = text.partition("=")[0]
    return [f"{head}={value}" for value in override.sweep_string_iterator()]
