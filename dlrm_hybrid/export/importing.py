"""Imports weights of other programs into a run folder with a checkpoint of step 0."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from dlrm_hybrid.arrays import Int64s
from dlrm_hybrid.checkpoint.commit import Preparing, commit
from dlrm_hybrid.checkpoint.folder import CHECKPOINTS
from dlrm_hybrid.checkpoint.writer import ShardWriter
from dlrm_hybrid.config.commands import Naming
from dlrm_hybrid.config.validate import faults_text, unset_faults
from dlrm_hybrid.data.preprocessing import NO_ROW, ModelColumns, Preprocessing, keep
from dlrm_hybrid.data.shards import open_shards
from dlrm_hybrid.data.sources.cells import plain_value
from dlrm_hybrid.disk import writing
from dlrm_hybrid.export import weights
from dlrm_hybrid.export.folder import new_folder
from dlrm_hybrid.model.row_storage import IN_MEMORY
from dlrm_hybrid.model.spec import ModelShape
from dlrm_hybrid.model.tensors import in_groups
from dlrm_hybrid.run.assembly import build
from dlrm_hybrid.run.assembly import engine as build_engine
from dlrm_hybrid.run.assembly import model as build_model
from dlrm_hybrid.run.display import Display
from dlrm_hybrid.run.folder import with_widths_of_rows
from dlrm_hybrid.run.rank.facts import checkpoint_facts
from dlrm_hybrid.run.readiness import require_memory
from dlrm_hybrid.run.request import Request
from dlrm_hybrid.run.rows import Command, prepared_rows
from dlrm_hybrid.saved.inputs import MODEL_FILE, ExportedColumns
from dlrm_hybrid.train import statistics
from dlrm_hybrid.train.progress import Progress
from dlrm_hybrid.types import ConfigError, DataError, Group

OUTPUT_KEY = "import.output"
ATTEMPT = 0
WAIT_SECONDS = 3600.0  # for a slow disk; an error ends the wait


@dataclass(frozen=True, slots=True, kw_only=True)
class Imported:
    """A checkpoint made from imported weights.

    Attributes:
        folder: run folder, to resume from.
        parameters: number of their elements.
    """

    folder: Path
    tensors: int
    parameters: int


def import_weights(request: Request, display: Display) -> Imported:
    """Make a checkpoint of `import.file` for the configured model, with fresh optimizer state.

    Raises:
        ConfigError: a key is missing, or the folder exists.
        DataError: the file has no such weights, or not this model's; or the rows are missing.
        ResourceError: the disk refuses.
    """
    request = with_widths_of_rows(request)
    config, options = request.config, request.config.import_
    if options.file is None or options.output is None:
        advice = {"file": "name the file of weights", "output": "name a new folder"}
        raise ConfigError(faults_text(unset_faults("import", options, advice)))
    with new_folder(Path(options.output), OUTPUT_KEY) as folder:
        tensors = weights.read(Path(options.file))
        rows = prepared_rows(config, display, Command("import", request.overrides))
        shards = open_shards(rows, build.semantics(config))
        spec = build.shape_of(config, shards.manifest)
        state = _fitted(Path(options.file), tensors, options.names, spec, shards.preprocessing)
        require_memory(config, shards.table_rows)
        build_model.prepare_torch(config)
        pieces = build_engine.engine(config, shards, 1, IN_MEMORY).pieces()
        for piece in in_groups(pieces, Group.DENSE, Group.EMBEDDINGS):
            if piece.name in state:
                piece.view.copy_(state[piece.name])
        for piece in in_groups(pieces, Group.STATISTICS):
            piece.view.copy_(state[statistics.model_name(piece.name)])
        with writing(folder, OUTPUT_KEY):
            keep(rows, folder)
        root, place = folder / CHECKPOINTS, f"{OUTPUT_KEY} = {options.output}"
        writer = ShardWriter(root=root, rank="worker-0", attempt=ATTEMPT, place=place)
        writer.begin(0, pieces)
        shard = writer.take(WAIT_SECONDS)
        assert shard is not None
        prepared = Preparing(step=0, owed={0: "worker-0"}, shards={}).took(0, shard)
        facts = checkpoint_facts(Progress(), request.values, shards)
        commit(root, ATTEMPT, prepared, facts, build.retention(config), place)
    return Imported(
        folder=Path(options.output),
        tensors=len(state),
        parameters=sum(tensor.numel() for tensor in state.values()),
    )


def _fitted(
    file: Path,
    tensors: Mapping[str, Tensor],
    naming: Naming,
    spec: ModelShape,
    preprocessing: Preprocessing,
) -> dict[str, Tensor]:
    """Like `weights.fitted`; with a vocabulary beside the file, categories keep their rows.

    Raises:
        DataError: as `weights.fitted`; or `model.json` beside the file is damaged or of another
            file, or its columns differ from the rows'.
    """
    path = file.parent / MODEL_FILE
    if not path.exists():
        return weights.fitted(file, tensors, naming, spec)
    exported = ExportedColumns.read(file.parent)
    if exported.file != file.name:
        raise DataError(
            f"{path}: is of {exported.file:.80}, not of {file.name}, so the categories of its rows "
            "are not known; give it its name again, or a folder of its own"
        )
    theirs, ours, rows = exported.columns, preprocessing.columns(), list[Int64s]()
    if faults := theirs.other_meaning(ours) or [*_row_faults(theirs, ours, rows)]:
        lines = "".join(f"\n  {fault}" for fault in faults)
        raise DataError(
            f"{file}: the columns that {MODEL_FILE} beside it has are not those of "
            f"{preprocessing.folder} (import.file){lines}"
        )
    their_rows = ours.schema.by_table([vocabulary.table_rows for vocabulary in theirs.vocabularies])
    state = weights.fitted(file, tensors, naming, replace(spec, table_rows=their_rows))
    for name, row_R in zip(spec.table_names, ours.schema.by_table(rows), strict=True):
        state[f"{name}.weight"] = state[f"{name}.weight"][torch.from_numpy(row_R)]
    return state


def _row_faults(theirs: ModelColumns, ours: ModelColumns, rows: list[Int64s]) -> Iterator[str]:
    """Categories that the file has no row for; notes in `rows`, by column, its row of each here."""
    for source, target in zip(theirs.vocabularies, ours.vocabularies, strict=True):
        ids = source.lookup()(target.keys)
        unknown = np.flatnonzero(ids == NO_ROW).tolist()
        if unknown:
            yield (
                f"{target.column.name}: {len(unknown):,} of {len(ids):,} categories are not in the "
                f"file's vocabulary, first {plain_value(target.keys[unknown[0]])!r:.60}"
            )
        elif target.first_id > source.first_id:
            yield f"{target.column.name}: the file has no row for all other categories"
        rows.append(np.concatenate([np.zeros(target.first_id, np.int64), ids]))
