"""Scoring of a checkpoint on the rows that it was trained on, or on other rows.

A checkpoint may be of unknown origin: so its configuration never decides where files are written.
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
from dlrm_hybrid.config.choices import Table
from dlrm_hybrid.config.identity import evaluated, flat, with_value
from dlrm_hybrid.config.outside import unloaded
from dlrm_hybrid.config.overrides import override_text
from dlrm_hybrid.config.schema import Config
from dlrm_hybrid.config.validate import faults_text, own_values, validate
from dlrm_hybrid.data.manifest import MANIFEST_FILE as ROWS_FILE
from dlrm_hybrid.data.manifest import read as read_rows
from dlrm_hybrid.data.preprocessing import PREPROCESSING_FOLDER, Preprocessing, read_kept
from dlrm_hybrid.data.shards import Shards, open_shards
from dlrm_hybrid.model.row_storage import FOLDER_KEY
from dlrm_hybrid.run.assembly import build
from dlrm_hybrid.run.display import Display
from dlrm_hybrid.run.folder import base_of
from dlrm_hybrid.run.rank.process import Rank
from dlrm_hybrid.run.request import EvaluateTask, Request
from dlrm_hybrid.run.rows import Command, prepared_rows
from dlrm_hybrid.run.supervisor import run_ranks
from dlrm_hybrid.telemetry.events import Event, Kind
from dlrm_hybrid.types import ConfigError, DataError, ExitCode, RunFailedError

EVALUATE_RANK = "dlrm_hybrid.run.rank.evaluate:evaluate_rank"
# All other keys of `data` decide which rows they are.
WHERE_AND_HOW = ("data.prepared", "data.test_part", "data.processes", "data.block_bytes")


@final
@dataclass(frozen=True, slots=True)
class Source:
    """A checkpoint, and the command line's choice of rows to score it on.

    Attributes:
        checkpoint: its folder.
        facts: its manifest's values.
        values: its configuration, with the command line's keys of rows and evaluation.
        config: the same, typed.
        keys: keys and sections that the command line sets.
    """

    checkpoint: Path
    facts: Mapping[str, Any]
    values: Mapping[str, Any]
    config: Config
    keys: Sequence[str]

    @property
    def names_rows(self) -> bool:
        """Whether the command line chooses rows, perhaps others than the checkpoint's."""
        return "data.prepared" in self.keys or "data" in self.keys or _describes_rows(self.keys)


@final
@dataclass(frozen=True, slots=True)
class Evaluation:
    """A checkpoint and the rows to score it on, checked against each other.

    Attributes:
        source: the checkpoint, with the configuration of these rows.
        shards: the prepared rows.
    """

    source: Source
    shards: Shards

    @property
    def trained_on(self) -> bool:
        """Whether the checkpoint was trained on these rows."""
        return self.source.facts["rows"] == self.shards.manifest.identity


def open_source(request: Request, path: Path) -> Source:
    """Find a checkpoint to score, and check it against the command line.

    Args:
        request: the command line's keys of rows and evaluation.
        path: a checkpoint, or a run folder: its best one, or its latest.

    Raises:
        ConfigError: the command line asks for what the checkpoint cannot do.
        DataError: the checkpoint is missing or damaged.
    """
    checkpoint = find_best(path)
    facts = read_facts(checkpoint)
    saved = _checked(checkpoint, facts["config"])
    keys = compose.given_keys(request.overrides)
    values, faults = evaluated(saved, request.values, keys)
    if not faults and (fault := unloaded("model", str(saved["model"]["name"]))):
        faults = [f"model = {saved['model']['name']!r}: {fault}"]
    if faults:
        raise ConfigError(faults_text(faults))
    _require_columns(checkpoint, facts)
    config = validate(values)
    if isinstance(config.data, Table) and config.data.base is None and "data.prepared" not in keys:
        base = base_of(config, checkpoint)
        grows = base != str(checkpoint.absolute()) and flat(saved).get("data.grow", True)
        values = with_value(with_value(values, "data.base", base), "data.grow", grows)
        config = validate(values)
    return Source(checkpoint, facts, values, config, keys)


def trained_on_are_here(source: Source) -> bool:
    """Whether the rows that a checkpoint was trained on are still in place."""
    try:
        manifest = read_rows(build.prepared_folder(source.config))
    except DataError:
        return False
    return manifest.identity == source.facts["rows"]


def prepare_evaluation(source: Source, display: Display, command: Command) -> Evaluation:
    """Find the rows to score a checkpoint on; missing ones are prepared.

    Args:
        source: the checkpoint.
        display: for progress.
        command: the command as typed.

    Raises:
        DataError: the rows are missing or damaged, or do not fit the checkpoint.
    """
    checkpoint, keys, config = source.checkpoint, source.keys, source.config
    rows = _rows(config, checkpoint, keys, display, command)
    # Options not set on the command line are those of the rows.
    options = {
        key: value
        for key, value in read_rows(rows).semantics.options.items()
        if key in source.values["data"] and not ({"data", f"data.{key}"} & set(keys))
    }
    values = source.values
    if "schema" in values["data"] and "data.schema" not in keys:
        options["schema"] = None  # that of the rows
    values = {**values, "data": {**values["data"], **options, "prepared": str(rows)}}
    config = validate(values)
    shards = open_shards(rows, build.semantics(config))
    evaluation = Evaluation(replace(source, values=values, config=config), shards)
    if not evaluation.trained_on and not ("data.prepared" in keys or _describes_rows(keys)):
        override = shlex.quote(override_text("data.prepared", str(rows)))
        raise DataError(
            f"{rows}: not the rows that {checkpoint} was trained on; {override} "
            "scores it on them if their vocabulary is the same"
        )
    check_vocabulary(checkpoint, source.facts, shards.preprocessing)
    return evaluation


def saved_preprocessing(checkpoint: Path, facts: Mapping[str, Any]) -> Preprocessing:
    """The preprocessing of raw values that a checkpoint's model needs.

    Raises:
        DataError: the checkpoint has none, or it is damaged.
    """
    _require_columns(checkpoint, facts)
    if not (checkpoint / PREPROCESSING_FOLDER).exists():
        raise DataError(
            f"{checkpoint}: has no {PREPROCESSING_FOLDER} folder with schema, vocabularies and "
            "scales, as every checkpoint of a run has; copy it with the rest of its run"
        )
    preprocessing = read_kept(checkpoint)
    check_vocabulary(checkpoint, facts, preprocessing)
    return preprocessing


def _require_columns(checkpoint: Path, facts: Mapping[str, Any]) -> None:
    """Refuse a checkpoint of batches that a program has made; raises DataError."""
    if facts.get("vocabulary") == {}:
        raise DataError(
            f"{checkpoint}: was saved by a program that hands its own batches over (World.save), "
            "and only that program knows which columns these were made of, and how; score it there "
            "(World.load, then World.evaluate or World.predict)"
        )


def _describes_rows(keys: Sequence[str]) -> bool:
    return any(key.partition(".")[0] == "data" and key not in WHERE_AND_HOW for key in keys)


def saved_config(checkpoint: Path, facts: Mapping[str, Any]) -> Config:
    """The configuration in a checkpoint with these facts; raises DataError if invalid."""
    return validate(_checked(checkpoint, facts["config"]))


def _checked(checkpoint: Path, values: Mapping[str, Any]) -> Mapping[str, Any]:
    """Check the values of a checkpoint's configuration; raises DataError if invalid.

    A checkpoint must not decide where files are written.
    """
    checked = own_values(checkpoint / MANIFEST_FILE, values)
    return with_value(checked, FOLDER_KEY, None) if FOLDER_KEY in flat(checked) else checked


def _rows(
    config: Config, checkpoint: Path, keys: Sequence[str], display: Display, command: Command
) -> Path:
    """The folder of prepared rows to score.

    Rows are prepared only in a folder that the command line names, or in the default one.

    Raises:
        DataError: there are no rows.
    """
    folder = build.prepared_folder(config)
    there = (folder / ROWS_FILE).is_file()
    described = _describes_rows(keys)
    if "data.prepared" in keys or "data" in keys:
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


def check_vocabulary(
    checkpoint: Path, facts: Mapping[str, Any], preprocessing: Preprocessing
) -> None:
    """Refuse rows whose ids or columns have another meaning than a checkpoint's.

    Args:
        checkpoint: its folder.
        facts: its manifest's values.
        preprocessing: preprocessing of the rows.

    Raises:
        DataError: the meanings differ, or the checkpoint's is unknown.
    """
    theirs, ours = facts.get("vocabulary"), preprocessing.manifest.meaning
    reason = "the checkpoint does not say which vocabulary it was trained with"
    if isinstance(theirs, Mapping):
        meaning = cast("Mapping[str, Any]", theirs)
        differences = [
            f"{key} is {ours.get(key)!r:.60}, the checkpoint's {meaning.get(key)!r:.60}"
            for key in {**ours, **meaning}
            if meaning.get(key) != ours.get(key)
        ]
        if not differences:
            return
        reason = f"their vocabulary differs: {'; '.join(differences)}"
    raise DataError(
        f"{preprocessing.folder}: not the rows that {checkpoint} was trained on, and {reason}; "
        "needs rows of its vocabulary: data.prepared=FOLDER, or no key of data.* for its own"
    )


def score(evaluation: Evaluation, report: Callable[[Event], None]) -> Event:
    """Score the checkpoint in a separate process; returns the event with the scores.

    Args:
        evaluation: the checkpoint and the rows.
        report: called with every event.

    Raises:
        RunFailedError: the process failed.
    """
    task = EvaluateTask(
        checkpoint=str(evaluation.source.checkpoint),
        prepared=str(evaluation.shards.folder),
        rows=evaluation.shards.manifest.identity,
        values=evaluation.source.values,
    )
    events: list[Event] = []

    def note(event: Event) -> None:
        events.append(event)
        report(event)

    with TemporaryDirectory(prefix="dlrm_hybrid-") as logs:
        rank = Rank(
            index=0, name="worker-0", argument=json.dumps(asdict(task)), log_folder=Path(logs)
        )
        outcome = run_ranks([rank], EVALUATE_RANK, note)
    if outcome.exit_code != ExitCode.DONE:
        raise RunFailedError(outcome.message, outcome.exit_code)
    (event,) = (event for event in events if event.kind is Kind.EVALUATED)
    return event
