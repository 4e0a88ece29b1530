"""Shows how far runs are behind a baseline that sees the same rows in the same order.

    python scripts/studies/gap.py --baseline RUN... --runs RUN... --output gap.png

They are compared step by step: test log-loss where both were evaluated (diamonds), and training
loss, a mean over the last tenth of the run before each point (lines). Runs whose names differ only
in the final `_<seed>` are averaged.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

import pandas as pd
from frame import Frame, arguments
from matplotlib.figure import Figure

from dlrm_hybrid.report.drawing import add_key, draw_line, drawing, panels, save
from dlrm_hybrid.report.figures import AxesText, Line
from dlrm_hybrid.report.runs import Run, read_runs
from dlrm_hybrid.telemetry.events import Kind, curve
from dlrm_hybrid.types import ConfigError

SMOOTH_PART = 10
SIZE_INCHES = (8.0, 4.2)
KEY_COLUMNS = 3


def gaps(baselines: Sequence[Run], runs: Sequence[Run]) -> list[Line]:
    """A line for each name of a run's folder but for the `_<seed>` behind it; seeds are averaged.

    Raises:
        ConfigError: no baseline has the seed of a run.
    """
    by_seed = {_seed(run): run for run in baselines}
    pairs: defaultdict[str, list[tuple[Run, Run]]] = defaultdict(list)
    for run in runs:
        if _seed(run) not in by_seed:
            raise ConfigError(f"{run.folder}: no baseline has its train.seed = {_seed(run)}")
        name = run.folder.name
        pairs[name.rpartition("_")[0] or name].append((run, by_seed[_seed(run)]))
    return [_line(number, name, pairs[name]) for number, name in enumerate(pairs)]


def figure(drawn: Sequence[Line]) -> Figure:
    """All gaps; 0 is the baseline."""
    with drawing():
        picture, (axes,) = panels(
            SIZE_INCHES, [AxesText("training steps", "log-loss against baseline, %")], [1.0]
        )
        axes.axhline(0, color="#1a1a1a", linewidth=0.8)
        for line in drawn:
            draw_line(axes, line)
        add_key(picture, KEY_COLUMNS)
        return picture


def smooth(losses: Frame) -> Frame:
    """The moving mean of a tenth of the run; starts where its window is full."""
    return losses.rolling(max(1, len(losses) // SMOOTH_PART)).mean().dropna()


def gap(losses: Frame, baseline: Frame) -> Frame:
    """How much higher the first is, in percent, at the steps that both have."""
    return (100 * (losses / baseline - 1)).dropna()


def averaged(losses: Sequence[Frame]) -> Frame:
    """The mean at the steps that all have."""
    return pd.concat(losses, axis=1, join="inner").mean(axis=1)


def _line(number: int, name: str, pairs: Sequence[tuple[Run, Run]]) -> Line:
    training = averaged([gap(smooth(_trained(run)), smooth(_trained(base))) for run, base in pairs])
    tested = averaged([gap(_tested(run), _tested(base)) for run, base in pairs])
    return Line(
        label=f"{name}, {len(pairs)} seed{'s' if len(pairs) > 1 else ''}",
        number=number,
        curve=training if len(training) else None,
        dots=tested if len(tested) else None,
    )


def _seed(run: Run) -> int:
    return run.config["train"]["seed"]


def _trained(run: Run) -> Frame:
    """Training loss of each interval by its last step."""
    found = {event.step: event.values["loss"] for event in curve(run.events)}
    return pd.Series(found, dtype=float)


def _tested(run: Run) -> Frame:
    """Test log-loss by step."""
    found = (event for event in run.events if event.kind is Kind.EVALUATED)
    return pd.Series({event.step: event.values["log_loss"] for event in found}, dtype=float)


def main() -> None:
    """Read the run folders of the command line and write the picture."""
    parser = arguments(__doc__)
    parser.add_argument("--baseline", nargs="+", type=Path, required=True, help="run folders")
    parser.add_argument("--runs", nargs="+", type=Path, required=True, help="run folders")
    options = parser.parse_args()
    drawn = gaps(read_runs(options.baseline), read_runs(options.runs))
    save(figure(drawn), options.output)


if __name__ == "__main__":
    main()
