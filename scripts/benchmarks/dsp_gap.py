"""Measures how far gradients of `schedule=dsp` are from backpropagation's: figure 4 of its paper.

    python -m dlrm_hybrid prepare data.rows=1170000
    python scripts/benchmarks/dsp_gap.py data.rows=1170000 --output gap.png

Trains in this process, once for each staleness of the paper. For some batches each stage's
gradient, computed with its weights at the backward, is compared with the one that backpropagation
gives with the weights of the batch's forward (Lemma 1): |stale - exact| / |exact|. Table rows are
those of the forward in both. Prints means over the run, and draws them over the batches. Other
arguments are overrides of every run.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from harness import Page, Row, arguments, each, publish
from lists import ALONE, NO_CHECKPOINTS, STALE
from matplotlib.figure import Figure
from torch import Tensor

from dlrm_hybrid.config.compose import values_of
from dlrm_hybrid.config.schema import Config
from dlrm_hybrid.config.validate import validate
from dlrm_hybrid.data.loader import START
from dlrm_hybrid.data.shards import open_shards
from dlrm_hybrid.model.row_storage import IN_MEMORY
from dlrm_hybrid.parallel.stage import Inputs, Stage, StageResult
from dlrm_hybrid.report.drawing import add_key, drawing, panels, save, style
from dlrm_hybrid.report.figures import AxesText
from dlrm_hybrid.run.assembly import build, model
from dlrm_hybrid.run.assembly import engine as build_engine
from dlrm_hybrid.run.assembly import world as build_world
from dlrm_hybrid.train.in_process import InProcessEngine
from dlrm_hybrid.types import BatchNumber

TRAINED = (*ALONE, *NO_CHECKPOINTS, "parallel.world=in_process", "optimizer.schedule=linear")
WINDOWS = ((0.01, 0.05), (0.1, 0.2), (0.45, 0.55), (0.9, 1.0))  # of a run
SMOOTH_PART = 20
SIZE_INCHES = (7.0, 4.0)

Gaps = Any
"""A pandas DataFrame: a row for each batch that was looked at, a column for each stage."""


def main() -> None:
    """Train, print the table, write the picture."""
    parser = arguments(__doc__)
    parser.add_argument("--every", type=int, default=20, help="look at each so many batches")
    parser.add_argument("--warmup", type=int, default=2000, help="steps")
    parser.add_argument("--output", type=Path, required=True, help="a PNG or SVG file")
    options, overrides = parser.parse_known_args()
    found: dict[str, Gaps] = {}

    def measure() -> Page:
        for name, words in each("gradients", list(STALE.items())):
            warm = f"optimizer.staleness_warmup_steps={options.warmup}"
            config = validate(values_of([*TRAINED, *words, warm, *overrides]))
            found[name] = gaps(config, options.every)
        rows = [row for name, one in found.items() for row in rows_of(name, one)]
        return {"Gradients of DSP against exact ones": rows}

    publish(measure)
    save(figure(found), options.output)


def gaps(config: Config, every: int) -> Gaps:
    """Train as configured; how far gradients of each stage are from exact ones, by batch."""
    model.prepare_torch(config)
    shards = open_shards(build.prepared_folder(config), build.semantics(config))
    steps = model.plan(config, shards).steps
    engine = build_engine.engine(config, shards, steps, IN_MEMORY)
    layout = build_world.layout(config, build.shape_of(config, shards.manifest), steps, attempt=0)
    stages = range(layout.topology.stages)
    probes = Probes(every, [Stage(build_world.stage_model(layout, k), 1) for k in stages])
    watch(engine, probes)
    at = START
    for step in range(steps):
        _, at = engine.make_step(step, at)
    engine.drain()
    return pd.DataFrame(probes.found).sort_index().T.sort_index()


def watch(engine: InProcessEngine, probes: Probes) -> None:
    """Let the probes see what the only trainer's stages do."""
    learners = [
        replace(one, worker=replace(one.worker, stage=_watched(one.worker.stage, probes)))
        for one in engine.ranks.learners
    ]
    engine.ranks = replace(engine.ranks, learners=learners)


@dataclass(slots=True, eq=False)
class Probe:
    """A batch that is looked at.

    Attributes:
        inputs: of each stage.
        weights: of each stage, when the batch came to its forward there.
        pooled_BFD: its rows of the tables.
        exact: gradients of each stage, once all weights are known.
    """

    inputs: list[Inputs] = field(default_factory=list[Inputs])
    weights: list[Mapping[str, Tensor]] = field(default_factory=list[Mapping[str, Tensor]])
    pooled_BFD: Tensor | None = None
    exact: Sequence[Mapping[str, Tensor]] = ()


@dataclass(slots=True, eq=False)
class Probes:
    """Looks at some batches.

    Attributes:
        every: so many.
        stages: of their own, to compute exact gradients with.
        found: the gap of each stage, by batch.
    """

    every: int
    stages: Sequence[Stage]
    found: dict[int, dict[int, float]] = field(default_factory=dict[int, dict[int, float]])
    _flying: dict[BatchNumber, Probe] = field(default_factory=dict[BatchNumber, Probe])

    def begin(self, batch: BatchNumber, inputs: Inputs) -> None:
        """A stage has read a batch; the first stage is the first."""
        if batch % self.every == 0:
            self._flying.setdefault(batch, Probe()).inputs.append(inputs)

    def take_rows(self, batch: BatchNumber, pooled_BFD: Tensor) -> None:
        """What it has looked up."""
        if batch in self._flying:
            self._flying[batch].pooled_BFD = pooled_BFD.clone()

    def forward(self, batch: BatchNumber, stage: Stage) -> None:
        """It is about to go through a stage; behind the last one all that it meets is known."""
        probe = self._flying.get(batch)
        if probe is None:
            return
        weights = stage.model.dense_parameters()
        probe.weights.append({name: one.detach().clone() for name, one in weights.items()})
        if len(probe.weights) == len(self.stages):
            probe.exact = exact_gradients(self.stages, batch, probe)

    def finish(self, batch: BatchNumber, stage: int, result: StageResult) -> None:
        """A stage is about to learn from it; the first stage is the last."""
        probe = self._flying.get(batch)
        if probe is None:
            return
        exact = _flat(probe.exact[stage])
        squared = (_flat(result.gradients) - exact).square().sum() / exact.square().sum()
        self.found.setdefault(batch, {})[stage] = float(squared.sqrt())
        if stage == 0:
            del self._flying[batch]


def exact_gradients(
    stages: Sequence[Stage], batch: BatchNumber, probe: Probe
) -> list[Mapping[str, Tensor]]:
    """Of each stage, by ordinary backpropagation with the weights of the forward."""
    left: Tensor | None = None
    for stage, inputs, weights in zip(stages, probe.inputs, probe.weights, strict=True):
        for name, weight in stage.model.dense_parameters().items():
            weight.detach().copy_(weights[name])
        pooled_BFD = probe.pooled_BFD if stage.model.part.has_interaction else None
        stage.begin(batch, inputs, pooled_BFD)
        left = stage.forward(batch, 0, left)
    found: list[Mapping[str, Tensor]] = []
    gradient: Tensor | None = None
    for stage in reversed(stages):
        gradient = stage.backward(batch, 0, gradient)
        found.append(stage.finish(batch).gradients)
    return found[::-1]


def _flat(gradients: Mapping[str, Tensor]) -> Tensor:
    return torch.cat([one.flatten() for _, one in sorted(gradients.items())])


def _watched(stage: Stage, probes: Probes) -> Any:
    """A stage of which the probes are told."""

    class Watched:
        def __getattr__(self, name: str) -> Any:
            return getattr(stage, name)

        def __contains__(self, batch: BatchNumber) -> bool:
            return batch in stage

        def begin(self, batch: BatchNumber, inputs: Inputs) -> None:
            probes.begin(batch, inputs)
            stage.begin(batch, inputs)

        def take_rows(self, batch: BatchNumber, pooled_BFD: Tensor) -> None:
            probes.take_rows(batch, pooled_BFD)
            stage.take_rows(batch, pooled_BFD)

        def forward(self, batch: BatchNumber, *arguments: Any) -> Tensor | None:
            probes.forward(batch, stage)
            return stage.forward(batch, *arguments)

        def finish(self, batch: BatchNumber) -> StageResult:
            result = stage.finish(batch)
            probes.finish(batch, stage.model.part.index, result)
            return result

    return Watched()


def rows_of(name: str, found: Gaps) -> list[Row]:
    """A row for each stage: means over some parts of the run."""
    last = found.index[-1]
    parts = {f"{a:.0%} – {b:.0%}": found.loc[a * last : b * last].mean() for a, b in WINDOWS}
    return [
        {
            "staleness": name,
            "stage": stage,
            **{title: f"{means[stage]:.4f}" for title, means in parts.items()},
        }
        for stage in found.columns
    ]


def figure(found: Mapping[str, Gaps]) -> Figure:
    """A line for each stage that is stale, moving means over a twentieth of the run."""
    text = AxesText("batches", "|stale − exact| / |exact|")
    with drawing():
        picture, (panel,) = panels(SIZE_INCHES, [text], [1.0])
        for number, (name, one) in enumerate(found.items()):
            smooth = one.rolling(max(1, len(one) // SMOOTH_PART)).mean()
            for stage, dashes in zip(one.columns[:-1], ("solid", (0, (4, 2))), strict=True):
                panel.plot(
                    smooth[stage],
                    color=style(number).color,
                    linestyle=dashes,
                    label=f"{name}, stage {stage}",
                )
        panel.set_ylim(bottom=0.0)
        add_key(picture, 3)
        return picture


if __name__ == "__main__":
    main()
