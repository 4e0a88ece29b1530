"""The keys of single commands: sections that are none of a run's own."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from dlrm_hybrid.bounds import (
    OPTION_PATTERN,
    PAGE_PATTERN,
    Bound,
    Count,
    Extra,
    Latency,
    LinkRate,
    Path,
    Paths,
    Positive,
)
from dlrm_hybrid.record import Effect, Record, key

Few = Annotated[int, Bound(ge=2, le=8)]
Machines = Few | Annotated[tuple[Few, ...], Bound(min_length=1)]
Counts = Annotated[tuple[Positive, ...], Bound(min_length=1)]
Page = Annotated[str, Bound(pattern=PAGE_PATTERN)]
Naming = Literal["ours", "torchrec", "dlrm"]
Format = Literal["pt2", "onnx", "safetensors"]
Unknown = Literal["error", "zero"]
ANOTHER = Effect.NOTHING | Effect.ANOTHER
OURS = Effect.NOTHING | Effect.EVALUATION
CHECKPOINT = "a run folder, for its best checkpoint, or one of its checkpoints"
WEIGHTS_OF = "ours, or those of torchrec or facebookresearch/dlrm"


@dataclass(frozen=True, kw_only=True)
class SweepConfig(Record, effect=ANOTHER):
    """How `train -m` runs the jobs of a sweep; see docs/sweeps.md."""

    jobs: Annotated[int, Bound(ge=1, le=1024)] = key(
        1, "jobs of a sweep (-m) that run at one time, on this machine"
    )
    submit: Literal["slurm"] | None = key(
        None, "slurm: submit each job with sbatch instead, and end"
    )
    sbatch: tuple[Annotated[str, Bound(pattern=OPTION_PATTERN)], ...] = key(
        (), "more options of sbatch, such as [--partition=long,--mem=8G]", only="sweep.submit=slurm"
    )


@dataclass(frozen=True, kw_only=True)
class PrepareConfig(Record, effect=OURS):
    """What the verb `prepare` does with rows that are there."""

    check: bool = key(False, "only verify all prepared rows against their checksums")
    overwrite: bool = key(False, "replace rows prepared from other files or with other options")


@dataclass(frozen=True, kw_only=True)
class EvaluateConfig(Record, effect=OURS):
    """What the verb `evaluate` reads, and the batch of every evaluation."""

    checkpoint: Path | None = key(None, CHECKPOINT)
    batch_size: Positive = key(4096, "rows scored at once, at most all")
    output: Path | None = key(None, "write the scores to this JSON file")


@dataclass(frozen=True, kw_only=True)
class PredictConfig(Record, effect=ANOTHER):
    """Which rows the verb `predict` scores, and where scores go; see docs/predict.md."""

    checkpoint: Path | None = key(None, CHECKPOINT)
    rows: Paths | None = key(
        None,
        "files, folders or patterns of rows to score: Criteo text (.gz, .zst), .csv or .parquet",
    )
    output: Path | None = key(
        None, "file of scores to write, .parquet or .csv; one that is there is replaced"
    )
    keep: tuple[Path, ...] = key((), "columns of the rows to write beside the scores")
    unknown: Unknown = key(
        "error", "categories without a row in their table: error, or zero for a row of zeros"
    )
    extra: Extra = key("error", "columns that the schema does not name: error, or ignore")


@dataclass(frozen=True, kw_only=True)
class ExportConfig(Record, effect=ANOTHER):
    """What the verb `export` writes for other programs; see docs/export.md."""

    checkpoint: Path | None = key(None, CHECKPOINT)
    output: Path | None = key(None, "new folder for the model, its vocabularies and model.json")
    format: Format = key(
        "pt2", "model.pt2 for torch.export.load, model.onnx, or weights alone in model.safetensors"
    )
    since: Path | None = key(
        None,
        "a run or checkpoint: write only what the model has learned since then, a delta for "
        "Predictor.update",
    )
    names: Naming = key(
        "ours", f"names in model.safetensors: {WEIGHTS_OF}", only="export.format=safetensors"
    )
    int8: bool = key(False, "tables of 8-bit integers, with a scale and an offset for each row")
    check_rows: Positive = key(
        10_000, "rows of the test part on which the file must score as the checkpoint does"
    )


@dataclass(frozen=True, kw_only=True)
class ImportConfig(Record, effect=ANOTHER):
    """Which weights of other programs the verb `import` makes a checkpoint of."""

    file: Path | None = key(
        None, "weights: .safetensors, or a file of torch.save with a state dict"
    )
    output: Path | None = key(None, "new run folder for the checkpoint, to resume from")
    names: Naming = key("dlrm", f"names of the weights: {WEIGHTS_OF}")


@dataclass(frozen=True, kw_only=True)
class ReportConfig(Record, effect=ANOTHER):
    """Which runs the verb `report` compares, and the files it writes."""

    runs: Paths | None = key(None, "run folders, or folders that contain them, such as a sweep's")
    output: Page = key("report.html", "HTML file; a Markdown copy is written beside it")
    pictures: Path | None = key(
        None, "also write each plot to this folder, as a PNG; or FOLDER/*.svg, FOLDER/*.pdf"
    )


@dataclass(frozen=True, kw_only=True)
class WatchConfig(Record, effect=ANOTHER):
    """Which run the verb `watch` shows, in which page, and how often it is made."""

    run: Path | None = key(None, "run folder; one that is not there yet is waited for")
    output: Page | None = key(None, "HTML file; null: watch.html in the run folder")
    seconds: Annotated[float, Bound(ge=0.5, le=3600)] = key(
        5.0, "seconds between two pages, while the run goes on"
    )


@dataclass(frozen=True, kw_only=True)
class PlanConfig(Record, effect=ANOTHER):
    """What the verb `plan` predicts speeds from, and the worlds it compares; see docs/plan.md."""

    calibration: Paths | None = key(
        None,
        "complete runs to take costs from, the one most like a world; null trains for half a "
        "minute first",
    )
    count_steps: Annotated[int, Bound(ge=10, le=1_000_000)] = key(
        40, "steps of every world in this process first, to count what it sends"
    )
    trainers: Counts | None = key(
        None, "list of parallel.trainers to compare; null: the one that is configured"
    )
    servers: Annotated[tuple[Count, ...], Bound(min_length=1)] | None = key(
        None, "list of parallel.servers to compare"
    )
    rates: Annotated[tuple[LinkRate, ...], Bound(min_length=1)] | None = key(
        None, "list of link rates to compare, such as [100mbit,1gbit]; null: network.rate"
    )
    latencies: Annotated[tuple[Latency, ...], Bound(min_length=1)] | None = key(
        None, "list of one-way latencies to compare, such as [0ms,20ms]; null: network.latency"
    )
    machines: Machines | None = key(
        None,
        "number of machines, or several: [2,4]; which world is the fastest on them, how it is "
        "started, and how much faster it is than plain data parallelism",
    )
    cores: Annotated[float, Bound(gt=0, le=1024)] | None = key(
        None, "cores of each machine; null: as many as where the calibration ran"
    )
    output: Path | None = key(None, "also write the predictions to this JSON file")
    picture: Path | None = key(
        None, "also write samples/s over trainers to this file, .png, .svg or .pdf"
    )


@dataclass(frozen=True, kw_only=True)
class DoctorConfig(Record, effect=ANOTHER):
    """What the verb `doctor` does: `check` this machine, make CURVE `keys`, `compile` kernels."""

    action: Literal["check", "keys", "compile"] = key(
        "check", "check this machine, make a key file for network.keys, or compile all kernels"
    )
    output: Path = key("keys.json", "key file to write with doctor.action=keys")
