"""From the configuration to what compresses gradients; imports torch, for the ranks."""

from __future__ import annotations

from dlrm_hybrid.compress.gradient.collective import Op
from dlrm_hybrid.compress.gradient.compressor import Compressor
from dlrm_hybrid.compress.gradient.layout import Layout
from dlrm_hybrid.compress.gradient.methods import StageContext, methods
from dlrm_hybrid.compress.gradient.methods.dense import TernGradSettings
from dlrm_hybrid.config.schema import Config
from dlrm_hybrid.kernels.ops import NUMBA, Ops
from dlrm_hybrid.run.assembly import model as build_model


def compressor(
    config: Config,
    layout: Layout,
    *,
    trainer: int,
    model_elements: int,
    steps: int,
    ops: Ops = NUMBA,
) -> Compressor:
    """What a trainer's worker makes of its gradients.

    Args:
        config: of the run.
        layout: of the dense tensors of the worker's stage.
        trainer: its number.
        model_elements: of all dense tensors of the model.
        steps: of the whole run.
        ops: to compute with.
    """
    context = StageContext(
        layout=layout,
        trainer=trainer,
        trainers=config.parallel.trainers,
        model_elements=model_elements,
        last_layer=f"top.{len(config.model.top)}",
        lr=build_model.schedule(config, config.optimizer.lr, steps).lr,
        seed=config.train.seed,
        ops=ops,
    )
    return methods()[config.gradient.name].build(config.gradient, context)


def rounds(config: Config) -> tuple[Op, ...]:
    """Those of the compressor: a server must know them too."""
    return tuple(Op(name) for name in methods()[config.gradient.name].rounds(config.gradient))


def publishes_means(config: Config) -> bool:
    """Whether servers tell means of ternary gradients, from which replicas learn."""
    terngrad = config.gradient.find(TernGradSettings)
    return terngrad is not None and terngrad.pull == "levels"
