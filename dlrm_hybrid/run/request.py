"""What a verb is asked to do."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dlrm_hybrid.config.schema import Config


@dataclass(slots=True)
class Arguments:
    """The arguments after the verb.

    Attributes:
        overrides: `key=value` and the like, as they were typed.
        faults: one line for each argument that means nothing.
        is_sweep: one run for each combination of values.
        wants_help: show what the verb reads.
        cfg: which part of the composed configuration to show instead of running.
        package: of that only what is below this key.
        resolve: show values instead of interpolations.
    """

    overrides: list[str] = field(default_factory=list[str])
    faults: list[str] = field(default_factory=list[str])
    is_sweep: bool = False
    wants_help: bool = False
    cfg: str | None = None
    package: str | None = None
    resolve: bool = False


@dataclass(frozen=True, slots=True)
class Request:
    """One job of the command line.

    Attributes:
        config: typed and validated.
        values: the same as plain values, for `config.json`.
        folder: the run folder; of verbs without one the working folder.
        overrides: as they stood on the command line.
    """

    config: Config
    values: Mapping[str, Any]
    folder: Path
    overrides: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainTask:
    """What a rank of a run is started with.

    Attributes:
        run_folder: holds config.json.
        prepared: the folder of shards.
        resume_from: a run folder or checkpoint to resume from, or None.
        rank: its number.
        attempt: how often the run has been started before.
        rendezvous: a folder of this attempt where ranks meet.
        incarnation: how often the rank has been started before in this attempt.
    """

    run_folder: str
    prepared: str
    resume_from: str | None
    rank: int
    attempt: int
    rendezvous: str
    incarnation: int = 0

    @property
    def goes_on(self) -> bool:
        """Whether the run itself has saved what it resumes from."""
        return self.resume_from == self.run_folder


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluateTask:
    """What the rank that evaluates is started with.

    Attributes:
        checkpoint: the folder of one checkpoint.
        prepared: the folder of shards.
        rows: their checksums.
        values: the configuration to score it with.
    """

    checkpoint: str
    prepared: str
    rows: Sequence[str]
    values: Mapping[str, Any]
