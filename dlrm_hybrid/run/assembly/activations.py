"""From the configuration to what compresses activations; imports torch, for the ranks."""

from __future__ import annotations

from dlrm_hybrid.compress.activation.codec import ActivationCodec, PerBoundaryCodec
from dlrm_hybrid.compress.activation.dense import DenseCodec, ObservedCodec
from dlrm_hybrid.compress.activation.methods import METHODS, BoundaryContext
from dlrm_hybrid.config.rules import sparsity_per_cut
from dlrm_hybrid.config.schema import Config
from dlrm_hybrid.model.spec import StagePart, microbatch_rows
from dlrm_hybrid.wire.section import Dtype


def dtype(precision: str) -> Dtype:
    """The type of values on the wire."""
    return Dtype[precision.upper()]


def activations(config: Config, part: StagePart) -> ActivationCodec:
    """What the worker of a stage sends over its boundaries, and makes of what it receives."""
    keys = config.activation
    method = METHODS.get(keys.name)
    if method is None:
        return DenseCodec() if keys.observe is None else ObservedCodec(keys.observe)
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
    return PerBoundaryCodec({one.boundary: method.build(keys, one) for one in contexts})


def evaluation_activations(config: Config, part: StagePart) -> ActivationCodec:
    """The same in evaluations, where no gradient is sent."""
    method = METHODS.get(config.activation.name)
    if method is None or not (method.compresses_activations and config.activation.evaluate_masked):
        return DenseCodec()
    return activations(config, part)
