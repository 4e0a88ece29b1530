"""Types and bounds of the sections that commands read, beside those of a run."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field
from pydantic.dataclasses import dataclass

from dlrm_hybrid.bounds import OPTION_PATTERN, PAGE_PATTERN, STRICT, Count, Name, Path, Positive


@dataclass(config=STRICT, frozen=True, kw_only=True)
class SweepConfig:
    """How `train -m` runs the jobs of a sweep; see docs/sweeps.md."""

    jobs: Annotated[int, Field(ge=1, le=1024)]
    submit: Literal["slurm"] | None
    sbatch: tuple[Annotated[str, Field(pattern=OPTION_PATTERN)], ...]


@dataclass(config=STRICT, frozen=True, kw_only=True)
class PrepareConfig:
    """What the verb `prepare` does with rows that are there; see conf/config.yaml."""

    check: bool
    overwrite: bool


@dataclass(config=STRICT, frozen=True, kw_only=True)
class EvaluateConfig:
    """What the verb `evaluate` reads, and the batch of every evaluation."""

    checkpoint: Path | None
    batch_size: Positive
    output: Path | None


@dataclass(config=STRICT, frozen=True, kw_only=True)
class PredictConfig:
    """Which rows the verb `predict` scores, and where scores go; see docs/predict.md."""

    checkpoint: Path | None
    rows: Path | Annotated[tuple[Path, ...], Field(min_length=1)] | None
    output: Path | None
    keep: tuple[Annotated[str, Field(min_length=1)], ...]
    unknown: Literal["error", "zero"]
    extra: Literal["error", "ignore"]


@dataclass(config=STRICT, frozen=True, kw_only=True)
class ExportConfig:
    """What the verb `export` writes for other programs; see docs/export.md."""

    checkpoint: Path | None
    output: Path | None
    format: Literal["pt2", "onnx", "safetensors"]
    names: Literal["ours", "torchrec", "dlrm"]
    int8: bool
    check_rows: Positive


@dataclass(config=STRICT, frozen=True, kw_only=True)
class ImportConfig:
    """Which weights of other programs the verb `import` makes a checkpoint of."""

    file: Path | None
    output: Path | None
    names: Literal["ours", "torchrec", "dlrm"]


@dataclass(config=STRICT, frozen=True, kw_only=True)
class ReportConfig:
    """Which runs the verb `report` compares, and the files it writes."""

    runs: Path | Annotated[tuple[Path, ...], Field(min_length=1)] | None
    output: Annotated[str, Field(pattern=PAGE_PATTERN)]
    pictures: Path | None


@dataclass(config=STRICT, frozen=True, kw_only=True)
class WatchConfig:
    """Which run the verb `watch` shows, in which page, and how often it is made."""

    run: Path | None
    output: Annotated[str, Field(pattern=PAGE_PATTERN)] | None
    seconds: Annotated[float, Field(ge=0.5, le=3600)]


@dataclass(config=STRICT, frozen=True, kw_only=True)
class PlanConfig:
    """What the verb `plan` predicts speeds from, and the worlds it compares; see docs/plan.md."""

    calibration: Path | Annotated[tuple[Path, ...], Field(min_length=1)] | None
    count_steps: Annotated[int, Field(ge=10, le=1_000_000)]
    trainers: Annotated[tuple[Positive, ...], Field(min_length=1)] | None
    servers: Annotated[tuple[Count, ...], Field(min_length=1)] | None
    rates: Annotated[tuple[Name, ...], Field(min_length=1)] | None
    latencies: Annotated[tuple[Name, ...], Field(min_length=1)] | None
    hosts: Literal["one", "each"]
    cores: Annotated[float, Field(gt=0, le=1024)] | None
    search: Annotated[int, Field(ge=2, le=64)] | None
    output: Path | None
    picture: Path | None


@dataclass(config=STRICT, frozen=True, kw_only=True)
class DoctorConfig:
    """What the verb `doctor` does: `check` this machine, make CURVE `keys`, `compile` kernels."""

    action: Literal["check", "keys", "compile"]
    output: Path
