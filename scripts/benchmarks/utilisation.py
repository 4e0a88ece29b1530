"""Compares speed and utilisation of compressed and uncompressed worlds on links of given rates.

    python scripts/benchmarks/utilisation.py RUNS --rates 100mbit 1gbit --output FILE.png

Trains in RUNS/<rate>/<world>-<turn>, worlds in turns; complete runs are not repeated, so an
interrupted measurement continues. Then prints Markdown tables and draws the picture. Other
arguments are overrides of every run. Needs what `network=emulated` needs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any, final

from harness import Page, Row, arguments, publish, spread, trained
from matplotlib.axes import Axes

from dlrm_hybrid.report.drawing import add_key, drawing, panels, save
from dlrm_hybrid.report.figures import AxesText
from dlrm_hybrid.report.runs import Run
from dlrm_hybrid.report.tables import SPANS, microseconds_by_role

WORLDS = ("baseline", "dct_dp", "dct_mp", "dct_hybrid")
COMMON = (
    *("train.steps=105", "data.rows=300000", "train.evaluate_every=0"),
    *("checkpoint.every=0", "checkpoint.minutes=0"),
)
PAPER = {
    "baseline": {"network": 0.942, "CPU": 0.487},
    "dct_hybrid": {"network": 0.493, "CPU": 0.911},
}
ROOM = 0.06  # of a panel's height, for a number

Turns = Mapping[str, Sequence[Run]]
"""The runs of each world, in the order of the turns."""


def main() -> None:
    """Run what is missing, print the tables, write the picture."""
    parser = arguments(__doc__, runs=True, repeats=3)
    parser.add_argument("--rates", nargs="+", default=["50mbit", "100mbit", "1gbit"])
    more = (*WORLDS, "dct_levels")
    parser.add_argument("--worlds", nargs="+", choices=more, default=WORLDS)
    parser.add_argument("--output", type=Path, required=True, help="a PNG or SVG file")
    options, overrides = parser.parse_known_args()
    found: dict[str, Turns] = {}

    def measure() -> Page:
        for rate in options.rates:
            link = ("network=emulated", f"network.rate={rate}", *COMMON)
            worlds = {name: (f"+experiment={name}", *link) for name in options.worlds}
            found[rate] = trained(options.runs / rate, worlds, overrides, turns=options.repeats)
        tables = {f"Utilisation at {rate}": speeds(rate, turns) for rate, turns in found.items()}
        return tables | {
            f"Where the time goes at {rate}": shares(turns) for rate, turns in found.items()
        }

    publish(measure)
    draw(found, options.output)


def speeds(rate: str, turns: Turns) -> list[Row]:
    """What each world reaches; speeds are held against the first world's, turn by turn."""
    first = next(iter(turns.values()))
    return [
        {
            rate: world,
            "samples/s": spread([speed(run) for run in runs], 0),
            "to the first": spread(faster(runs, first), 1),
            "time saved": f"{1 - 1 / median(faster(runs, first)):.0%}",
            "network, %": spread([network_percent(run) for run in runs], 1),
            "CPU, %": spread([cpu_percent(run) for run in runs], 1),
            "MB/s sent": spread([sent_per_second(run) / 1e6 for run in runs], 2),
            "bytes/sample": f"{median(bytes_per_sample(run) for run in runs):,.0f}",
        }
        for world, runs in turns.items()
    ]


def speed(run: Run) -> float:
    """Training samples in a second of training."""
    return run.summary["samples_per_second"]


def faster(runs: Sequence[Run], base: Sequence[Run]) -> list[float]:
    """Speed in that of the same turn's first world."""
    return [speed(one) / speed(other) for one, other in zip(runs, base, strict=True)]


def network_percent(run: Run) -> float:
    """Of the busiest link's rate."""
    return 100 * run.summary["network"]["utilization"]


def cpu_percent(run: Run) -> float:
    """Of the time of all cores."""
    return 100 * run.summary["cpu"]["utilization"]


def bytes_per_sample(run: Run) -> float:
    """Of all ranks, counted as frames."""
    return run.summary["network"]["bytes_per_sample"]


def sent_per_second(run: Run) -> float:
    """Bytes that all ranks send in a second of training."""
    return bytes_per_sample(run) * speed(run)


def shares(turns: Turns) -> list[Row]:
    """Of the time of each role in percent; medians over turns."""
    rows: list[Row] = []
    for world, runs in turns.items():
        told: list[Any] = [microseconds_by_role(run.summary).to_dict("index") for run in runs]
        for role in told[0]:
            turn = [spent[role] for spent in told]
            share = {
                span: median(100 * one[span] / sum(one.values()) for one in turn) for span in SPANS
            }
            cells = {span: f"{value:.1f}" for span, value in share.items()}
            rows.append({"% of time": world, "role": role, **cells})
    return rows


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Bars:
    """A row of bars, one for each world.

    Attributes:
        value: of a run; a bar shows the median over turns, a line the lowest and the highest.
        shift: of the bars from their world's place.
        width: of a bar, where worlds are 1 apart.
        color: of the bars.
        label: in the legend; None for none.
    """

    value: Callable[[Run], float]
    shift: float
    width: float
    color: str
    label: str | None


SPEED = Bars(value=speed, shift=0.0, width=0.6, color="#4f9d4f", label=None)
USES = {  # by the name in PAPER and in the key
    what: Bars(value=value, shift=shift, width=0.38, color=color, label=what)
    for what, value, shift, color in (
        ("network", network_percent, -0.19, "#3b6ea5"),
        ("CPU", cpu_percent, 0.19, "#d9772b"),
    )
}


def draw(found: Mapping[str, Turns], output: Path) -> None:
    """Speed above, utilisation below, a column for each rate."""
    width, height = 3.6 * len(found), 6.2
    texts = [AxesText(title(rate), "samples/s" * (place == 0)) for place, rate in enumerate(found)]
    texts += [AxesText("", "utilisation, %" * (place == 0)) for place in range(len(found))]
    with drawing():
        figure, placed = panels((width, height), texts, (1, 1))
        for place, turns in enumerate(found.values()):
            _draw_bars(placed[place], turns, SPEED)
            use = placed[len(found) + place]
            use.set_ylim(0, 112)
            for bars in USES.values():
                _draw_bars(use, turns, bars)
            _mark_paper(use, list(turns))
        add_key(figure, len(USES) + 1)
        save(figure, output)


def title(rate: str) -> str:
    """100mbit as it is written elsewhere."""
    return f"{rate.replace('mbit', ' Mbit/s').replace('gbit', ' Gbit/s')} links"


def _draw_bars(panel: Axes, turns: Turns, bars: Bars) -> None:
    places = [place + bars.shift for place in range(len(turns))]
    values = [[bars.value(run) for run in runs] for runs in turns.values()]
    middles = [median(each) for each in values]
    panel.bar(places, middles, bars.width, color=bars.color, label=bars.label)
    for x, each in zip(places, values, strict=True):
        panel.plot([x, x], [min(each), max(each)], color="#333333", linewidth=1)
    for x, middle, each in zip(places, middles, values, strict=True):
        # At a bar's foot, where there is room, nothing else lies over the number.
        inside = middle > ROOM * panel.get_ylim()[1]
        y, color = (0.0, "white") if inside else (max(each), "black")
        panel.text(x, y, f"{middle:,.0f}", ha="center", va="bottom", fontsize=8, color=color)
    panel.set_xticks(range(len(turns)), list(turns), fontsize=9)
    panel.grid(visible=False, axis="x")


def _mark_paper(panel: Axes, worlds: Sequence[str]) -> None:
    for number, (what, bars) in enumerate(USES.items()):
        places = [worlds.index(world) + bars.shift for world in PAPER if world in worlds]
        reached = [100 * use[what] for world, use in PAPER.items() if world in worlds]
        label = "in the paper" if number == 0 else None
        panel.plot(places, reached, "D", color="white", markeredgecolor="black", label=label)


if __name__ == "__main__":
    main()
