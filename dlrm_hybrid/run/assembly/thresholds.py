"""From the configuration to the rules that find thresholds; imports torch, for the ranks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from dlrm_hybrid.compress.gradient.layout import Layout
from dlrm_hybrid.compress.gradient.thresholds.dgc import Dgc
from dlrm_hybrid.compress.gradient.thresholds.exact import Exact
from dlrm_hybrid.compress.gradient.thresholds.gaussian import Fit, Gaussian
from dlrm_hybrid.compress.gradient.thresholds.hard import Hard, usual_magnitude
from dlrm_hybrid.compress.gradient.thresholds.histogram import Histogram
from dlrm_hybrid.compress.gradient.thresholds.redsync import Redsync, Search
from dlrm_hybrid.compress.gradient.thresholds.rule import ThresholdRule, keep_count
from dlrm_hybrid.compress.gradient.thresholds.sidco import Adaptation, Distribution, Sidco
from dlrm_hybrid.config.schema import Config
from dlrm_hybrid.rng import fold


@dataclass(frozen=True, slots=True, kw_only=True)
class Holder:
    """Whose gradients they are.

    Attributes:
        layout: of the dense tensors of the stage.
        trainer: its number.
        model_elements: of all dense tensors of the model.
        lr: learning rate by step.
    """

    layout: Layout
    trainer: int
    model_elements: int
    lr: Callable[[int], float]


Rule = Callable[[Config, Holder], ThresholdRule]


def _dgc(config: Config, holder: Holder) -> ThresholdRule:
    options = config.gradient.dgc
    assert options is not None
    return Dgc(
        part=options.part,
        lowest=options.lowest,
        highest=options.highest,
        seed=fold(config.train.seed, "trainer", holder.trainer),
    )


def _redsync(config: Config, holder: Holder) -> ThresholdRule:
    options = config.gradient.redsync
    assert options is not None
    return Redsync(Search(options.search))


def _gaussian(config: Config, holder: Holder) -> ThresholdRule:
    options = config.gradient.gaussian
    assert options is not None
    return Gaussian(Fit(options.fit))


def _hard(config: Config, holder: Holder) -> ThresholdRule:
    options = config.gradient.hard
    assert options is not None
    keep = keep_count(holder.model_elements, config.gradient.sparsity)
    return Hard(options.magnitude or usual_magnitude(keep))


def _sidco(config: Config, holder: Holder) -> ThresholdRule:
    options = config.gradient.sidco
    assert options is not None
    adaptation = options.adaptation
    return Sidco(
        distribution=Distribution(options.distribution),
        adaptation=adaptation if isinstance(adaptation, int) else Adaptation(adaptation),
        window=options.window,
        tolerance=options.tolerance,
        first_density=options.first_density,
        exact_gamma=options.gamma == "exact",
    )


THRESHOLDS: Mapping[str, Rule] = {
    "exact": lambda config, holder: Exact(),
    "histogram": lambda config, holder: Histogram(),
    "dgc": _dgc,
    "redsync": _redsync,
    "gaussian": _gaussian,
    "hard": _hard,
    "sidco": _sidco,
}
