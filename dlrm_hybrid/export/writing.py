"""Exports a checkpoint: a folder with the model, its vocabularies, and their description."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
from torch import Tensor

from dlrm_hybrid import __version__
from dlrm_hybrid.arrays import Int64s
from dlrm_hybrid.bags import Bags, jagged, weights_of_all, with_first_ids
from dlrm_hybrid.config.commands import ExportConfig
from dlrm_hybrid.config.schema import Config
from dlrm_hybrid.config.validate import NAME_CHECKPOINT, faults_text, unset_faults
from dlrm_hybrid.data.loader import Batch, sequential_batches
from dlrm_hybrid.data.preprocessing import Preprocessing
from dlrm_hybrid.data.shards import Shards
from dlrm_hybrid.disk import writing
from dlrm_hybrid.export.folder import new_folder
from dlrm_hybrid.export.formats import ModelFile, Scorer, require
from dlrm_hybrid.export.names import names_of, shapes_of
from dlrm_hybrid.export.plain import with_sums
from dlrm_hybrid.model.layers.products import Precision
from dlrm_hybrid.model.own import OwnModel
from dlrm_hybrid.model.spec import ModelShape
from dlrm_hybrid.run.assembly import model as build_model
from dlrm_hybrid.run.display import Display
from dlrm_hybrid.run.evaluating import (
    open_source,
    prepare_evaluation,
    saved_preprocessing,
    trained_on_are_here,
)
from dlrm_hybrid.run.request import Request
from dlrm_hybrid.run.rows import Command
from dlrm_hybrid.saved.inputs import MODEL_FILE, ListInputs, write_inputs
from dlrm_hybrid.saved.model import SavedModel
from dlrm_hybrid.telemetry.metrics import BinaryScores, metrics_of
from dlrm_hybrid.types import ConfigError, DataError

SCORE_TOLERANCE = 1e-5  # of probabilities
# Absolute for logits below 1, else relative: sums of hundreds of float32 numbers are reordered.
LOGIT_TOLERANCE = 1e-4
MASKED_ROWS = 1000  # one row of these may differ if activations are masked
NO_WEIGHTS: Mapping[str, float] = MappingProxyType({})


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """Comparison of the checkpoint and the written model on the same rows.

    Attributes:
        logit_difference: largest difference of logits, relative for those above 1.
        score_difference: largest difference of probabilities.
        rows_apart: rows that differ by more than the order of sums explains, or are NaN.
        before: scores of the checkpoint; None for rows without labels.
        after: scores of the written model; None for rows without labels.
    """

    logit_difference: float
    score_difference: float
    rows: int
    rows_apart: int
    before: BinaryScores | None
    after: BinaryScores | None

    def is_equal(self, *, masked: bool) -> bool:
        """Whether the models agree on all rows.

        Args:
            masked: whether activations are masked; then one row of 1,000 may differ, in which two
                elements tie for the last place up to rounding, and each model keeps another one.
        """
        return self.rows_apart <= (self.rows // MASKED_ROWS if masked else 0)

    @property
    def auc_difference(self) -> float | None:
        """AUC of the written model less the checkpoint's; None without labels of both classes."""
        if self.after is None or self.before is None:
            return None
        if self.after.auc is None or self.before.auc is None:
            return None
        return self.after.auc - self.before.auc


def drawn_batches(
    preprocessing: Preprocessing, rows: int, batch_size: int
) -> Generator[Batch, None, None]:
    """Yield batches of random rows that are valid inputs of a model, the same each time."""
    rng, schema = np.random.default_rng(0), preprocessing.schema
    columns = schema.categorical
    for first in range(0, rows, batch_size):
        count = min(batch_size, rows - first)
        lengths_FB = np.ones((len(columns), count), np.int64)
        for table in schema.multi_hot:
            lengths_FB[table] = rng.integers(0, columns[table].max_length + 1, count)
        sizes = zip(preprocessing.manifest.table_rows, lengths_FB.sum(1).tolist(), strict=True)
        ids: list[Int64s] = [rng.integers(0, size, length) for size, length in sizes]
        dense_BI = rng.standard_normal((count, schema.num_dense), np.float32)
        parts = [Bags(ids_M) for ids_M in ids]
        for table in schema.weighted:
            parts[table] = Bags(ids[table], weights=rng.random(len(ids[table]), np.float32))
        weights_N = weights_of_all(parts)
        unexpanded = jagged(np.concatenate(ids), lengths_FB, schema.averaged, weights_N)
        bags = preprocessing.expanded(unexpanded)
        yield Batch(dense_BI, bags, np.zeros(count, np.float32))


def compare(
    before: Scorer,
    after: Scorer,
    batches: Iterable[Batch],
    progress: Callable[[int], object],
    *,
    labelled: bool = True,
    loss_weights: Mapping[str, float] = NO_WEIGHTS,
) -> Comparison:
    """Score rows with two models and compare the results.

    Args:
        progress: called with the number of rows done.
        loss_weights: weights of several labels, by name; empty for one label.
    """
    metrics, largest = (metrics_of(loss_weights), metrics_of(loss_weights)), np.zeros(2)
    rows = rows_apart = 0
    for batch in batches:
        logit_B, score_B = before(batch)
        other_B, other_score_B = after(batch)
        for metric, output_B in zip(metrics, (logit_B, other_B), strict=True) if labelled else ():
            metric.add(output_B, *batch.outcomes)
        apart_B = np.abs(other_B - logit_B) / np.maximum(np.abs(logit_B), 1)
        score_apart_B = np.abs(other_score_B - score_B)
        worst = apart_B.max(), score_apart_B.max()
        near_B = (apart_B <= LOGIT_TOLERANCE) & (score_apart_B <= SCORE_TOLERANCE)
        rows_apart += int(np.count_nonzero(~near_B.reshape(len(near_B), -1).all(1)))
        largest = np.maximum(largest, worst)  # keeps a NaN
        rows += len(logit_B)
        progress(rows)
    first, second = (metric.scores() if labelled else None for metric in metrics)
    return Comparison(
        logit_difference=float(largest[0]),
        score_difference=float(largest[1]),
        rows=rows,
        rows_apart=rows_apart,
        before=first,
        after=second,
    )


OUTPUT_KEY = "export.output"
ADVICE = {
    "checkpoint": NAME_CHECKPOINT,
    "output": "name a new folder",
}
FORMAT = 1  # of `model.json`


@dataclass(frozen=True, slots=True, kw_only=True)
class Exported:
    """An exported model, which agrees with its checkpoint.

    Attributes:
        folder: the new folder.
        file: name of the model's file in it.
        num_bytes: size of that file and of those that it needs beside it.
    """

    checkpoint: Path
    step: int
    folder: Path
    file: str
    num_bytes: int
    comparison: Comparison
    remarks: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class _Job:
    """A checkpoint to export; `shards` are the rows to check it on, None if they are gone."""

    checkpoint: Path
    facts: Mapping[str, Any]
    config: Config
    preprocessing: Preprocessing
    shards: Shards | None


def export(request: Request, display: Display) -> Exported:
    """Write the model of `export.checkpoint` into the new folder `export.output`, and check it.

    Raises:
        ConfigError: a key is missing, or the folder exists.
        DataError: the checkpoint or its rows are missing or damaged, or the written model differs.
        ResourceError: a package is missing, or the disk refuses.
    """
    options = request.config.export
    if options.checkpoint is None or options.output is None:
        raise ConfigError(faults_text(unset_faults("export", options, ADVICE)))
    require(options.format)
    with new_folder(Path(options.output), OUTPUT_KEY) as folder:
        job = _job(request, Path(options.checkpoint), display)
        schema = job.preprocessing.schema
        build_model.prepare_torch(job.config)
        model = _load(job, display)
        summed = _summed(job, options)
        lists = {*schema.multi_hot, *schema.expanded} - {*summed}
        tensors = with_sums(model.tensors, model.spec, job.preprocessing, summed)
        file = ModelFile(
            format=options.format,
            naming=options.names,
            spec=model.spec,
            int8=options.int8,
            lists=ListInputs(tuple(sorted(lists)), schema.averaged, schema.weighted),
            masks=model.masks,
        )
        names_of(file.naming, file.spec, shapes_of(file.spec))  # raises if the naming has none
        with writing(folder, OUTPUT_KEY):
            file.write(folder, tensors)
            num_bytes = sum(path.stat().st_size for path in folder.iterdir())
            inputs = write_inputs(folder, job.preprocessing, file.lists)
        comparison = _compare(job, options, model, file, tensors, folder, display)
        with writing(folder, OUTPUT_KEY):
            text = json.dumps(_description(job, file, inputs, comparison), indent=1)
            (folder / MODEL_FILE).write_text(text + "\n", encoding="utf-8")
    return Exported(
        checkpoint=job.checkpoint,
        step=job.facts["step"],
        folder=Path(options.output),
        file=file.file,
        num_bytes=num_bytes,
        comparison=comparison,
        remarks=tuple(_remarks(job, file)),
    )


def _job(request: Request, path: Path, display: Display) -> _Job:
    """The checkpoint, with the rows of the command line, or of its run if they still exist."""
    source = open_source(request, path)
    shards, config = None, source.config
    if source.names_rows or trained_on_are_here(source):
        evaluation = prepare_evaluation(source, display, Command("export", request.overrides))
        shards, config = evaluation.shards, evaluation.source.config
    preprocessing = saved_preprocessing(source.checkpoint, source.facts)
    return _Job(source.checkpoint, source.facts, config, preprocessing, shards)


def _summed(job: _Job, options: ExportConfig) -> Collection[int]:
    return () if options.format == "safetensors" else job.preprocessing.schema.expanded


def _load(job: _Job, display: Display) -> SavedModel:
    with display.counter("checkpoint", "bytes", is_late=True) as show:
        return SavedModel.load(
            job.config,
            job.checkpoint,
            job.preprocessing.manifest,
            Precision.FLOAT32,
            lambda count, total: show(count, total),
            rounds=False,  # values near a rounding border would round differently in the file
        )


def _compare(
    job: _Job,
    options: ExportConfig,
    model: SavedModel,
    file: ModelFile,
    tensors: Mapping[str, Tensor],
    folder: Path,
    display: Display,
) -> Comparison:
    """Score rows of the test part with the written file and with the checkpoint.

    If these rows are gone, random ones are scored: what counts is that both models agree.

    Raises:
        DataError: the file differs from the checkpoint, or, with int8, from its quantised tables.
    """
    summed, shards, batch_size = _summed(job, options), job.shards, job.config.evaluate.batch_size
    rows = range(options.check_rows)
    if shards is not None:
        rows = shards.test_rows(job.config.data.test_part)[: options.check_rows]

    def of_file(scorer: Scorer) -> Scorer:
        return lambda batch: scorer(replace(batch, bags=with_first_ids(batch.bags, summed)))

    exported = of_file(file.scorer(folder))

    def against(before: Scorer) -> Comparison:
        batches = (
            drawn_batches(job.preprocessing, len(rows), batch_size)
            if shards is None
            else sequential_batches(shards, rows, batch_size)
        )
        with display.counter("check", "rows", is_late=True) as show:

            def done(count: int) -> None:
                show(count, len(rows))

            weights = job.preprocessing.schema.loss_weights
            labelled = shards is not None
            return compare(before, exported, batches, done, labelled=labelled, loss_weights=weights)

    comparison = against(model.score)
    check = against(of_file(file.expected(tensors))) if options.int8 else comparison
    if not check.is_equal(masked=bool(file.masks)):
        raise DataError(
            f"{file.file}: differs from {job.checkpoint} on {check.rows_apart:,} of "
            f"{len(rows):,} rows: scores by "
            f"{check.score_difference:.2g} (at most {SCORE_TOLERANCE:g}), logits by "
            f"{check.logit_difference:.2g} (at most {LOGIT_TOLERANCE:g}); nothing was written"
        )
    return comparison


def _remarks(job: _Job, file: ModelFile) -> Iterator[str]:
    config, schema = job.config, job.preprocessing.schema
    if job.shards is None:
        yield "checked on drawn rows: those that the run was trained on are not there any more"
    if config.precision != Precision.FLOAT32:
        yield f"the file computes in float32, the run in {config.precision}"
    if file.masks and file.format == "safetensors":
        layers = ", ".join(file.masks)
        yield f"evaluations mask what leaves {layers}; who reads weights has to do so, too"
    elif config.activation.name == "sketch" and config.activation.evaluate_masked:
        yield "evaluations sketch activations, the file does not"
    expanded = schema.expanded
    if expanded and file.format == "safetensors":
        names = ", ".join(schema.categorical[table].name for table in expanded)
        yield f"the ids of {names} stand for bags (expand_to); who reads weights makes them, too"


def _of_model(spec: ModelShape) -> dict[str, Any]:
    if isinstance(spec, OwnModel):
        return {
            "name": spec.path,
            "settings": dict(spec.settings),
            "embedding_dim": spec.embedding_dim,
            "parts": spec.layer_names,
        }
    return {
        "embedding_dim": spec.embedding_dim,
        "bottom": spec.bottom,
        "top": spec.top,
        "interaction": {"name": type(spec.interaction).__name__.lower()} | asdict(spec.interaction),
        "batch_norm": spec.batch_norm,
        **({"table_dims": spec.table_dims} if spec.table_dims else {}),
    }


def _description(
    job: _Job,
    file: ModelFile,
    inputs: dict[str, Any],
    comparison: Comparison,
) -> dict[str, Any]:
    """Content of `model.json`: all that is needed to use the model without this program."""
    manifest, spec = job.preprocessing.manifest, file.spec
    names = [*manifest.schema.loss_weights]
    output = {"dtype": "float32", **({"labels": names} if names else {})}
    check = asdict(comparison)
    for side in ("before", "after") if comparison.before and not names else ():
        del check[side]["labels"]
    return {
        "format": FORMAT,
        "program": f"dlrm_hybrid {__version__}",
        "file": file.file,
        "names": file.naming,
        "int8": file.int8,
        "checkpoint": {
            "folder": str(job.checkpoint),
            "step": job.facts["step"],
            "config_hash": job.facts["config_hash"],
        },
        "inputs": inputs,
        "outputs": {"logit": output, "score": output},
        "model": {
            **_of_model(spec),
            "kept_after": {layer: mask.k for layer, mask in file.masks.items()},
        },
        "data": {**asdict(manifest.semantics), **manifest.vocabulary},
        "check": check,
    }
