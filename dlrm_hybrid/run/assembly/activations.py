"""From the configuration to what compresses activations; imports torch, for the ranks."""

from __future__ import annotations

from dlrm_hybrid.compress.activation.codec import ActivationCodec
from dlrm_hybrid.compress.activation.dense import DenseCodec
from dlrm_hybrid.compress.activation.methods import METHODS, BoundaryContext
from dlrm_hybrid.config.rules import sparsity_per_cut
from dlrm_hybrid.config.schema import Config
from dlrm_hybrid.model.spec import StagePart, microbatch_rows
from dlrm_hybrid.wire.section import Dtype


def dtype(precision: str) -> Dtype:
    """The type of values on the wire."""
    return Dtype[precision.upper()]


def activations(config: Config, part: StagePart) -> dict[int, ActivationCodec]:
    """The codecs of a worker's boundaries, by number."""
    keys = config.activation
    method = METHODS.get(keys.name)
    if method is None:
        return _dense(part, keys.observe)
    microbatches = config.schedule.microbatches
    contexts = [
        BoundaryContext(
            boundary=boundary,
            sparsity=sparsity,
            sends_gradients=boundary == part.index - 1,
            width=part.input_width,
            rows=microbatch_rows(config.train.batch_size, microbatches),
            microbatches=microbatches,
            seed=config.train.seed,
        )
        for boundary, sparsity in enumerate(sparsity_per_cut(config))
        if boundary in (part.index - 1, part.index)
    ]
    return {one.boundary: method.build(keys, one) for one in contexts}


def evaluation_activations(config: Config, part: StagePart) -> dict[int, ActivationCodec]:
    """The codecs in evaluations, where no gradient is sent."""
    method = METHODS.get(config.activation.name)
    if method is None or not (method.compresses_activations and config.activation.evaluate_masked):
        return _dense(part, None)
    return activations(config, part)


def _dense(part: StagePart, observe: float | None) -> dict[int, ActivationCodec]:
    return {boundary: DenseCodec(observe) for boundary in (part.index - 1, part.index)}
