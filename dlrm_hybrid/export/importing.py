"""From weights of other programs to a run folder with a checkpoint of step 0."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from dlrm_hybrid.checkpoint.commit import Preparing, commit
from dlrm_hybrid.checkpoint.folder import CHECKPOINTS
from dlrm_hybrid.checkpoint.writer import ShardWriter
from dlrm_hybrid.config.validate import faults_text, unset_faults
from dlrm_hybrid.data.manifest import VOCABULARY_FOLDER
from dlrm_hybrid.data.preprocessing import Preprocessing, keep
from dlrm_hybrid.data.shards import open_shards
from dlrm_hybrid.data.sources.cells import Key
from dlrm_hybrid.disk import plain_file, read_object, writing
from dlrm_hybrid.export import weights
from dlrm_hybrid.export.folder import new_folder
from dlrm_hybrid.export.names import Naming
from dlrm_hybrid.export.plain import list_name
from dlrm_hybrid.model.row_storage import IN_MEMORY
from dlrm_hybrid.model.spec import ModelSpec
from dlrm_hybrid.run.assembly import build
from dlrm_hybrid.run.assembly import engine as build_engine
from dlrm_hybrid.run.assembly import model as build_model
from dlrm_hybrid.run.compiling import compile_for
from dlrm_hybrid.run.display import Display
from dlrm_hybrid.run.rank.facts import checkpoint_facts
from dlrm_hybrid.run.readiness import require_memory
from dlrm_hybrid.run.request import Request
from dlrm_hybrid.run.rows import Command, prepared_rows
from dlrm_hybrid.saved import vocabularies
from dlrm_hybrid.telemetry.spans import SpanClock
from dlrm_hybrid.train import statistics
from dlrm_hybrid.train.progress import Progress
from dlrm_hybrid.train.saver import piece_groups
from dlrm_hybrid.types import ConfigError, DataError

MODEL_FILE = "model.json"
SAME = ("name", "kind", "hash_size", "bucket", "missing")  # of a column, here and there


@dataclass(frozen=True, slots=True)
class Beside:
    """What a column of a file of weights has in its table.

    Attributes:
        column: what `model.json` says of it.
        row_of: the row of each category.
        rows: of the table.
    """

    column: Mapping[str, Any]
    row_of: Mapping[Key, int]
    rows: int


def beside(file: Path, preprocessing: Preprocessing) -> list[Beside] | None:
    """The columns of a file of weights in the order of its tables, if `export` has written it.

    Args:
        file: of the weights.
        preprocessing: of the rows that the weights are for.

    Raises:
        DataError: what lies beside it is none of that, or columns differ from those of the rows.
    """
    folder = file.parent
    if not (folder / MODEL_FILE).exists():
        return None
    about = read_object(folder, MODEL_FILE)
    if about.get("file") != file.name:
        raise DataError(
            f"{folder / MODEL_FILE}: is of {about.get('file')!s:.80}, not of {file.name}, so the "
            "categories of its rows are not known; give it its name again, or a folder of its own"
        )
    try:
        faults = list(_column_faults(about, preprocessing))
        if not faults:
            return [
                _of_column(folder, number, column)
                for number, column in enumerate(_columns(about, preprocessing), 1)
            ]
    except (AttributeError, KeyError, IndexError, TypeError, ValueError, OSError) as error:
        raise DataError(f"{folder / MODEL_FILE}: is not as export writes it: {error!r}") from error
    raise _refusal(file, preprocessing, faults)


def rows_there(
    file: Path, columns: list[Beside], preprocessing: Preprocessing
) -> list[npt.NDArray[np.int64]]:
    """For each table the row (R,) of the file that belongs to each row here.

    Raises:
        DataError: the file has no row for a category.
    """
    found: list[npt.NDArray[np.int64]] = []
    faults: list[str] = []
    for one, own in zip(columns, vocabularies.read(preprocessing), strict=True):
        keys: list[Key] = [*np.asarray(own.keys, object)]
        unknown = [key for key in keys if key not in one.row_of]
        if unknown:
            faults.append(
                f"{own.column.name}: {len(unknown):,} of {len(keys):,} categories are not in the "
                f"file's vocabulary, first {unknown[0]!r:.60}"
            )
        elif own.first_id > one.column["first_id"]:
            faults.append(f"{own.column.name}: the file has no row for all other categories")
        shared = [0] * own.first_id
        found.append(np.array([*shared, *(one.row_of.get(key, 0) for key in keys)], np.int64))
    if faults:
        raise _refusal(file, preprocessing, faults)
    return found


def _columns(about: Mapping[str, Any], preprocessing: Preprocessing) -> list[Mapping[str, Any]]:
    """Of each categorical column what `model.json` says, in the order of the tables."""
    inputs, lists = about["inputs"], preprocessing.schema.multi_hot
    single = iter(inputs["ids"]["columns"])
    expanded = preprocessing.schema.expanded
    return [
        inputs[list_name(number)]["columns"][0]
        if number in lists or number in expanded
        else next(single)
        for number in range(len(preprocessing.schema.categorical))
    ]


def _column_faults(about: Mapping[str, Any], preprocessing: Preprocessing) -> Iterator[str]:
    """What `model.json` says otherwise than the rows, but for categories."""
    theirs = about["inputs"].get("dense", {"columns": []})["columns"]
    ours = vocabularies.dense_columns(preprocessing)
    if len(theirs) != len(ours):
        yield f"{len(theirs)} dense columns, here {len(ours)}"
    for one, own in zip(theirs, ours, strict=False):
        if one != own:
            yield f"dense column {one}, here {own}"
    modulo = preprocessing.manifest.semantics.max_ind_range
    if about["data"]["max_ind_range"] != modulo:
        yield f"max_ind_range {about['data']['max_ind_range']}, here {modulo}"
    columns = preprocessing.schema.categorical
    if sum(len(one["columns"]) for one in about["inputs"].values()) - len(theirs) != len(columns):
        yield f"other categorical columns than the {len(columns)} here"
        return
    for one, own in zip(_columns(about, preprocessing), columns, strict=True):
        for key in SAME:
            if one[key] != getattr(own, key):
                yield f"column {one['name']}: {key} {one[key]!r}, here {getattr(own, key)!r}"


def _of_column(folder: Path, number: int, column: Mapping[str, Any]) -> Beside:
    is_text = column["kind"] == "string" and not column["hash_size"]
    name = f"{number}.{'json' if is_text else 'npy'}"
    path = plain_file(folder / VOCABULARY_FOLDER, name)
    if is_text:
        keys: list[Key] = json.loads(path.read_text(encoding="utf-8"))
    else:
        keys = np.load(path, allow_pickle=False).tolist()
    first_id = column["first_id"]
    row_of = {key: first_id + place for place, key in enumerate(keys)}
    return Beside(column, row_of, len(keys) + first_id)


def _refusal(file: Path, preprocessing: Preprocessing, faults: list[str]) -> DataError:
    lines = "".join(f"\n  {fault}" for fault in faults)
    return DataError(
        f"{file}: the columns that {MODEL_FILE} beside it has are not those of "
        f"{preprocessing.folder} (import.file){lines}"
    )


OUTPUT_KEY = "import.output"
ATTEMPT = 0
WAIT_SECONDS = 3600.0  # for a disk; a fault ends it before


@dataclass(frozen=True, slots=True, kw_only=True)
class Imported:
    """A checkpoint of others' weights.

    Attributes:
        folder: a run folder, to resume from.
        tensors: how many were taken over.
        parameters: elements of all of them.
    """

    folder: Path
    tensors: int
    parameters: int


def import_weights(request: Request, display: Display) -> Imported:
    """Make a checkpoint of `import.file` for the configured model, with fresh optimizer state.

    Args:
        request: the command.
        display: for progress.

    Raises:
        ConfigError: a key is missing, or the folder is there.
        DataError: the file is no such weights, or they are not this model's; the rows are missing.
        ResourceError: the disk refuses.
    """
    config, options = request.config, request.config.import_
    if options.file is None or options.output is None:
        wanted = {"file": "name the file of weights", "output": "name a new folder"}
        raise ConfigError(faults_text(unset_faults("import", options, wanted)))
    with new_folder(Path(options.output), OUTPUT_KEY) as folder:
        found = weights.read(Path(options.file))
        rows = prepared_rows(config, display, Command("import", request.overrides))
        shards = open_shards(rows, build.semantics(config))
        spec = build.model_spec(config, shards.table_rows)
        taken = _fitted(Path(options.file), found, options.names, spec, shards.preprocessing)
        require_memory(config, sum(shards.table_rows))
        compile_for(config, display)
        build_model.prepare_torch(config)
        groups = piece_groups(
            build_engine.engine(config, shards, 1, IN_MEMORY, SpanClock()).pieces()
        )
        for piece in (*groups["dense"], *groups["embeddings"]):
            if piece.name in taken:
                piece.view.copy_(taken[piece.name])
        for piece in groups.get(statistics.GROUP, []):
            piece.view.copy_(taken[statistics.model_name(piece.name)])
        with writing(folder, OUTPUT_KEY):
            keep(rows, folder)
        root = folder / CHECKPOINTS
        writer = ShardWriter(root=root, rank="worker-0", attempt=ATTEMPT)
        writer.begin(0, groups)
        shard = writer.take(WAIT_SECONDS)
        assert shard is not None
        prepared = Preparing(step=0, owed={0: "worker-0"}, shards={}).took(0, shard)
        facts = checkpoint_facts(Progress(), request.values, shards)
        commit(root, ATTEMPT, prepared, facts, build.retention(config))
    return Imported(
        folder=Path(options.output),
        tensors=len(taken),
        parameters=sum(one.numel() for one in taken.values()),
    )


def _fitted(
    file: Path,
    tensors: Mapping[str, Tensor],
    naming: Naming,
    spec: ModelSpec,
    preprocessing: Preprocessing,
) -> dict[str, Tensor]:
    """As `weights.fitted`; each category keeps its row where a vocabulary lies beside the file."""
    columns = beside(file, preprocessing)
    if columns is None:
        return weights.fitted(file, tensors, naming, spec)
    rows = rows_there(file, columns, preprocessing)
    theirs = replace(spec, table_rows=tuple(one.rows for one in columns))
    taken = weights.fitted(file, tensors, naming, theirs)
    for name, row_R in zip(spec.table_names, rows, strict=True):
        taken[f"{name}.weight"] = taken[f"{name}.weight"][torch.from_numpy(row_R)]
    return taken
