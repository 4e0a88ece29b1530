"""Measures what checkpoints cost of a run's time, as a Markdown table.

    python scripts/costs/checkpoint.py --repeats 3
    python scripts/costs/checkpoint.py --every 100 train.steps=1005

A single process and a world of processes train with and without checkpoints, in turns. `stands
still` is the share of the time between the first and the last point of the loss curve for which
training waits for copies; `slower` compares that time with the one without checkpoints in the same
turn, including the cost of writing in the background. Other arguments are overrides of every run.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from dlrm_hybrid.report.runs import Run
from dlrm_hybrid.telemetry.events import Kind

sys.path.append(str(Path(__file__).parents[1] / "benchmarks"))
from harness import Page, Row, arguments, publish, spread, train_once

COMMON = ("data.rows=100000", "train.steps=3005", "train.epochs=100", "train.evaluate_every=0")
WORLDS = {"single": ("parallel=single",), "hybrid": ("parallel=hybrid",)}


@dataclass(frozen=True, slots=True)
class Cost:
    """Of a run with checkpoints.

    Attributes:
        num_bytes: of the last one.
        pauses: seconds for which training stood still, by checkpoint.
        background: seconds until each was valid.
        seconds: between the first and the last point of the loss curve.
    """

    num_bytes: int
    pauses: Sequence[float]
    background: Sequence[float]
    seconds: float


def main() -> None:
    """Train by turns, print the table."""
    parser = arguments(__doc__, repeats=3)
    parser.add_argument("--every", type=int, default=1000, help="steps")
    parser.add_argument("--worlds", nargs="+", choices=tuple(WORLDS), default=tuple(WORLDS))
    options, overrides = parser.parse_known_args()

    def measure() -> Page:
        found: dict[str, list[tuple[Cost, Cost]]] = {name: [] for name in options.worlds}
        with TemporaryDirectory() as folder:
            for turn in range(options.repeats):
                for name, costs in found.items():
                    given = (*WORLDS[name], *COMMON, "checkpoint.minutes=0", *overrides)
                    never, every = (
                        cost(
                            train_once(
                                Path(folder, f"{name}-{turn}-{steps}"),
                                *given,
                                f"checkpoint.every={steps}",
                            )
                        )
                        for steps in (0, options.every)
                    )
                    costs.append((never, every))
        return {"What checkpoints cost": [row(name, costs) for name, costs in found.items()]}

    publish(measure, options.output)


def cost(run: Run) -> Cost:
    """What a run's record says; the checkpoint at its end is left out."""
    points = [event for event in run.events if event.kind is Kind.PROGRESS]
    saved = [event for event in run.events if event.kind is Kind.SAVED]
    inside = [event.values for event in saved if event.step < points[-1].step]
    return Cost(
        num_bytes=saved[-1].values["num_bytes"],
        pauses=[values["seconds"] for values in inside],
        background=[values["background_seconds"] for values in inside],
        seconds=points[-1].time_seconds - points[0].time_seconds,
    )


def row(name: str, costs: Sequence[tuple[Cost, Cost]]) -> Row:
    """One world; the median of its turns, with the lowest and the highest."""
    saving = [every for _, every in costs]
    return {
        "world": name,
        "MB": saving[-1].num_bytes / 1e6,
        "checkpoints": sum(len(one.pauses) for one in saving),
        "pause, ms": spread([1e3 * pause for one in saving for pause in one.pauses], 1),
        "in the background, s": spread([each for one in saving for each in one.background], 2),
        "stands still, %": spread([100 * sum(one.pauses) / one.seconds for one in saving], 2),
        "slower": spread([every.seconds / never.seconds for never, every in costs], 3),
    }


if __name__ == "__main__":
    main()
