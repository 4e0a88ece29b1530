"""What the keys of `schedule` mean together, and with those that say who waits for whom."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, cast

from dlrm_hybrid.config.schema import Config

STALE_KEYS = ("schedule.delays", "schedule.staleness")
"""Of `schedule=dsp` alone: a number for each stage."""


def shown(value: Any) -> str:
    """A value as messages have it."""
    if value is None:
        return "null"
    if isinstance(value, tuple):
        parts = cast("tuple[Any, ...]", value)
        return f"[{', '.join('null' if one is None else str(one) for one in parts)}]"
    return repr(value) if isinstance(value, str) else str(value)


def schedule_rules(config: Config) -> Iterator[str]:
    """Faults of `schedule`, and of the learning rate of stale gradients."""
    microbatches, batch = config.schedule.microbatches, config.train.batch_size
    if batch % microbatches:
        yield f"schedule.microbatches = {microbatches}: must divide train.batch_size = {batch}"
    is_stale = config.schedule.name == "dsp"
    if is_stale:
        yield from _pipeline(config)
        yield from _numbers(config)
    warmup = config.optimizer.staleness_warmup_steps
    is_late = is_stale and any(config.schedule.staleness or (1,))
    if warmup is not None and not is_late and config.sync.name == "sync":
        yield (
            f"optimizer.staleness_warmup_steps = {warmup}: no gradient is stale; needs "
            "schedule=dsp with a schedule.staleness above 0, sync=bounded or sync=async"
        )


def _pipeline(config: Config) -> Iterator[str]:
    """Faults of what cannot keep several batches of a trainer in flight."""
    if not config.parallel.cuts:
        needed = "parallel=hybrid" if config.parallel.name == "single" else "parallel.cuts"
        yield f"schedule = 'dsp': needs {needed}: a lone stage has no neighbour to run ahead of"
    if config.schedule.microbatches != 1:
        yield (
            f"schedule.microbatches = {config.schedule.microbatches}: schedule=dsp fills its "
            "pipeline with whole batches; needs 1"
        )
    mode = "sync=async" if config.sync.name == "async" else "parallel.elastic=true"
    if config.sync.name == "async" or config.parallel.elastic:
        yield (
            f"schedule = 'dsp': with {mode} trainers are given batches one by one, and come to "
            "rest without any in flight; needs sync=sync or bounded, and parallel.elastic=false"
        )
    if config.embedding.name == "served":
        yield (
            "schedule = 'dsp': embedding=served updates a batch before the next one is looked up; "
            "needs embedding=fused"
        )


def _numbers(config: Config) -> Iterator[str]:
    """Faults of delays and staleness: lengths, last numbers, and what is left for gradients."""
    delays, staleness = config.schedule.delays, config.schedule.staleness
    stages, is_whole = len(config.parallel.cuts) + 1, True
    for key, numbers in zip(STALE_KEYS, (delays, staleness), strict=True):
        if numbers is None or stages == 1:  # said by others
            is_whole = False
        elif len(numbers) != stages:
            is_whole = False
            yield (
                f"{key} = {shown(numbers)}: needs {stages} numbers, one for each stage of "
                f"parallel.cuts = {shown(config.parallel.cuts)}"
            )
        elif numbers[-1]:
            is_whole = False
            yield f"{key} = {shown(numbers)}: must end with 0: the last stage waits for no other"
    if not is_whole:
        return
    assert delays is not None and staleness is not None
    for stage in range(stages - 1):
        least = staleness[stage + 1] + delays[stage]
        if staleness[stage] < least:
            yield (
                f"schedule.staleness = {shown(staleness)}: staleness[{stage}] = {staleness[stage]} "
                f"must be at least staleness[{stage + 1}] + delays[{stage}] = {least}, with "
                f"schedule.delays = {shown(delays)}: what is left is the delay of gradients from "
                f"stage {stage + 1} to stage {stage}"
            )
