"""What the method of `gradient` goes with in other sections."""

from __future__ import annotations

from collections.abc import Iterator

from dlrm_hybrid.config.schema import Config


def gradient_rules(config: Config) -> Iterator[str]:
    """Faults of what a method does not go with."""
    gradient, optimizer = config.gradient, config.optimizer.name
    if optimizer not in (gradient.optimizers or (optimizer,)):
        yield (
            f"gradient = {gradient.name!r}: needs optimizer={' or '.join(gradient.optimizers)}, "
            f"not {optimizer}"
        )
    if not gradient.sends_all and not config.parallel.servers:
        add = (
            "add parallel=hybrid" if config.parallel.name == "single" else "set parallel.servers=1"
        )
        yield f"gradient = {gradient.name!r}: needs a parameter server to send to; {add}"
    if gradient.rounds() and not (config.sync.name == "sync" and not config.parallel.elastic):
        needs, given = "sync=sync", f", not {config.sync.name}"
        if config.sync.name == "sync":
            needs, given = "parallel.elastic=false", ""
        alone = f" or gradient.{gradient.alone}" if gradient.alone else ""
        yield (
            f"gradient = {gradient.name!r}: its trainers synchronize in every step; needs "
            f"{needs}{alone}{given}"
        )
    for key, reason in gradient.faults_among(config.parallel.trainers):
        yield f"gradient.{key} = {getattr(gradient, key)}: {reason}"
    yield from _published(config)


def _published(config: Config) -> Iterator[str]:
    """Faults of what waits, and of what is pulled."""
    if config.gradient.uses_lr and config.optimizer.name != "sgd":
        yield (
            f"gradient.residual = 'update': needs optimizer=sgd; optimizer={config.optimizer.name} "
            "must see gradients, not updates"
        )
    if config.gradient.publishes_means and config.pull.precision != "float32":
        yield (
            f"pull.precision = {config.pull.precision!r}: gradient.pull=levels does not round "
            "weights; needs gradient.pull=weights"
        )
    if config.gradient.publishes_means and config.pull.sparsity is not None:
        yield (
            f"pull.sparsity = {config.pull.sparsity}: gradient.pull=levels moves every weight of "
            "every replica; needs gradient.pull=weights"
        )
