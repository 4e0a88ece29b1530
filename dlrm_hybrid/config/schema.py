"""Types and bounds of every configuration key.

A value has one home, the YAML files of `conf/`: nothing here has a default. What two keys mean
together is checked in `rules.py`. The keys of `gradient` are those of a record in
compress/gradient/methods/ (see `config.methods`).
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field
from pydantic.dataclasses import dataclass

from dlrm_hybrid.bounds import (
    STRICT,
    BelowOne,
    Count,
    Decay,
    Epsilon,
    LearningRate,
    Name,
    Path,
    Positive,
    Precision,
    PrecisionOrLevels,
    Rate,
    Seconds,
    Seed,
)
from dlrm_hybrid.compress.activation.methods import ActivationKeys
from dlrm_hybrid.config.methods import Gradient
from dlrm_hybrid.config.sections.commands import (
    DoctorConfig,
    EvaluateConfig,
    ExportConfig,
    ImportConfig,
    PlanConfig,
    PredictConfig,
    PrepareConfig,
    ReportConfig,
    SweepConfig,
    WatchConfig,
)


@dataclass(config=STRICT, frozen=True, kw_only=True)
class DataConfig:
    """Where rows come from, what they mean and how they are read; see conf/data/.

    `rows` and `seed` belong to `synthetic`, `raw` to all others, `schema` to `table`, whose schema
    says what `days` to `max_ind_range` say of the others; null elsewhere.
    """

    name: Literal["synthetic", "criteo_kaggle", "criteo_1tb", "criteo_1tb_multi_hot", "table"]
    rows: Annotated[int, Field(ge=1000, le=2**40)] | None
    seed: Seed | None
    raw: Path | Annotated[tuple[Path, ...], Field(min_length=1)] | None
    schema: Path | None
    guess: Path | Annotated[tuple[Path, ...], Field(min_length=1)] | None
    prepared: Path | None
    days: Annotated[int, Field(ge=2, le=1000)] | None
    day_split: Literal["equal_rows", "files"] | None
    vocabulary: Literal["all_days", "train_days"] | None
    min_count: Count | None
    max_ind_range: Annotated[int, Field(ge=0, lt=2**32)] | None
    on_bad_row: Literal["error", "skip", "quarantine"]
    max_bad_rows: Count
    test_part: Literal["day", "first_half", "validation"]
    shuffle: bool
    shuffle_block_rows: Annotated[int, Field(ge=1, le=2**24)]
    shuffle_read_rows: Annotated[int, Field(ge=1, le=2**24)]
    processes: Annotated[int, Field(ge=1, le=1024)] | None
    block_bytes: Annotated[int, Field(ge=65_536, le=2**30)]


@dataclass(config=STRICT, frozen=True, kw_only=True)
class CrossConfig:
    """Cross layers, of low rank or full, and what is beside; of `model.interaction=cross` alone."""

    layers: Annotated[int, Field(ge=1, le=64)]
    rank: Annotated[int, Field(ge=1, le=65_536)] | None
    deep: tuple[Positive, ...]


@dataclass(config=STRICT, frozen=True, kw_only=True)
class FmConfig:
    """The deep network beside a factorization machine; of `model.interaction=fm` alone."""

    deep: Annotated[tuple[Positive, ...], Field(min_length=1)]


Dropout = Annotated[float, Field(ge=0, le=0.99)]


@dataclass(config=STRICT, frozen=True, kw_only=True)
class ModelConfig:
    """Widths of the network, input first; the top network's input follows from the rest.

    `bottom` is empty where rows have no dense columns.
    `cross` and `fm` belong to the interaction of that name; null elsewhere.
    """

    name: Name
    embedding_dim: Annotated[int, Field(ge=1, le=4096)]
    bottom: tuple[Positive, ...]
    top: Annotated[tuple[Positive, ...], Field(min_length=1)]
    interaction: Literal["dot", "cross", "fm"]
    cross: CrossConfig | None
    fm: FmConfig | None
    dropout: Dropout
    bottom_dropout: Dropout | None
    batch_norm: bool


@dataclass(config=STRICT, frozen=True, kw_only=True)
class ParallelConfig:
    """How the model is partitioned over trainers, pipeline stages and servers."""

    name: Literal["single", "hybrid"]
    trainers: Annotated[int, Field(ge=1, le=4096)]
    cuts: tuple[str, ...]
    servers: Annotated[int, Field(ge=0, le=1024)]
    table_servers: Annotated[int, Field(ge=0, le=1024)]
    world: Literal["processes", "in_process"]
    elastic: bool
    threads: Annotated[int, Field(ge=1, le=1024)]


@dataclass(config=STRICT, frozen=True, kw_only=True)
class PullConfig:
    """How new weights travel from the servers."""

    precision: PrecisionOrLevels
    sparsity: BelowOne | None

    @property
    def left_out(self) -> float | None:
        """The sparsity; None where every version publishes all that has changed."""
        return self.sparsity or None


@dataclass(config=STRICT, frozen=True, kw_only=True)
class SyncConfig:
    """How old the weights may be that a step is computed with.

    `staleness` belongs to `bounded`, the last six keys to `async`.
    """

    name: Literal["sync", "bounded", "async"]
    staleness: Annotated[int, Field(ge=0, le=1024)]
    check_every: Positive
    lr_scale: Literal["trainers", "one"] | None
    in_flight: Annotated[int, Field(ge=1, le=64)]
    ahead: Positive | None
    record: bool
    replay: Path | None


Ticks = Annotated[int, Field(ge=0, le=1024)]


@dataclass(config=STRICT, frozen=True, kw_only=True)
class ScheduleConfig:
    """The order in which batches and their parts pass through the stages.

    `delays` and `staleness` belong to `dsp`; null elsewhere.
    """

    name: Literal["sequential", "gpipe", "one_f_one_b", "dsp"]
    microbatches: Annotated[int, Field(ge=1, le=1024)]
    delays: tuple[Ticks, ...] | None
    staleness: tuple[Ticks, ...] | None


@dataclass(config=STRICT, frozen=True, kw_only=True)
class NetworkConfig:
    """Where ranks listen and how long they wait for each other.

    `ranks_per_host`, `colocate_tables` and `latency` belong to `emulated`.
    """

    name: Literal["host", "emulated"]
    rate: Name | None
    ranks_per_host: Positive | None
    colocate_tables: bool
    latency: Name | None
    bind: Path | None
    keys: Path | None
    patience_seconds: Seconds


@dataclass(config=STRICT, frozen=True, kw_only=True)
class EmbeddingConfig:
    """The optimizer of the tables, who owns their rows, and how these travel.

    `betas` belongs to `adam` and `rowwise_adam`, `sharding` to `fused`; `staleness` and all that
    follows it to `served`, which always deduplicates. The three keys after `levels` say how these
    are made.
    """

    name: Literal["fused", "served"]
    optimizer: Literal["sgd", "adagrad", "rowwise_adagrad", "adam", "rowwise_adam"]
    lr: Rate | None
    eps: Epsilon
    betas: tuple[BelowOne, BelowOne]
    weight_decay: Decay
    init: Literal["uniform_rows", "uniform_width"] | Rate
    sharding: Literal["table_wise", "row_wise", "column_wise", "auto"]
    comm_precision: Precision
    deduplicate: bool
    levels: bool
    row_error: Rate
    gradient_error: Rate
    copies_rows: Annotated[int, Field(ge=1, le=2**31)]
    staleness: Annotated[int, Field(ge=0, le=1024)]
    cache_rows: Annotated[int, Field(ge=0, le=2**31)]
    cache_batches: Annotated[int, Field(ge=0, le=1024)]
    storage: Literal["memory", "mmap"]
    folder: Path | None


@dataclass(config=STRICT, frozen=True, kw_only=True)
class OptimizerConfig:
    """The optimizer of the dense layers and the learning rate over the steps; see conf/optimizer/.

    `momentum` belongs to `momentum`, `eps` to `adagrad` and `adam`, `betas` to `adam`; null
    elsewhere.
    """

    name: Literal["sgd", "momentum", "adagrad", "adam"]
    lr: LearningRate
    momentum: BelowOne | None
    betas: tuple[BelowOne, BelowOne] | None
    eps: Epsilon | None
    weight_decay: Decay
    decoupled_weight_decay: bool
    schedule: Literal["constant", "linear", "warmup_decay", "plateau"]
    warmup_steps: Count
    decay_start_step: Count
    decay_steps: Count
    plateau_factor: Annotated[float, Field(gt=0, lt=1)]
    plateau_patience: Positive
    staleness_warmup_steps: Positive | None


@dataclass(config=STRICT, frozen=True, kw_only=True)
class TrainConfig:
    """Length and order of the run."""

    batch_size: Annotated[int, Field(ge=1, le=2**20)]
    epochs: Positive
    steps: Positive | None
    seed: Seed
    evaluate_every: Count | Literal["epoch"]
    patience: Positive | None
    min_delta: Annotated[float, Field(ge=0)]
    monitor: Literal["log_loss", "auc"]


@dataclass(config=STRICT, frozen=True, kw_only=True)
class CheckpointConfig:
    """When to save, how many to keep, where to go on from, and how often after a loss."""

    every: Count
    minutes: Annotated[float, Field(ge=0, le=1e6)]
    keep: Positive
    keep_best: bool
    resume: Path
    max_restarts: Count
    restart_window_seconds: Seconds


@dataclass(config=STRICT, frozen=True, kw_only=True)
class TelemetryConfig:
    """How often the loss curve gets a point, and which sinks are open."""

    every: Positive
    tensorboard: bool
    wandb: Literal["offline", "online"] | None
    mlflow: Path | None

    @property
    def trackers(self) -> dict[str, str | None]:
        """What is chosen of other people's trackers, by key."""
        return {"wandb": self.wandb, "mlflow": self.mlflow}


@dataclass(
    config={**STRICT, "validate_by_name": True, "validate_by_alias": True},
    frozen=True,
    kw_only=True,
)
class Config:
    """The whole configuration of one run."""

    name: Name
    precision: Literal["float32", "bfloat16"]
    threads: Annotated[int, Field(ge=1, le=1024)]
    skip_completed: bool
    conf: Path | None
    sweep: SweepConfig
    data: DataConfig
    model: ModelConfig
    parallel: ParallelConfig
    gradient: Gradient
    activation: ActivationKeys
    pull: PullConfig
    sync: SyncConfig
    schedule: ScheduleConfig
    embedding: EmbeddingConfig
    optimizer: OptimizerConfig
    network: NetworkConfig
    prepare: PrepareConfig
    train: TrainConfig
    evaluate: EvaluateConfig
    predict: PredictConfig
    export: ExportConfig
    import_: Annotated[ImportConfig, Field(alias="import")]
    checkpoint: CheckpointConfig
    telemetry: TelemetryConfig
    report: ReportConfig
    watch: WatchConfig
    plan: PlanConfig
    doctor: DoctorConfig
