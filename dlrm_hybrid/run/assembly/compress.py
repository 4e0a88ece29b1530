"""From the configuration to compressors of gradients and activations; imports torch."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from dlrm_hybrid.compress.activation.codec import ActivationCodec, DenseCodec
from dlrm_hybrid.compress.activation.methods import BoundaryContext, Dct, Dense
from dlrm_hybrid.compress.gradient.collective import Op
from dlrm_hybrid.compress.gradient.compressor import Compressor
from dlrm_hybrid.compress.gradient.context import StageContext
from dlrm_hybrid.compress.gradient.layout import Layout
from dlrm_hybrid.compress.gradient.rule import target_k
from dlrm_hybrid.config.schema import Config
from dlrm_hybrid.model.layers.keep_largest import KeepLargest
from dlrm_hybrid.model.spec import ModelSpec, Partition, StagePart, microbatch_rows
from dlrm_hybrid.run.assembly import model as build_model


def compressor(
    config: Config,
    layout: Layout,
    *,
    trainer: int,
    stage: int,
    model_elements: int,
    steps: int,
    lowered: Sequence[int] = (),
) -> Compressor:
    """The compressor of a worker's gradients.

    Args:
        config: that of the run.
        layout: that of the dense tensors of the worker's stage.
        trainer: number of the worker's trainer.
        stage: that of the worker.
        model_elements: number in all dense tensors of the model.
        steps: number in the whole run.
        lowered: see `model.schedule`.
    """
    context = StageContext(
        layout=layout,
        trainer=trainer,
        trainers=config.parallel.trainers,
        model_elements=model_elements,
        last_layer=f"top.{len(config.model.top)}",
        lr=build_model.dense_schedule(config, steps, stage, lowered).lr,
        seed=config.train.seed,
    )
    return config.gradient.build(context)


def rounds(config: Config) -> tuple[Op, ...]:
    """The rounds of the compressor, which servers must know too."""
    return tuple(Op(name) for name in config.gradient.rounds())


def activations(config: Config, part: StagePart) -> dict[int, ActivationCodec]:
    """The codecs of a worker's boundaries, by boundary number."""
    method = config.activation
    if isinstance(method, Dense):
        return _dense(part, method.observe)
    microbatches = config.schedule.microbatches
    contexts = [
        BoundaryContext(
            boundary=boundary,
            sends_gradients=boundary == part.index - 1,
            width=part.input_width,
            rows=microbatch_rows(config.train.batch_size, microbatches),
            microbatches=microbatches,
            seed=config.train.seed,
        )
        for boundary in (part.index - 1, part.index)
        if 0 <= boundary < len(config.parallel.cuts)
    ]
    return {one.boundary: method.build(one) for one in contexts}


def evaluation_activations(config: Config, part: StagePart) -> dict[int, ActivationCodec]:
    """The codecs for evaluations, which send no gradients."""
    if not (config.activation.compresses_activations and config.activation.evaluate_masked):
        return _dense(part, None)
    return activations(config, part)


def evaluation_masks(config: Config, spec: ModelSpec, *, rounds: bool) -> dict[str, KeepLargest]:
    """The masks of DCT-MP that evaluations apply, by the layer before; none with other methods.

    Args:
        config: that of a run.
        spec: that of its model.
        rounds: whether to round as on the wire, as evaluations do.
    """
    keys = config.activation
    if not isinstance(keys, Dct) or not keys.evaluate_masked:
        return {}
    partition = Partition.of(spec, config.parallel.cuts)
    masks: dict[str, KeepLargest] = {}
    for boundary, cut in enumerate(partition.cuts):
        k = target_k(partition.stages[boundary].output_width, keys.sparsity_at(boundary))
        bits = keys.bits_at(boundary) if rounds else None
        dtype = getattr(torch, keys.precision) if rounds and bits is None else None
        masks[cut] = KeepLargest(k, dtype, bits)
    return masks


def _dense(part: StagePart, observe: float | None) -> dict[int, ActivationCodec]:
    return {boundary: DenseCodec(observe) for boundary in (part.index - 1, part.index)}
