"""Shows how worlds scale: measured and predicted on this machine, predicted for thousands.

    python scripts/benchmarks/scaling.py RUNS

RUNS has the runs of `plan.py measure`; nothing is trained here. Beyond this machine every rank has
a machine of its own, with as many cores.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import product
from pathlib import Path

from harness import Page, Row, arguments, each, publish
from plan import (
    CALIBRATIONS,
    KINDS,
    SCALES,
    costs_of,
    counter,
    error_percent,
    predicted_run,
)

from dlrm_hybrid.config.compose import values_of
from dlrm_hybrid.config.validate import validate
from dlrm_hybrid.plan.prediction import Costs, Prediction, most_like, predict
from dlrm_hybrid.plan.worlds import Planned
from dlrm_hybrid.report.runs import read_run

RATES = ("100mbit", "1gbit", "10gbit", "100gbit")
TRAINERS = tuple(4**power for power in range(7))
STRONG_ROWS = 16_384  # of a batch of all trainers
KNEE = 0.05  # more speed for any more trainers: less than that is none


def main() -> None:
    """Predict, print the page."""
    parser = arguments(__doc__, runs=True)
    parser.add_argument(
        "--calibrations", nargs="+", choices=CALIBRATIONS, default=list(CALIBRATIONS)
    )
    options = parser.parse_args()
    publish(lambda: scaling(options.runs, options.calibrations), options.output)


def scaling(runs: Path, calibrations: Sequence[str]) -> Page:
    """More and more trainers: measured beside predicted here, and far beyond."""
    costs = costs_of(runs, tuple(calibrations))
    tables = {
        f"{scale.capitalize()} scaling on this machine, 100 Mbit/s": scale_rows(runs, scale, costs)
        for scale in SCALES
    }
    for strong, kind in product((False, True), KINDS):
        name = f"strong, {STRONG_ROWS:,} rows for all" if strong else "weak, 128 rows each"
        worlds = list(each(f"{name}, {kind}", [*far(kind, costs, strong=strong)]))
        tables[f"{kind}, {name}"] = far_rows(worlds)
    return tables


def scale_rows(runs: Path, scale: str, costs: Sequence[Costs]) -> list[Row]:
    """Measured and predicted speed of few trainers."""
    rows: list[Row] = []
    for world in SCALES[scale]:
        run = read_run(world.folder(runs))
        predicted, measured = predicted_run(run, costs), run.summary["samples_per_second"]
        rows.append(
            {
                "gradient": world.gradient,
                "trainers": world.trainers,
                "rows each": world.batch_size,
                "measured": f"{measured:,.0f}",
                "predicted": f"{predicted.samples_per_second:,.0f}",
                "error, %": f"{error_percent(predicted.samples_per_second, measured):+.1f}",
                "limited by": str(predicted.bottleneck),
            }
        )
    return rows


def far(kind: str, costs: Sequence[Costs], *, strong: bool) -> Iterator[Prediction]:
    """Worlds of machines that do nothing else, as many trainers as there may be, at every rate."""
    for trainers, rate in product(TRAINERS, RATES):
        rows = STRONG_ROWS // trainers if strong else 128
        words = (*KINDS[kind], "data.rows=70000", f"parallel.trainers={trainers}")
        values = values_of((*words, f"train.batch_size={rows}"))
        config = validate({**values, "network": {**values["network"], "rate": rate}})
        world = counter().layout(config)
        yield predict(Planned(config, rate), world, most_like(costs, config), counter().train_rows)


def far_rows(worlds: Sequence[Prediction]) -> list[Row]:
    """Speed by trainers and rate; last what limits it, where more trainers are no use."""
    rows: list[Row] = []
    by_size = {(trainers_of(one), one.planned.rate): one for one in worlds}
    for trainers in TRAINERS:
        speeds = {rate: f"{by_size[trainers, rate].samples_per_second:,.0f}" for rate in RATES}
        rows.append({"trainers": f"{trainers:,}", **speeds})
    knees = {rate: knee([by_size[trainers, rate] for trainers in TRAINERS]) for rate in RATES}
    rows.append(
        {
            "trainers": "saturates at",
            **{
                rate: "–" if one is None else f"{trainers_of(one):,}" for rate, one in knees.items()
            },
        }
    )
    limits = {rate: one or by_size[TRAINERS[-1], rate] for rate, one in knees.items()}
    rows.append(
        {"trainers": "limited by", **{rate: str(one.bottleneck) for rate, one in limits.items()}}
    )
    return rows


def trainers_of(one: Prediction) -> int:
    """How many a world has."""
    return one.planned.config.parallel.trainers


def knee(worlds: Sequence[Prediction]) -> Prediction | None:
    """The smallest world than which no larger one is much faster; None if the largest is.

    Args:
        worlds: each with twice the trainers of the one before.
    """
    for number, one in enumerate(worlds[:-1]):
        most = max(other.samples_per_second for other in worlds[number + 1 :])
        if most < (1 + KNEE) * one.samples_per_second:
            return one
    return None


if __name__ == "__main__":
    main()
