"""CPU time, bytes and error of every method of gradients, as conf/ has it, over steps.

Shapes: N elements of a tensor.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import product
from math import sqrt
from statistics import median
from typing import Protocol, final

import numpy as np
import torch
from kernels_gradient import DENSITIES, SEED, SHIFT, seconds
from numpy.typing import NDArray
from table import Progress, Row, silent, told
from torch import Tensor

from dlrm_hybrid.compress.gradient.collective import together
from dlrm_hybrid.compress.gradient.compressor import Compressor
from dlrm_hybrid.compress.gradient.layout import Spec, layout_of
from dlrm_hybrid.compress.gradient.methods import methods
from dlrm_hybrid.config.compose import values_of
from dlrm_hybrid.config.schema import Config
from dlrm_hybrid.config.validate import validate
from dlrm_hybrid.run.assembly import gradient as build_gradient
from dlrm_hybrid.wire.section import Section
from dlrm_hybrid.wire.sparse import Sparse, sparse_of
from dlrm_hybrid.wire.ternary import is_ternary, ternary_of

Gradients = Mapping[str, Tensor]

SETTLING = 8  # steps before the first that counts
WORLD = ("parallel=hybrid", "parallel.trainers=1")
# The figures are those of the density that is asked for, not of a warm-up.
OPTIONS = {"dgc": ("gradient.correction.warmup_steps=0",)}
LAYERS = "8 layers"


class Source(Protocol):
    """Gradients to compress."""

    @property
    def name(self) -> str:
        """Of the tensors."""
        ...

    def specs(self) -> list[Spec]:
        """The tensors."""
        ...

    def gradients(self, step: int) -> Gradients:
        """Those of a step, valid until the next call."""
        ...


@final
class Drawn:
    """One tensor of values by a Laplace distribution, other ones at every step."""

    def __init__(self, size: int, steps: int) -> None:
        self.name = f"{size:,}"
        self._size = size
        rng = np.random.default_rng(SEED)
        self._stream = rng.laplace(size=size + SHIFT * steps).astype(np.float32)
        self._gradient = torch.empty(size)

    def specs(self) -> list[Spec]:
        """See `Source`."""
        return [Spec(0, "drawn", (self._size,))]

    def gradients(self, step: int) -> Gradients:
        """See `Source`."""
        np.copyto(self._gradient.numpy(), self._stream[SHIFT * step :][: self._size])
        return {"drawn": self._gradient}


@final
@dataclass(frozen=True, slots=True)
class Layers:
    """Gradients of the paper's layers over steps of plain training."""

    made: Sequence[Gradients]

    @property
    def name(self) -> str:
        """See `Source`."""
        return LAYERS

    def specs(self) -> list[Spec]:
        """See `Source`."""
        return [
            Spec(place, name, tuple(one.shape))
            for place, (name, one) in enumerate(self.made[0].items())
        ]

    def gradients(self, step: int) -> Gradients:
        """See `Source`."""
        return self.made[step]


@dataclass(frozen=True, slots=True)
class _Turn:
    encode: float
    topk: float
    one_pass: float
    sent: int
    num_bytes: int
    error: float


def measure_methods(source: Source, repeats: int, progress: Progress = silent) -> list[Row]:
    """A row for every density and method; medians over `repeats` steps after settling."""
    return [
        _row(source, density, method, list(_turns(source, density, method, repeats)))
        for density, method in told(
            f"methods, {source.name}", list(product(DENSITIES, methods())), progress
        )
    ]


def _turns(source: Source, density: float, method: str, repeats: int) -> Iterator[_Turn]:
    specs = source.specs()
    compressor = _compressor(method, density, specs)
    elements = sum(spec.count for spec in specs)
    sums = [torch.zeros(spec.shape) for spec in specs]
    for step in range(SETTLING + repeats):
        gradients = source.gradients(step)
        start = time.thread_time()
        (sections,) = together([compressor.encode(gradients, step)], step, elements)
        took = time.thread_time() - start
        if step >= SETTLING:
            topk, one_pass = _references(gradients, sums, density)
            yield _Turn(
                encode=took,
                topk=topk,
                one_pass=one_pass,
                sent=sum(_held(section).indices_K.size for section in sections.values()),
                num_bytes=sum(len(section.payload) for section in sections.values()),
                error=_error(compressor, gradients, sections),
            )


def _references(gradients: Gradients, sums: list[Tensor], density: float) -> tuple[float, float]:
    """Seconds of torch.topk of each tensor's magnitudes, and of adding gradients to sums."""
    sizes = [gradient.abs().view(-1) for gradient in gradients.values()]
    keeps = [max(1, int(density * one.numel())) for one in sizes]
    return seconds(lambda: _topk(sizes, keeps)), seconds(lambda: _add(sums, gradients))


def _compressor(method: str, density: float, specs: list[Spec]) -> Compressor:
    """Of the only trainer."""
    config = _configured(method)
    if methods()[method].is_sparse:
        config = replace(config, gradient=replace(config.gradient, sparsity=1 - density))
    return build_gradient.compressor(
        config,
        layout_of(specs),
        trainer=0,
        model_elements=sum(spec.count for spec in specs),
        steps=1,
    )


@cache
def _configured(method: str) -> Config:
    return validate(values_of([*WORLD, f"gradient={method}", *OPTIONS.get(method, ())]))


def _topk(sizes: list[Tensor], keeps: list[int]) -> None:
    for one, keep in zip(sizes, keeps, strict=True):
        torch.topk(one, keep, sorted=False)


def _add(sums: list[Tensor], gradients: Gradients) -> None:
    for total, gradient in zip(sums, gradients.values(), strict=True):
        total.add_(gradient)


def _error(compressor: Compressor, gradients: Gradients, sections: Mapping[str, Section]) -> float:
    """The norm of what was not sent, relative to what might have been."""
    state = compressor.tensors()
    left = total = 0.0
    for name, section in sections.items():
        sent = _held(section)
        whole_N = np.zeros(section.count)
        whole_N[sent.indices_K] = sent.values_K
        residual = state.get(f"{name}.residual")
        if residual is None:
            rest_N: NDArray[np.float64] = gradients[name].view(-1).numpy() - whole_N
        else:
            rest_N = residual.view(-1).numpy().astype(np.float64)
        left += float(np.square(rest_N).sum())
        total += float(np.square(rest_N + whole_N).sum())
    return sqrt(left / total)


def _held(section: Section) -> Sparse:
    """What a section says of which elements."""
    if is_ternary(section):
        return Sparse(np.arange(section.count, dtype=np.int32), ternary_of(section))
    return sparse_of(section)


def _row(source: Source, density: float, method: str, turns: list[_Turn]) -> Row:
    keep = sum(max(1, int(density * spec.count)) for spec in source.specs())
    is_sparse = methods()[method].is_sparse
    return {
        "elements": source.name,
        "density": density,
        "method": method,
        "encode, µs": 1e6 * median(turn.encode for turn in turns),
        "topk / encode": median(turn.topk / turn.encode for turn in turns),
        "encode / pass": median(turn.encode / turn.one_pass for turn in turns),
        "k̂ / k": median(turn.sent / keep for turn in turns) if is_sparse else None,
        "bytes per element sent": median(turn.num_bytes / max(1, turn.sent) for turn in turns),
        "relative error": median(turn.error for turn in turns),
    }
