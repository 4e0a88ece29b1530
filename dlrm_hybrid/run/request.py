"""Requests: the arguments of a verb, and the tasks of a run's processes."""

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
        overrides: `key=value` and the like, as typed.
        faults: one line for each invalid argument.
        is_sweep: whether to make one run for each combination of values.
        wants_help: whether to show the verb's help.
        cfg: part of the composed configuration to show instead of running.
        package: key below which to show it.
        resolve: whether to show values instead of interpolations.
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
        config: the configuration, typed and validated.
        values: the same as plain values, for `config.json`.
        folder: the run folder; the working folder for verbs without one.
        overrides: overrides of the command line.
        again: overrides of the command that goes on with it once it was stopped; empty if they
            are its own, in its folder.
    """

    config: Config
    values: Mapping[str, Any]
    folder: Path
    overrides: tuple[str, ...]
    again: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainTask:
    """The task of a rank of a run.

    Attributes:
        run_folder: the run folder, with config.json.
        prepared: the folder of shards; empty if a program hands batches over.
        resume_from: a run folder or checkpoint to resume from, or None.
        rank: number of the rank.
        attempt: how often the run has been started before.
        rendezvous: folder in which the ranks of this attempt meet.
        incarnation: how often the rank was started before in this attempt.
    """

    run_folder: str
    prepared: str = ""
    resume_from: str | None = None
    rank: int = 0
    attempt: int = 0
    rendezvous: str = ""
    incarnation: int = 0

    @property
    def goes_on(self) -> bool:
        """Whether the run resumes from a checkpoint of its own."""
        return self.resume_from == self.run_folder


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluateTask:
    """The task of the rank that evaluates.

    Attributes:
        checkpoint: the folder of one checkpoint.
        prepared: the folder of shards.
        rows: checksums of the rows.
        values: the configuration to score it with.
    """

    checkpoint: str
    prepared: str
    rows: Sequence[str]
    values: Mapping[str, Any]
