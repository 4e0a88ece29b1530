"""Exports the difference between two models of a run, for `Predictor.update`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from dlrm_hybrid.checkpoint.folder import find_best, read_facts
from dlrm_hybrid.checkpoint.manifest import version
from dlrm_hybrid.config.schema import Config
from dlrm_hybrid.config.validate import faults_text, unset_faults
from dlrm_hybrid.data.preprocessing import ModelColumns, Preprocessing
from dlrm_hybrid.disk import writing
from dlrm_hybrid.export.folder import new_folder
from dlrm_hybrid.export.writing import ADVICE, OUTPUT_KEY
from dlrm_hybrid.model.layers.products import Precision
from dlrm_hybrid.run.assembly import model as build_model
from dlrm_hybrid.run.display import Display
from dlrm_hybrid.run.evaluating import saved_config, saved_preprocessing
from dlrm_hybrid.run.request import Request
from dlrm_hybrid.saved.delta import ModelVersion, difference, vocabulary_tensors, write_delta
from dlrm_hybrid.saved.model import SavedModel, scoring
from dlrm_hybrid.types import ConfigError, DataError

SINCE = "export.since"


@dataclass(frozen=True, slots=True, kw_only=True)
class Written:
    """A delta that was written.

    Attributes:
        base: the model that it changes.
        model: the model that it makes.
        changed: rows of tables that changed, the new ones included.
        appended: rows that are new.
        rows: rows of all tables.
        num_bytes: size of its tensors.
    """

    folder: Path
    base: ModelVersion
    model: ModelVersion
    changed: int
    appended: int
    rows: int
    num_bytes: int


@dataclass(frozen=True, slots=True)
class _Side:
    version: ModelVersion
    config: Config
    preprocessing: Preprocessing
    columns: ModelColumns
    model: SavedModel

    @classmethod
    def load(cls, path: Path, display: Display) -> _Side:
        checkpoint = find_best(path)
        facts = read_facts(checkpoint)
        config = saved_config(checkpoint, facts)
        preprocessing = saved_preprocessing(checkpoint, facts)
        build_model.prepare_torch(config)
        with display.counter("checkpoint", "bytes", is_late=True) as show:
            model = SavedModel.load(
                config,
                checkpoint,
                preprocessing.manifest,
                Precision.FLOAT32,
                lambda count, total: show(count, total),
                rounds=False,  # who applies the delta rounds, as who loads a checkpoint
            )
        stamp = ModelVersion(version=version(facts), checkpoint=str(checkpoint), step=facts["step"])
        return cls(stamp, config, preprocessing, preprocessing.columns(), model)


def export_delta(request: Request, display: Display) -> Written:
    """Write the delta from the model of `export.since` to that of `export.checkpoint`.

    Raises:
        ConfigError: a key is missing or does not go with a delta, or the folder exists.
        DataError: a checkpoint is missing or damaged, or the later one does not go on from the
            earlier one.
        ResourceError: the disk refuses.
    """
    options = request.config.export
    faults = unset_faults("export", options, ADVICE)
    if options.int8:
        faults.append(f"export.int8 = true: a delta ({SINCE}) has rows as they were learned")
    if faults:
        raise ConfigError(faults_text(faults))
    assert options.checkpoint and options.since and options.output
    with new_folder(Path(options.output), OUTPUT_KEY) as folder:
        before = _Side.load(Path(options.since), display)
        after = _Side.load(Path(options.checkpoint), display)
        if lines := list(_differences(before, after)):
            raise DataError(
                f"{SINCE} = {before.version.checkpoint}: {after.version.checkpoint} does not go on "
                "from it; export the whole model\n" + "\n".join(f"  {line}" for line in lines)
            )
        tables = after.model.spec.table_names
        tensors = difference(tables, before.model.tensors, after.model.tensors)
        changed = sum(len(tensors[f"{name}.rows"]) for name in tables)
        for first in dict.fromkeys(after.preprocessing.schema.first_columns):
            sides = (side.columns.vocabularies[first] for side in (before, after))
            tensors |= vocabulary_tensors(first + 1, *sides)
        rows = before.preprocessing.table_rows, after.preprocessing.table_rows
        _check(before, after, tensors)
        with writing(folder, OUTPUT_KEY):
            num_bytes = write_delta(folder, tensors, before.version, after.version, *rows)
    return Written(
        folder=Path(options.output),
        base=before.version,
        model=after.version,
        changed=changed,
        appended=sum(rows[1]) - sum(rows[0]),
        rows=sum(rows[1]),
        num_bytes=num_bytes,
    )


def _differences(before: _Side, after: _Side) -> Iterator[str]:
    """Reasons why no delta leads from one model to the other."""
    if scoring(before.config, before.model.spec) != scoring(after.config, after.model.spec):
        yield "they score with other keys of model, precision, activation, parallel or embedding"
    yield from before.columns.other_meaning(after.columns)
    old, new = before.columns.vocabularies, after.columns.vocabularies
    if len(old) != len(new):
        return
    for earlier, later in zip(old, new, strict=True):
        if earlier.first_id != later.first_id:
            yield f"ids of {earlier.column.name!r} begin elsewhere: 0 is all unknown categories"
        taken_K, _ = later.since(earlier)
        if len(later.keys) < len(earlier.keys) or (len(taken_K) and later.column.evict is None):
            yield f"ids of {earlier.column.name!r} are of other categories"


def _check(before: _Side, after: _Side, tensors: dict[str, torch.Tensor]) -> None:
    """Compare the earlier model, updated by the delta, with the later one, bit for bit."""
    rows = before.preprocessing.table_rows, after.preprocessing.table_rows
    result = before.model.updated(before.config, tensors, *rows, rows[1]).tensors
    for name, tensor in after.model.tensors.items():
        if not torch.equal(result[name].view(torch.int32), tensor.view(torch.int32)):
            raise DataError(f"{name}: the delta does not lead to the later model's")
