"""Every compressor of gradients, as rows of a table: a new method adds its rows here.

Shapes: N elements of a tensor.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations, product
from typing import Any, Literal, get_args

import numpy as np
import torch
from method_rows import Joins, gradient_itself
from numpy.typing import NDArray
from torch import Tensor

from dlrm_hybrid.compress.gradient.compressor import Compressor
from dlrm_hybrid.compress.gradient.error_feedback import Drain, ErrorFeedback, FeedbackOptions
from dlrm_hybrid.compress.gradient.layout import Layout, Spec
from dlrm_hybrid.compress.gradient.methods.dct import Dct
from dlrm_hybrid.compress.gradient.methods.dgc import Dgc
from dlrm_hybrid.compress.gradient.methods.thresholded import DrainMode, Renewal, Thresholded
from dlrm_hybrid.compress.gradient.methods.topk import CountedThreshold, ExactThreshold, TopK
from dlrm_hybrid.compress.gradient.thresholded import ThresholdSelector
from dlrm_hybrid.compress.gradient.transforms import Transform
from dlrm_hybrid.wire.section import Dtype, Section
from dlrm_hybrid.wire.sparse import sparse_of
from dlrm_hybrid.wire.ternary import is_ternary, ternary_of

SPECS = (
    Spec(4, "layer.weight", (16, 20)),
    Spec(1, "layer.bias", (16,)),
    Spec(7, "last.bias", (1,)),
    Spec(9, "none.weight", (0, 3)),
)
RULES = {"exact": ExactThreshold(), "histogram": CountedThreshold()}


@dataclass(frozen=True, slots=True)
class Options:
    """Of error feedback whose selector has thresholds."""

    selector: ThresholdSelector
    feedback: FeedbackOptions


@dataclass(frozen=True, slots=True)
class Row:
    """A compressor and what is special about it.

    Attributes:
        name: of the row.
        options: of its error feedback.
        checks: it refuses what is not finite; otherwise it passes it on.
        drops: a step may lose residual, by the ledger "<tensor>.drains".
        joins, sends_largest, sends_always, rounds, has_threshold: as of method_rows.MethodRow.
    """

    name: str
    options: Options
    checks: bool
    drops: bool
    rounds: bool
    joins: Joins = gradient_itself
    sends_largest: bool = True
    sends_always: bool = False
    has_threshold: bool = True

    def make(self, specs: Sequence[Spec]) -> Compressor:
        """A fresh compressor for some tensors."""
        return sparsifier(specs, self.options)


def options_of(
    *,
    sparsity: float = 0.9,
    rule: str = "histogram",
    steps: int = 5,
    renewal: Renewal = "controlled",
    staggered: bool = False,
    dtype: Dtype = Dtype.FLOAT32,
    drain: DrainMode = "none",
    every: int = 3,
    transforms: Sequence[Transform] = (),
    scope: Literal["tensor", "stage"] = "tensor",
    sends_ties: bool = True,
    warm: int = 0,
) -> Options:
    shared = {"density": 1 - sparsity, "scope": scope, "lifespan": steps, "renewal": renewal}
    settings: Thresholded = Dct(**shared, staggered=staggered) if sends_ties else TopK(**shared)
    if warm:
        settings = Dgc(**shared, warmup_sparsities=(0.25, 0.5), warmup_steps=warm)
    selector = ThresholdSelector(settings, RULES[rule])
    drains = Drain(mode=drain, every=every, seed=11, trainer=2)
    return Options(selector, FeedbackOptions(dtype=dtype, transforms=transforms, drain=drains))


def sparsifier(specs: Sequence[Spec], options: Options) -> ErrorFeedback:
    return ErrorFeedback(Layout(specs), options.selector, options.feedback)


def pairwise(*choices: Sequence[Any]) -> Iterator[tuple[Any, ...]]:
    """Few of the choices' product, in which any two choices meet; greedily.

    What goes wrong where three choices meet only is left to the fuzzers.
    """
    rows = list(product(*choices))
    missing = {pair for row in rows for pair in combinations(enumerate(row), 2)}
    while missing:
        best = max(rows, key=lambda row: len(missing.intersection(combinations(enumerate(row), 2))))
        missing.difference_update(combinations(enumerate(best), 2))
        yield best


def _sparsifiers() -> Iterator[Row]:
    dtypes = (Dtype.FLOAT32, Dtype.BFLOAT16, Dtype.FLOAT16)
    choices = pairwise([*RULES], dtypes, get_args(DrainMode), get_args(Renewal))
    for rule, dtype, drain, renewal in choices:
        staggered = dtype is Dtype.FLOAT16 and renewal == "fixed"
        options = options_of(
            rule=rule, dtype=dtype, drain=drain, renewal=renewal, staggered=staggered
        )
        yield Row(
            f"{rule}-{dtype.name.lower()}-{drain}-{renewal}",
            options,
            checks=True,
            drops=drain == "discard",
            rounds=dtype is not Dtype.FLOAT32,
            sends_largest=drain == "none",
        )


ROWS = [*_sparsifiers()]


def gradients_of(step: int, specs: Sequence[Spec] = SPECS) -> dict[str, Tensor]:
    """Heavy-tailed gradients of a step, some of them zero."""
    rng = np.random.default_rng(step)
    draws = {spec.name: rng.standard_t(3, spec.shape) for spec in specs}
    return {
        name: torch.from_numpy((draw * (rng.random(draw.shape) < 0.8)).astype(np.float32))
        for name, draw in draws.items()
    }


def decoded(section: Section) -> NDArray[np.float32]:
    """What the receiver of a section adds."""
    if is_ternary(section):
        return ternary_of(section)
    sent = sparse_of(section)
    dense_N = np.zeros(section.count, np.float32)
    dense_N[sent.indices_K] = sent.values_K
    return dense_N


def residual_of(compressor: Compressor, spec: Spec) -> NDArray[np.float32]:
    """A copy, flat; zeros where nothing is kept."""
    view = compressor.tensors().get(f"{spec.name}.residual", torch.zeros(spec.shape))
    return view.reshape(-1).numpy().copy()


def state_of(compressor: Compressor) -> dict[str, bytes]:
    """Bits of all state."""
    return {name: view.numpy().tobytes() for name, view in compressor.tensors().items()}
