"""CPU time of a whole step's compression, on gradients of a DLRM that learns."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import product
from statistics import median

import numpy as np
import torch
from kernels_gradient import seconds
from numpy.typing import NDArray
from plain_dlrm import PlainDlrm, PlainTraining, RowDataset, plain_loader
from random_rows import draw_rows
from table import Progress, Row, silent, told
from torch import Tensor

from dlrm_hybrid.compress.gradient.collective import together
from dlrm_hybrid.compress.gradient.compressor import Compressor
from dlrm_hybrid.compress.gradient.error_feedback import ErrorFeedback, FeedbackOptions
from dlrm_hybrid.compress.gradient.layout import Layout, Spec, layout_of
from dlrm_hybrid.compress.gradient.target import Mode, Renewal, Scope, SparsityTarget
from dlrm_hybrid.compress.gradient.thresholded import Thresholded
from dlrm_hybrid.compress.gradient.thresholds.exact import Exact
from dlrm_hybrid.compress.gradient.thresholds.histogram import Histogram
from dlrm_hybrid.compress.gradient.thresholds.rule import ThresholdRule
from dlrm_hybrid.model.spec import ModelSpec
from dlrm_hybrid.wire.section import Dtype, Section

# The paper's 8 layers; small tables, for their gradients are not compressed.
SPEC = ModelSpec(
    embedding_dim=16,
    bottom=(13, 512, 256, 64, 16),
    top=(512, 256, 128, 1),
    table_rows=(1000,) * 26,
)
SPARSITY = 0.99
BATCH = 128
LR = 0.1
SEED = 0
GOAL_MS = 0.5
LIFE = 1000
OTHERS = 4_000_000  # numbers that displace

Gradients = Mapping[str, Tensor]


@dataclass(frozen=True, slots=True)
class Method:
    """One way to select what is sent."""

    name: str
    rule: ThresholdRule
    mode: Mode
    steps: int
    goal_ms: float | None


METHODS = (
    Method("controlled, L = 1000", Histogram(), Mode.CONTROLLED, LIFE, GOAL_MS),
    Method("fixed, L = 1000", Histogram(), Mode.FIXED, LIFE, None),
    Method("every step, by counting", Histogram(), Mode.FIXED, 1, None),
    Method("every step, by sorting", Exact(), Mode.FIXED, 1, None),
)


def dlrm_gradients(steps: int, progress: Progress = silent) -> list[Gradients]:
    """Gradients of the 8 layers over some steps of plain training on random rows."""
    rows = draw_rows(SPEC.table_rows, steps * BATCH, SEED)
    model = PlainDlrm(SPEC, SEED)
    training = PlainTraining(model, LR)
    made: list[Gradients] = []
    batches = plain_loader(RowDataset(rows.counts_RI, rows.ids_RF, rows.label_R), BATCH)
    for batch, _ in zip(
        batches, told("gradients to compress", range(steps), progress), strict=True
    ):
        training.step(batch)
        made.append(dict(_gradients(model)))
    return made


def accumulated(gradients: list[Gradients]) -> dict[str, NDArray[np.float32]]:
    """The largest layer's gradient of the last step, and what all steps add up to."""
    name = "top.1.weight"
    total = torch.stack([one[name] for one in gradients]).sum(0)
    last = gradients[-1][name]
    return {
        "DLRM gradient": last.view(-1).numpy(),
        f"DLRM gradient, {len(gradients)} steps": total.view(-1).numpy(),
    }


def measure_encode(gradients: list[Gradients], progress: Progress = silent) -> list[Row]:
    """A row for every method and type of value; medians over all steps but the first tenth.

    A pass adds the gradients of all layers to the residuals with `Tensor.add_`. Caches are cold
    after other numbers and other Python code, as where several ranks share a core.
    """
    dtypes = (Dtype.FLOAT32, Dtype.BFLOAT16)
    cases = told("gradients of a step", list(product(METHODS, dtypes)), progress)
    return [_encode_row(method, dtype, gradients) for method, dtype in cases]


def _encode_row(method: Method, dtype: Dtype, gradients: list[Gradients]) -> Row:
    specs = [
        Spec(place, name, tuple(one.shape))
        for place, (name, one) in enumerate(gradients[0].items())
    ]
    layout = layout_of(specs)
    compressor, displaced = (_compressor(layout, method, dtype) for _ in range(2))
    others_N = np.zeros(OTHERS, np.float32)
    sums = [torch.zeros(spec.shape) for spec in specs]
    given = {spec.name: torch.zeros(spec.shape) for spec in specs}
    rounds: list[tuple[float, float, float]] = []
    num_bytes = 0
    for step, fresh in enumerate(gradients):
        sections: dict[str, Section] = {}
        _copy(given, fresh)
        ours = seconds(partial(_encode, compressor, given, step, sections))
        _copy(given, fresh)
        one_pass = seconds(partial(_add, sums, given))
        _displace(others_N)
        rounds.append((ours, one_pass, seconds(partial(_encode, displaced, given, step, {}))))
        num_bytes += sum(len(section.payload) for section in sections.values())
    counted = rounds[len(rounds) // 10 :]
    milliseconds = 1e3 * median(ours for ours, *_ in counted)
    reports = compressor.report().values()
    sent = sum(report.sent for report in reports)
    return {
        "threshold renewed": method.name,
        "values": dtype.name.lower(),
        "encode, ms": milliseconds,
        "encode / pass": median(ours / one_pass for ours, one_pass, _ in counted),
        "caches cold, ms": 1e3 * median(cold for *_, cold in counted),
        "goal, ms": method.goal_ms,
        "reached": _reached(milliseconds, method.goal_ms),
        "sent": sent / sum(report.elements for report in reports),
        "bytes per element sent": num_bytes / sent,
        "renewals per tensor": sum(report.renewals for report in reports) / len(specs),
    }


def _encode(compressor: Compressor, given: Gradients, step: int, out: dict[str, Section]) -> None:
    (sections,) = together([compressor.encode(given, step)], step, 0)
    out.update(sections)


def _copy(given: Gradients, fresh: Gradients) -> None:
    """Write gradients where the step before had its own, as a backward pass does."""
    for name, gradient in fresh.items():
        given[name].copy_(gradient)


def _displace(others_N: NDArray[np.float32]) -> None:
    """Leave nothing in a core's caches of what an encoder reads and runs."""
    others_N += 1
    " ".join(str(number) for number in range(20_000))


def _add(sums: list[Tensor], given: Gradients) -> None:
    for total, gradient in zip(sums, given.values(), strict=True):
        total.add_(gradient)


def _reached(milliseconds: float, goal: float | None) -> str | None:
    if goal is None:
        return None
    return "yes" if milliseconds <= goal else "no"


def _compressor(layout: Layout, method: Method, dtype: Dtype) -> Compressor:
    selector = Thresholded(
        target=SparsityTarget(
            sparsity=SPARSITY,
            scope=Scope.TENSOR,
            sends_ties=True,
            warmup_sparsities=(),
            warmup_steps=0,
        ),
        rule=method.rule,
        renewal=Renewal(steps=method.steps, mode=method.mode, staggered=False),
    )
    return ErrorFeedback(layout, selector, FeedbackOptions(dtype=dtype))


def _gradients(model: PlainDlrm) -> Iterator[tuple[str, Tensor]]:
    for name, layer in model.linears().items():
        for part, parameter in layer.named_parameters():
            if parameter.grad is not None:
                yield f"{name}.{part}", parameter.grad.clone()
