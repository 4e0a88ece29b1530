"""Makes the table and the picture of the trainings of `translation.py`.

    python scripts/translation/table4.py FOLDER --output translation.png

Each training is compared with the baseline of its seed, which begins with the same weights and sees
the same sentences in the same order.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import mean
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from translation import BEYOND, NUDGED, SPARSITIES, USUAL, WORKERS

from dlrm_hybrid.report.drawing import add_key, drawing, panels, save, style
from dlrm_hybrid.report.figures import AxesText
from dlrm_hybrid.report.measures import mean_spread
from dlrm_hybrid.report.table import MISSING, Table

Result = Mapping[str, Any]
Setting = tuple[str, float, int]
"""Variant, sparsity, workers."""

COLUMNS = (
    *("sparsity", "workers", "train loss", "test loss", "BLEU", "± test loss, %", "± BLEU"),
    *("BLEU, unmasked", "kept", "seeds"),
)
SIZE_INCHES = (9.6, 4.2)
KEY_COLUMNS = 4
BLACK = "#1a1a1a"
APART = 0.12  # points of one number of workers
PUBLISHED: Mapping[tuple[float, int], Result] = {
    (0.0, 1): {"test_loss": 3.883, "bleu": 35.17},
    (0.90, 2): {"test_loss": 3.879, "bleu": 35.23},
    (0.95, 2): {"test_loss": 3.882, "bleu": 35.18},
    (0.90, 3): {"test_loss": 3.881, "bleu": 35.22},
    (0.95, 3): {"test_loss": 3.882, "bleu": 35.19},
    (0.90, 5): {"test_loss": 3.882, "bleu": 35.20},
    (0.95, 5): {"test_loss": 3.890, "bleu": 35.15},
}
"""Test loss and BLEU of Gupta et al., KDD 2021, table 4, by sparsity and workers."""


def read(folder: Path) -> list[Result]:
    """All trainings of a folder.

    Raises:
        SystemExit: one has no baseline of its seed.
    """
    found: list[Result] = [
        json.loads(file.read_text(encoding="utf-8")) for file in sorted(folder.glob("*.json"))
    ]
    seeds = {one["seed"] for one in baselines(found)}
    for one in found:
        if one["seed"] not in seeds:
            raise SystemExit(f"{folder}: no baseline with seed {one['seed']}")
    return found


def by_setting(results: Sequence[Result]) -> dict[Setting, list[Result]]:
    """Trainings of each setting by seed: the baseline, then by sparsity and workers."""
    found: dict[Setting, list[Result]] = {}
    for one in sorted(results, key=lambda one: (*_setting(one), one["seed"])):
        found.setdefault(_setting(one), []).append(one)
    return found


def _setting(result: Result) -> Setting:
    return result["variant"], result["sparsity"], result["workers"]


def baselines(results: Sequence[Result]) -> list[Result]:
    """Those that nothing was done to."""
    return [one for one in results if one["workers"] == 1 and one["variant"] == USUAL]


def loss_gap(result: Result, baseline: Result) -> float:
    """By how many percent the test loss is above that of the baseline."""
    return 100.0 * (result["test_loss"] / baseline["test_loss"] - 1.0)


def bleu_gap(result: Result, baseline: Result) -> float:
    """By how much BLEU is above that of the baseline."""
    return result["bleu"] - baseline["bleu"]


def gaps(
    own: Sequence[Result],
    results: Sequence[Result],
    gap: Callable[[Result, Result], float],
) -> list[float]:
    """Of some trainings against the baselines of their seeds."""
    against = {one["seed"]: one for one in baselines(results)}
    return [gap(one, against[one["seed"]]) for one in own]


def kept(own: Sequence[Result]) -> float:
    """The share of what came to a cut that went on, in training."""
    boundaries = [boundary for one in own for boundary in one["boundaries"]]
    return sum(one["kept"] for one in boundaries) / sum(one["elements"] for one in boundaries)


def table(results: Sequence[Result]) -> Table:
    """A row for each setting: means over seeds and their standard deviations.

    The second loss and the second BLEU are against the baseline of the seed, the third BLEU where
    nothing is thinned out in tests.
    """
    rows: list[list[str]] = []
    for (variant, sparsity, workers), own in by_setting(results).items():
        is_baseline, cuts = own[0] in baselines(results), workers > 1
        rows.append(
            [
                f"{100 * sparsity:g} %" if cuts else " ".join(["baseline", variant]).strip(),
                f"{workers} {variant}".strip() if cuts else MISSING,
                mean_spread([one["train_loss"] for one in own], 4),
                mean_spread([one["test_loss"] for one in own], 4),
                mean_spread([one["bleu"] for one in own], 2),
                MISSING if is_baseline else mean_spread(gaps(own, results, loss_gap), 1, "+"),
                MISSING if is_baseline else mean_spread(gaps(own, results, bleu_gap), 2, "+"),
                f"{mean(one['unmasked']['bleu'] for one in own):.2f}" if cuts else MISSING,
                f"{100 * kept(own):.1f} %",
                str(len(own)),
            ]
        )
    return Table(COLUMNS, rows, "llr")


def figure(results: Sequence[Result]) -> Figure:
    """Loss and BLEU against the baseline over the number of workers, a point for each training."""
    cuts = [own for (variant, *_), own in by_setting(results).items() if variant == USUAL]
    with drawing():
        texts = [
            AxesText("workers", "test loss against baseline, %"),
            AxesText("workers", "BLEU against baseline"),
        ]
        picture, (losses, scores) = panels(SIZE_INCHES, texts, [1.0])
        _draw(losses, cuts, results, loss_gap)
        _draw(scores, cuts, results, bleu_gap)
        add_key(picture, KEY_COLUMNS)
        return picture


def _draw(
    axes: Axes,
    cuts: Sequence[Sequence[Result]],
    results: Sequence[Result],
    gap: Callable[[Result, Result], float],
) -> None:
    # What chance alone does: the same seed, weights that differ by a millionth.
    nudged = gaps([one for one in results if one["variant"] == NUDGED], results, gap)
    axes.plot(
        [_place(1)] * len(nudged),
        nudged,
        color=BLACK,
        marker="D",
        linestyle="none",
        label="baseline, weights nudged by a millionth",
    )
    axes.axhline(0.0, color=BLACK, linewidth=0.8, zorder=1)
    for number, sparsity in enumerate((*SPARSITIES, BEYOND)):
        shift = APART * (number - 1)
        own = [one for one in cuts if one[0]["sparsity"] == sparsity and one[0]["workers"] > 1]
        if not own:
            continue
        places = [_place(one[0]["workers"]) + shift for one in own]
        values = [gaps(one, results, gap) for one in own]
        color = style(number).color
        axes.plot(
            [place for place, each in zip(places, values, strict=True) for _ in each],
            [value for each in values for value in each],
            color=color,
            marker="o",
            linestyle="none",
            alpha=0.45,
        )
        name = f"{100 * sparsity:g} %: seeds, mean"
        axes.plot(
            places,
            [mean(each) for each in values],
            color=color,
            marker="_",
            markersize=14,
            markeredgewidth=2.5,
            linestyle="none",
            label=name,
        )
        papers = {workers: one for (s, workers), one in PUBLISHED.items() if s == sparsity}
        axes.plot(
            [_place(workers) + shift for workers in papers],
            [gap(one, PUBLISHED[0.0, 1]) for one in papers.values()],
            color=color,
            marker="x",
            linestyle="none",
            label=f"{100 * sparsity:g} %: the paper's" if papers else None,
        )
    names = ["nudged" if one == 1 else str(one) for one in WORKERS]
    axes.set_xticks([_place(one) for one in WORKERS], names)
    axes.set_xlim(-0.5, len(names) - 0.5)


def _place(workers: int) -> float:
    return float(sorted(WORKERS).index(workers))


def main() -> None:
    """Print the table, write the picture."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output", type=Path, required=True, help="a PNG or SVG file")
    parser.add_argument("folder", type=Path, help="of the results")
    asked = parser.parse_args()
    results = read(asked.folder)
    save(figure(results), asked.output)
    print(table(results).markdown(), end="")


if __name__ == "__main__":
    main()
