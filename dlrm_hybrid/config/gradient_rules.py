"""What keys of `gradient` mean together and with other sections; see `rules`."""

from __future__ import annotations

from collections.abc import Iterator

from dlrm_hybrid.config.compression_schema import GradientConfig
from dlrm_hybrid.config.gradient_methods import LOCAL_KEYS, METHODS, sections_read
from dlrm_hybrid.config.schema import Config


def gradient_rules(config: Config) -> Iterator[str]:
    """Faults of `gradient`: what a method does not read, lacks, or does not go with."""
    gradient, method = config.gradient, METHODS[config.gradient.name]
    yield from _keys(gradient)
    if gradient.sparsity and not method.is_sparse:
        yield (
            f"gradient.sparsity = {gradient.sparsity}: has no effect with "
            f"gradient={gradient.name}; choose e.g. gradient=dct"
        )
    if gradient.precision not in method.precisions:
        yield (
            f"gradient.precision = {gradient.precision!r}: gradient={gradient.name} sends "
            f"{' or '.join(method.precisions)}"
        )
    if method.thresholds and gradient.threshold not in (*method.thresholds, None):
        yield (
            f"gradient.threshold = {gradient.threshold!r}: gradient={gradient.name} is defined by "
            f"{' or '.join(method.thresholds)}; gradient=dct works with any rule"
        )
    if config.sync.name not in method.policies and _agree(gradient):
        alone = " or gradient.terngrad.sharing=false" if gradient.terngrad is not None else ""
        yield (
            f"gradient = {gradient.name!r}: its trainers synchronize in every step; needs "
            f"sync={' or '.join(method.policies)}{alone}, not {config.sync.name}"
        )
    if config.optimizer.name not in method.optimizers:
        yield (
            f"gradient = {gradient.name!r}: needs optimizer={' or '.join(method.optimizers)}, "
            f"not {config.optimizer.name}"
        )
    if gradient.name != "none" and not config.parallel.servers:
        add = (
            "add parallel=hybrid" if config.parallel.name == "single" else "set parallel.servers=1"
        )
        yield f"gradient = {gradient.name!r}: needs a parameter server to send to; {add}"
    yield from _local(config)
    yield from _levels(config)


def _keys(gradient: GradientConfig) -> Iterator[str]:
    """A null that is read, or a value that is not."""
    method = METHODS[gradient.name]
    for key in LOCAL_KEYS:
        value = getattr(gradient, key)
        if key in method.keys and value is None:
            yield f"gradient.{key} = null: gradient={gradient.name} needs a value"
        if key not in method.keys and value is not None:
            yield f"gradient.{key} = {value!r}: has no effect with gradient={gradient.name}"
    for section in sections_read(gradient.name, gradient.threshold):
        if getattr(gradient, section) is None:
            yield f"gradient.{section} = null: gradient={gradient.name} needs its keys"


def _local(config: Config) -> Iterator[str]:
    """Faults of methods that decide on their own what leaves."""
    gradient = config.gradient
    if gradient.name == "topk" and (gradient.lifespan != 1 or gradient.renewal != "fixed"):
        yield (
            f"gradient.lifespan = {gradient.lifespan}, gradient.renewal = {gradient.renewal!r}: "
            "gradient=topk selects anew every step; gradient=dct reuses thresholds"
        )
    shared = gradient.aggregation in ("union", "leader")
    if shared and config.sync.name != "sync":
        yield (
            f"gradient.aggregation = {gradient.aggregation!r}: trainers synchronize in every step; "
            f"needs sync=sync, not {config.sync.name}"
        )
    if gradient.aggregation == "leader" and gradient.drain == "flush":
        yield (
            "gradient.drain = 'flush': with gradient.aggregation=leader a trainer cannot send a "
            "residual of its own; use discard or none"
        )
    if (
        gradient.aggregation == "leader"
        and gradient.renewal == "fixed"
        and gradient.lifespan != 1
        and config.parallel.trainers > 1
    ):
        yield (
            f"gradient.lifespan = {gradient.lifespan}: with gradient.aggregation=leader a trainer "
            "selects in turns, which may never fall on a fixed renewal; use 1, or "
            "gradient.renewal=controlled"
        )
    if gradient.staggered and gradient.renewal != "fixed":
        yield "gradient.staggered = True: only applies to gradient.renewal=fixed"
    if gradient.staggered and gradient.scope == "stage":
        yield "gradient.staggered = True: gradient.scope=stage has one threshold for all tensors"
    rising = gradient.correction.warmup_sparsities if gradient.correction else ()
    if list(rising) != sorted(rising):
        yield f"gradient.correction.warmup_sparsities = {list(rising)}: must increase"
    if gradient.residual == "update" and config.optimizer.name != "sgd":
        yield (
            f"gradient.residual = 'update': needs optimizer=sgd; optimizer={config.optimizer.name} "
            "must see gradients, not updates"
        )


def _agree(gradient: GradientConfig) -> bool:
    """Whether trainers that agree have something to agree on: not where none shares its scales."""
    return gradient.terngrad is None or gradient.terngrad.sharing


def _levels(config: Config) -> Iterator[str]:
    """Faults of pulls that name levels."""
    terngrad = config.gradient.terngrad
    if terngrad is None or terngrad.pull != "levels":
        return
    if not terngrad.sharing:
        yield (
            "gradient.terngrad.sharing = False: sums of different scales have no common levels; "
            "needs gradient.terngrad.pull=weights"
        )
    if config.pull.precision != "float32":
        yield (
            f"pull.precision = {config.pull.precision!r}: gradient.terngrad.pull=levels does not "
            "round weights; needs gradient.terngrad.pull=weights"
        )
