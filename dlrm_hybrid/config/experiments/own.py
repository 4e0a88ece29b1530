"""The folder of a user's own experiments: `conf=FOLDER` with `experiment/NAME.yaml` in it.

Hydra never reads the folder: it gets the values that `reading` has read and checked.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

from hydra.errors import HydraException

from dlrm_hybrid.config.experiments.reading import DEFAULTS, NAME, SELF, Experiment, read
from dlrm_hybrid.config.identity import flat, is_below
from dlrm_hybrid.config.keys import CONF, EXPERIMENT, all_groups, default_choices
from dlrm_hybrid.config.options import option, store_option
from dlrm_hybrid.config.overrides import UNCHECKED, read_override
from dlrm_hybrid.config.validate import faults_text
from dlrm_hybrid.types import ConfigError

_FILE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]*")


@dataclass(frozen=True, slots=True)
class OwnExperiments:
    """The experiments in the folder that a command line names; none without such a folder.

    Attributes:
        files: the files of the experiments, by name.
        fault: why there are none, though there is a folder; else None.
    """

    files: Mapping[str, Path] = field(default_factory=dict[str, Path])
    fault: str | None = None

    @property
    def names(self) -> tuple[str, ...] | None:
        """Names of all experiments; None where there is a fault, so that nobody knows."""
        return tuple(self.files) if self.fault is None else None

    @classmethod
    def of(cls, overrides: Sequence[str]) -> OwnExperiments:
        """Look for the user's experiments; never raises."""
        folder: Any = None
        for text in overrides:
            if text.partition("=")[0] == CONF:
                with suppress(HydraException, *UNCHECKED):
                    folder = read_override(text)[1]
                if not isinstance(folder, str) and folder is not None:
                    return cls(fault=f"{text}: must be one folder, with {EXPERIMENT}/NAME.yaml")
        return cls() if folder is None else cls.in_folder(folder)

    @classmethod
    def in_folder(cls, folder: str) -> OwnExperiments:
        """Look for experiments in a folder, if it is one."""
        if not Path(folder).is_dir():
            return cls(fault=f"{CONF} = {folder}: must be a folder, with {EXPERIMENT}/NAME.yaml")
        # Editors and systems keep files of theirs beside others, with a dot before the name.
        files = sorted((Path(folder) / EXPERIMENT).glob("[!.]*.yaml"))
        for path in files:
            if not _FILE_NAME.fullmatch(path.stem):
                return cls(fault=f"{path}: its name must be letters, digits, _ and -")
            if not isinstance(read_override(f"_={path.stem}")[1], str):
                return cls(fault=f"{path}: its name reads as a value, not as text; rename it")
            if path.stem in all_groups()[EXPERIMENT]:
                return cls(fault=f"{path}: the program has an experiment of this name; rename it")
        if not files:
            return cls(fault=f"{CONF} = {folder}: has no {EXPERIMENT}/*.yaml")
        return cls({path.stem: path for path in files})

    def chosen(self, overrides: Sequence[str]) -> list[str]:
        """Experiments that overrides without faults choose, and those that they build upon."""
        return self._with_bases([name for name in _named(overrides) if name in self.files])

    def check(self, overrides: Sequence[str], more: Sequence[str]) -> None:
        """Refuse a folder, or a file of the experiments that these overrides choose.

        Raises:
            ConfigError: there is a fault of the folder, or of a file with its line.
        """
        if faults := self.faults_of(overrides):
            raise ConfigError(faults_text([*more, *faults]))

    def faults_of(self, overrides: Sequence[str]) -> list[str]:
        """Faults of the folder and of the files that these overrides, without faults, choose."""
        faults = [] if self.fault is None else [self.fault]
        for name in self.chosen(overrides):
            try:
                faults += self._base_faults(name)
            except ConfigError as error:
                faults += str(error).splitlines()
        return faults

    def store(self, overrides: Sequence[str]) -> None:
        """Let Hydra find the experiments that overrides choose, whose files have no faults."""
        for name in self.chosen(overrides):
            store_option(name, {NAME: name, **self._read(name).values}, EXPERIMENT)

    def located(self, fault: str, overrides: Sequence[str]) -> str:
        """A fault of a value, with the file and line that sets it, if an experiment does."""
        typed = tuple(text.lstrip("+").partition("=")[0] for text in overrides)
        for name in self.chosen(overrides):
            for key, line in self._read(name).lines.items():
                if re.match(rf"{re.escape(key)}(?![\w.])", fault) and not is_below(key, typed):
                    return f"{line}: {fault}"
        return fault

    def keys_of(self, name: Any) -> list[str]:
        """Keys and groups to which an experiment, the user's or the program's, gives a value."""
        values = self._values(name)
        keys: list[str] = []
        for choice in values.pop(DEFAULTS, ()):
            if not isinstance(choice, str):
                keys += (key.rpartition("/")[2] for key in choice)
            elif choice != SELF:
                keys += self.keys_of(choice)
        return keys + [key for key in flat(values) if key != NAME and not key.startswith("hydra.")]

    def choices_of(self, overrides: Sequence[str]) -> dict[str, str]:
        """The choices of the experiments among overrides without faults, by group."""
        choices = dict(default_choices())
        for name in _named(overrides):
            choices |= self._choices(name)
        return choices

    def _choices(self, name: str) -> dict[str, str]:
        choices: dict[str, str] = {}
        for choice in self._values(name).get(DEFAULTS, ()):
            if isinstance(choice, dict):
                pairs = cast("dict[str, str]", choice).items()
                choices |= {key.rpartition("/")[2]: name for key, name in pairs}
            elif choice != SELF:
                choices |= self._choices(choice)
        return choices

    def _values(self, name: str) -> dict[str, Any]:
        is_own = name in self.files
        return dict(self._read(name).values) if is_own else option(EXPERIMENT, name)

    def _read(self, name: str) -> Experiment:
        others = [other for other in self.files if other != name]
        return read(self.files[name], (*all_groups()[EXPERIMENT], *others))

    def _base_faults(self, name: str) -> list[str]:
        """Faults of a file's bases: experiments that build upon itself."""
        lines = self._read(name).bases
        return [
            f"{line}: {base}: builds upon {name}, which builds upon it"
            for base, line in lines.items()
            if base in self.files and name in self._with_bases([base])
        ]

    def _with_bases(self, names: Sequence[str]) -> list[str]:
        result: list[str] = []
        waiting = [*names]
        while waiting:
            name = waiting.pop(0)
            if name in result:
                continue
            result.append(name)
            with suppress(ConfigError):
                bases = self._read(name).values[DEFAULTS]
                waiting += (base for base in bases if isinstance(base, str) and base in self.files)
        return result


def _named(overrides: Sequence[str]) -> list[str]:
    names: list[str] = []
    for text in overrides:
        if text.startswith(f"+{EXPERIMENT}="):
            value = read_override(text)[1]
            names += cast("list[str]", value) if isinstance(value, list) else [value]
    return names
