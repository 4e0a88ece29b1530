"""Scoring a checkpoint on the rows it was trained on, or on others.

A checkpoint may be of unknown origin: its configuration never decides where anything is written.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, cast, final

from dlrm_hybrid.checkpoint.folder import find_best, read_facts
from dlrm_hybrid.checkpoint.manifest import MANIFEST_FILE
from dlrm_hybrid.config import compose
from dlrm_hybrid.config.identity import evaluated, with_value
from dlrm_hybrid.config.overrides import override_text
from dlrm_hybrid.config.schema import Config
from dlrm_hybrid.config.validate import faults_text, own_values, validate
from dlrm_hybrid.data.manifest import MANIFEST_FILE as ROWS_FILE
from dlrm_hybrid.data.manifest import read as read_rows
from dlrm_hybrid.data.shards import Shards, open_shards
from dlrm_hybrid.run.assembly import build
from dlrm_hybrid.run.compiling import compile_for
from dlrm_hybrid.run.display import Display
from dlrm_hybrid.run.rank.process import Rank
from dlrm_hybrid.run.request import EvaluateTask, Request
from dlrm_hybrid.run.rows import Command, prepared_rows
from dlrm_hybrid.run.supervisor import run_ranks
from dlrm_hybrid.telemetry.events import Event, Kind
from dlrm_hybrid.types import ConfigError, DataError, ExitCode, RunFailedError

EVALUATE_RANK = "dlrm_hybrid.run.rank.evaluate:evaluate_rank"
# The other keys of `data` say which rows they are.
WHERE_AND_HOW = ("data.prepared", "data.test_part", "data.processes", "data.block_bytes")


@final
@dataclass(frozen=True, slots=True)
class Evaluation:
    """A checkpoint and the rows to score it on, checked against each other.

    Attributes:
        checkpoint: its folder.
        facts: what it says.
        values: its configuration with what the command line says of rows and evaluation.
        config: the same, typed.
        rows: the folder of prepared rows.
        shards: these.
    """

    checkpoint: Path
    facts: Mapping[str, Any]
    values: Mapping[str, Any]
    config: Config
    rows: Path
    shards: Shards

    @property
    def trained_on(self) -> bool:
        """Whether the checkpoint was trained on these rows."""
        return self.facts["rows"] == self.shards.manifest.identity


def prepare_evaluation(
    request: Request, path: Path, display: Display, verb: str = "evaluate"
) -> Evaluation:
    """Find a checkpoint and its rows, which are prepared where they are missing.

    Args:
        request: what the command line says of rows and evaluation.
        path: a checkpoint, or a run folder: its best one, or its latest.
        display: for progress.
        verb: that was typed.

    Raises:
        ConfigError: the command line asks for what the checkpoint cannot do.
        DataError: checkpoint or rows are missing or damaged, or do not fit together.
    """
    checkpoint = find_best(path)
    facts = read_facts(checkpoint)
    saved = _checked(checkpoint, facts["config"])
    given = compose.given_keys(request.overrides)
    values, faults = evaluated(saved, request.values, given)
    if faults:
        raise ConfigError(faults_text(faults))
    config = validate(values)
    compile_for(config, display)
    command = Command(verb, request.overrides)
    rows = _rows(config, checkpoint, given, display, command)
    # What the command line does not set is as the rows have it.
    kept = {
        key: value
        for key, value in read_rows(rows).semantics.options.items()
        if not ({"data", f"data.{key}"} & set(given))
    }
    if "schema" in values["data"] and "data.schema" not in given:
        kept["schema"] = None  # that of the rows
    values = {**values, "data": {**values["data"], **kept}}
    config = validate(values)
    shards = open_shards(rows, build.semantics(config))
    evaluation = Evaluation(checkpoint, facts, values, config, rows, shards)
    if not evaluation.trained_on:
        if not ("data.prepared" in given or _describes_rows(given)):
            asked = shlex.quote(override_text("data.prepared", str(rows)))
            raise DataError(
                f"{rows}: not the rows that {checkpoint} was trained on; {asked} "
                "scores it on them if their vocabulary is the same"
            )
        check_vocabulary(checkpoint, facts, shards)
    return evaluation


def _describes_rows(given: Sequence[str]) -> bool:
    return any(key.partition(".")[0] == "data" and key not in WHERE_AND_HOW for key in given)


def saved_config(checkpoint: Path, facts: Mapping[str, Any]) -> Config:
    """The configuration in a checkpoint with these facts; raises DataError if it is none."""
    return validate(_checked(checkpoint, facts["config"]))


def _checked(checkpoint: Path, values: Mapping[str, Any]) -> Mapping[str, Any]:
    """The values of a configuration in a checkpoint; raises DataError if they are none.

    Where anything is written is not the checkpoint's to say.
    """
    return with_value(own_values(checkpoint / MANIFEST_FILE, values), "embedding.folder", None)


def _rows(
    config: Config, checkpoint: Path, given: Sequence[str], display: Display, command: Command
) -> Path:
    """The folder of prepared rows to score.

    Rows are made only in a folder that the command line names, or in the default one.

    Raises:
        DataError: there are none.
    """
    folder = build.prepared_folder(config)
    there = (folder / ROWS_FILE).is_file()
    described = _describes_rows(given)
    if "data.prepared" in given or "data" in given:
        return folder if there and not described else prepared_rows(config, display, command)
    synthetic = config.data.name == "synthetic"
    if there and not (synthetic and described):
        return folder
    if synthetic:
        named = replace(config, data=replace(config.data, prepared=None))
        return prepared_rows(named, display, command)
    raise DataError(
        f"{folder}: the rows that {checkpoint} was trained on are not here; set "
        "data.prepared=FOLDER to where they are"
    )


def check_vocabulary(checkpoint: Path, facts: Mapping[str, Any], shards: Shards) -> None:
    """Refuse rows whose ids or columns mean something else than those a checkpoint was trained on.

    Args:
        checkpoint: its folder.
        facts: what it says.
        shards: the rows.

    Raises:
        DataError: they do, or the checkpoint does not say.
    """
    known, found = facts.get("vocabulary"), shards.manifest.meaning
    reason = "the checkpoint does not say which vocabulary it was trained with"
    if isinstance(known, Mapping):
        theirs = cast("Mapping[str, Any]", known)
        # Checkpoints of earlier versions do not say how columns were read.
        differences = [
            f"{key} is {found.get(key)!r:.60}, the checkpoint's {theirs.get(key)!r:.60}"
            for key in {**shards.manifest.vocabulary, **theirs}
            if theirs.get(key) != found.get(key)
        ]
        if not differences:
            return
        reason = f"their vocabulary differs: {'; '.join(differences)}"
    raise DataError(f"{shards.folder}: not the rows that {checkpoint} was trained on, and {reason}")


def score(evaluation: Evaluation, report: Callable[[Event], None]) -> Event:
    """Score the checkpoint in a process of its own; returns the event with the scores.

    Args:
        evaluation: what to score.
        report: gets every event.

    Raises:
        RunFailedError: the process failed.
    """
    task = EvaluateTask(
        checkpoint=str(evaluation.checkpoint),
        prepared=str(evaluation.rows),
        rows=evaluation.shards.manifest.identity,
        values=evaluation.values,
    )
    found: list[Event] = []

    def note(event: Event) -> None:
        found.append(event)
        report(event)

    with TemporaryDirectory(prefix="dlrm_hybrid-") as logs:
        rank = Rank(
            index=0, name="worker-0", argument=json.dumps(asdict(task)), log_folder=Path(logs)
        )
        outcome = run_ranks([rank], EVALUATE_RANK, note)
    if outcome.exit_code != ExitCode.DONE:
        raise RunFailedError(outcome.message, outcome.exit_code)
    (event,) = (event for event in found if event.kind is Kind.EVALUATED)
    return event
