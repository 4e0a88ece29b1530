"""Every section of the configuration, a record whose fields are its keys.

The choices of groups are in `choices`, those of `gradient` and `activation` beside what they build,
the sections of single commands in `commands`. What two keys mean together is checked in `rules`.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from typing_extensions import override

from dlrm_hybrid.bounds import (
    DEVICE_PATTERN,
    Bound,
    Count,
    Monitor,
    Name,
    Path,
    Positive,
    Seconds,
    Seed,
)
from dlrm_hybrid.compress.activation.methods import ActivationMethod
from dlrm_hybrid.compress.gradient.methods import GradientMethod
from dlrm_hybrid.config.choices import Data, Network, Parallel, Sync
from dlrm_hybrid.config.commands import (
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
from dlrm_hybrid.model.interaction import Cross, Fm
from dlrm_hybrid.model.optimizer import Optimizer
from dlrm_hybrid.model.tables import Embedding
from dlrm_hybrid.parallel.dense.pulls import Pulls
from dlrm_hybrid.parallel.schedule import Schedule
from dlrm_hybrid.record import Effect, Record, key

NEW = Effect.NEW_RUN
EMBEDDING_DIM = "columns of each embedding table"
Width = Annotated[int, Bound(ge=1, le=4096)]
DropoutShare = Annotated[float, Bound(ge=0, le=0.99)]


class Model(Record):
    """What is true of a model that has no such key."""

    if TYPE_CHECKING:
        name: Any  # a key, or of the class
    embedding_dim: int
    bottom: tuple[Positive, ...] = ()
    top: tuple[Positive, ...] = ()
    interaction: Literal["dot", "cross", "fm"] = "dot"
    cross: Cross | None = None
    fm: Fm | None = None
    dropout: float = 0.0
    bottom_dropout: float | None = None
    batch_norm: bool = False
    table_dims: tuple[int, ...] | None = None


@dataclass(frozen=True, kw_only=True)
class ModelConfig(Model):
    """Widths of the network, input first; the top network's input follows from the rest.

    Only the interaction with its name has the section `cross` or `fm`.
    """

    name: Name = key("dlrm_paper", "name of the choice")
    embedding_dim: Width = key(16, EMBEDDING_DIM)
    bottom: tuple[Positive, ...] = key(
        (),
        "widths of the bottom MLP, input first; null: as many as there are dense columns; [] "
        "without any",
    )
    top: Annotated[tuple[Positive, ...], Bound(min_length=1)] = key(
        (1,), "widths of the top MLP, without its input"
    )
    interaction: Literal["dot", "cross", "fm"] = key(
        "dot", "how its vectors meet: dots of all pairs, cross layers, or a factorization machine"
    )
    cross: Cross | None = None
    fm: Fm | None = None
    dropout: DropoutShare = key(
        0.0,
        "share of the activations of hidden layers that is dropped in training: of all layers of "
        "MLPs and deep networks but the last of each MLP",
        NEW,
    )
    bottom_dropout: DropoutShare | None = key(
        None, "the same share for the bottom MLP; null: model.dropout", NEW
    )
    batch_norm: bool = key(False, "normalise hidden layers between their products and their ReLUs")
    table_dims: Annotated[tuple[Width, ...], Bound(min_length=1)] | None = key(
        None,
        "columns of each table by itself, projected to embedding_dim where they differ; null: "
        "embedding_dim of the schema's columns",
    )


@dataclass(frozen=True, kw_only=True)
class OwnModelConfig(Model):
    """A `torch.nn.Module` of your own; docs/extending.md."""

    name: ClassVar[str]  # pyright: ignore[reportIncompatibleVariableOverride]
    module: ClassVar[Any]
    embedding_dim: Width = key(16, EMBEDDING_DIM)
    dense: Count | None = key(None, "dense columns; null: as many as the rows have")
    tables: Positive | None = key(None, "categorical columns; null: as many as the rows have")

    @override
    def settings(self) -> dict[str, Any]:
        return {"name": self.name, **super().settings()}

    @property
    def own_settings(self) -> dict[str, Any]:
        """Arguments of the module's constructor by name."""
        common = {x.name for x in fields(OwnModelConfig)}
        return {x.name: getattr(self, x.name) for x in fields(self) if x.name not in common}


@dataclass(frozen=True, kw_only=True)
class TrainConfig(Record):
    """Length and order of the run."""

    batch_size: Annotated[int, Bound(ge=1, le=2**20)] = key(128, "rows per trainer and step")
    epochs: Positive = key(1, "passes over the training days", NEW)
    steps: Positive | None = key(None, "stop after this many steps; null trains all epochs", NEW)
    seed: Seed = key(
        0, "seed for weight initialization, shuffling and stochastic compression", Effect.SEED
    )
    evaluate_every: Count | Literal["epoch"] = key(
        0, "steps between evaluations, or epoch; 0 evaluates only at the end", Effect.FREE
    )
    patience: Positive | None = key(
        None, "end the run after this many evaluations without a better score; null never", NEW
    )
    min_delta: Annotated[float, Bound(ge=0)] = key(
        0.0, "a score is better if it is by more than this", NEW
    )
    monitor: Monitor = key(
        "log_loss",
        "the score that train.patience and checkpoints/best follow: a lower log_loss, or a higher "
        "auc, or gauc of a table with groups",
        NEW,
    )


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig(Record, effect=Effect.NOTHING):
    """When to save, how many to keep, where to go on from, and how often after a loss."""

    every: Count = key(0, "steps between checkpoints; 0 saves by time only")
    minutes: Annotated[float, Bound(ge=0, le=1e6)] = key(
        10.0, "maximum time between checkpoints; 0 saves by steps only"
    )
    keep: Positive = key(2, "number of newest checkpoints to keep")
    keep_best: bool = key(True, "save the best evaluation so far by train.monitor, and keep it")
    resume: Path = key(
        "never",
        "never; auto continues the run in hydra.run.dir; or a run or checkpoint to start from",
        Effect.FREE | Effect.PATH,
    )
    max_restarts: Count = key(3, "restarts from the newest checkpoint after losing a rank")
    restart_window_seconds: Seconds = key(
        3600.0, "more than max_restarts within this window end the run"
    )


@dataclass(frozen=True, kw_only=True)
class TelemetryConfig(Record, effect=Effect.NOTHING):
    """How often the loss curve gets a point, and which sinks are open."""

    every: Positive = key(100, "steps between points of the loss curve")
    tensorboard: bool = key(True, "also write TensorBoard scalars")
    wandb: Literal["offline", "online"] | None = key(
        None,
        "write to Weights & Biases: online, or offline into the run folder, for `wandb sync`",
        Effect.NOTHING | Effect.PLACE,
    )
    mlflow: Path | None = key(
        None,
        "write to MLflow: a tracking URI, such as http://host:5000, sqlite:///runs.db or "
        "file:///runs",
        Effect.NOTHING | Effect.PLACE,
    )

    @property
    def trackers(self) -> dict[str, str | None]:
        """Settings of other people's trackers, by key."""
        return {"wandb": self.wandb, "mlflow": self.mlflow}


@dataclass(frozen=True, kw_only=True)
class Config(Record):
    """The whole configuration of one run."""

    name: Name = key("default", "part of the run folder's path, runs/<name>/…", Effect.NOTHING)
    precision: Literal["float32", "bfloat16"] = key(
        "float32",
        "type of the MLPs' matrix products; with bfloat16, each MLP's last layer stays float32",
    )
    device: Annotated[str, Bound(pattern=DEVICE_PATTERN)] = key(
        "cpu",
        "device of the dense layers: cpu; cuda, of which the workers of a machine take one each; "
        "or cuda:1. Servers stay on the CPU, tables where embedding.device says",
        Effect.FREE | Effect.EVALUATION,
    )
    tf32: bool = key(
        False,
        "multiply float32 matrices in TF32, of 10 bits, where device is cuda",
        Effect.FREE | Effect.EVALUATION,
    )
    threads: Annotated[int, Bound(ge=1, le=1024)] = key(
        1,
        "of each rank; keep 1 unless cores are idle: too many have slowed training 5–13x",
        Effect.FREE | Effect.EVALUATION,
    )
    skip_completed: bool = key(
        False,
        "when a sweep is repeated in its folder, skip complete jobs and resume others",
        Effect.NOTHING,
    )
    conf: Path | None = key(
        None,
        "folder with experiment/NAME.yaml of your own, for +experiment=NAME",
        Effect.NOTHING | Effect.ANOTHER | Effect.PATH,
    )
    sweep: SweepConfig
    data: Data
    model: Model
    parallel: Parallel
    gradient: GradientMethod
    activation: ActivationMethod
    pull: Pulls
    sync: Sync
    schedule: Schedule
    embedding: Embedding
    optimizer: Optimizer
    network: Network
    prepare: PrepareConfig
    train: TrainConfig
    evaluate: EvaluateConfig
    predict: PredictConfig
    export: ExportConfig
    import_: ImportConfig
    checkpoint: CheckpointConfig
    telemetry: TelemetryConfig
    report: ReportConfig
    watch: WatchConfig
    plan: PlanConfig
    doctor: DoctorConfig
