"""What the keys of `optimizer` and `train` mean together, and with who trains together."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from dlrm_hybrid.config.schedule import shown
from dlrm_hybrid.config.schema import Config

READ: Mapping[str, Mapping[str, str]] = {
    "momentum": {"momentum": "a number"},
    "adagrad": {"eps": "a number"},
    "adam": {"eps": "a number", "betas": "two numbers"},
}
"""Keys that not all choices read, which of them read it, and what it must be there."""
BETAS = (0.9, 0.999)  # of tables whose optimizer does not read them


def optimizer_rules(config: Config) -> Iterator[str]:
    """Faults of `optimizer`: keys that it does not read, or lacks, and what they do not go with."""
    optimizer, tables = config.optimizer, config.embedding
    if not tables.optimizer.endswith("adam") and tables.betas != BETAS:
        yield (
            f"embedding.betas = {shown(tables.betas)}: only applies to embedding.optimizer=adam "
            f"or rowwise_adam, not {tables.optimizer}"
        )
    read = READ.get(optimizer.name, {})
    for key in dict.fromkeys(key for keys in READ.values() for key in keys):
        value = getattr(optimizer, key)
        if key in read and value is None:
            yield f"optimizer.{key} = null: optimizer={optimizer.name} needs {read[key]}"
        if key not in read and value is not None:
            readers = " or ".join(name for name, keys in READ.items() if key in keys)
            yield (
                f"optimizer.{key} = {shown(value)}: only applies to optimizer={readers}, "
                f"not {optimizer.name}"
            )
    if optimizer.decoupled_weight_decay:
        yield from _decoupled(config)
    start, warmup = optimizer.decay_start_step, optimizer.warmup_steps
    if optimizer.schedule == "warmup_decay" and optimizer.decay_steps and start < warmup:
        yield (
            f"optimizer.decay_start_step = {start}: must not be less than "
            f"optimizer.warmup_steps = {warmup}"
        )


def _decoupled(config: Config) -> Iterator[str]:
    given = "optimizer.decoupled_weight_decay = True"
    if config.optimizer.name != "adam":
        yield (
            f"{given}: only applies to optimizer=adam; with {config.optimizer.name} the decay is a "
            "part of the gradients"
        )
    elif config.gradient.is_sparse:
        yield (
            f"{given}: moves every weight in every update, and gradient={config.gradient.name} "
            "sends some; needs false: the decay is then a part of the gradients it sends"
        )


def stopping_rules(config: Config) -> Iterator[str]:
    """Faults of `train.patience` and of rates that fall where scores get no better."""
    train, falls = config.train, config.optimizer.schedule == "plateau"
    readers = "train.patience and optimizer.schedule=plateau"
    if train.patience is None and not falls:
        if train.min_delta:
            yield f"train.min_delta = {train.min_delta}: only applies to {readers}"
        if train.monitor != "log_loss" and not config.checkpoint.keep_best:
            yield (
                f"train.monitor = {train.monitor!r}: only applies to {readers}, and to "
                "checkpoint.keep_best"
            )
    if train.patience is not None:
        yield from _judged(config, f"train.patience = {train.patience}")
    if falls:
        yield from _judged(config, "optimizer.schedule = 'plateau'")
        return
    for key, default in (("plateau_factor", 0.1), ("plateau_patience", 1)):
        if (value := getattr(config.optimizer, key)) != default:
            yield f"optimizer.{key} = {value}: only applies to optimizer.schedule=plateau"


def _judged(config: Config, given: str) -> Iterator[str]:
    """Faults of what evaluations decide."""
    if not config.train.evaluate_every:
        yield f"{given}: counts evaluations; needs train.evaluate_every=epoch, or of 1 or more"
    if config.sync.name == "async" or config.parallel.elastic:
        yield (
            f"{given}: trainers that do not wait for others have no step in common; needs "
            "sync=sync or bounded, and parallel.elastic=false"
        )
    if config.schedule.name == "dsp":
        yield f"{given}: schedule=dsp has batches in flight where evaluations decide"
