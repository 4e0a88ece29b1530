"""Measures seconds until a log-loss is reached over a link, of DDP and of a world without stages.

    python scripts/benchmarks/time_to_quality.py RUNS SPEEDS --link 100mbit --trainers 2

Which rows a model has seen when its test log-loss comes down to the goal does not depend on the
link, so each side is trained once for each batch size and learning rate, anywhere and beside
anything, in RUNS; what is complete there is not trained again. How many rows a second it learns
over the link is read from SPEEDS, the folder of `practitioner.py speed`. Their quotient is the time
spent on training; evaluations are not counted.

DistributedDataParallel in T processes learns what one process learns from batches T times as large.
It is trained so here, in float32: what bfloat16 loses is not held against it.
"""

from __future__ import annotations

import argparse
import json
from itertools import product
from pathlib import Path
from statistics import median
from typing import cast

from harness import Row, arguments, publish, train_unless_diverged

from dlrm_hybrid.report.runs import Run, read_run
from dlrm_hybrid.telemetry.events import Kind

TRAIN_ROWS, DAYS = 3_000_000, 24  # the last day is the test part
OPPONENT = "bfloat16"  # of the wires of `practitioner.py`
RUN = (
    *("data=synthetic", f"data.days={DAYS}", f"data.rows={TRAIN_ROWS * DAYS // (DAYS - 1)}"),
    *("checkpoint.every=0", "checkpoint.minutes=0"),
)


def learned(options: argparse.Namespace, side: str, batch_size: int, rate: float) -> Run | None:
    """A run of a side, evaluated every so many rows; None if it diverged."""
    trainers = options.trainers
    step_rows = trainers * batch_size
    if side == OPPONENT:
        world = ("parallel=single", f"train.batch_size={step_rows}")
    else:
        world = (f"+experiment={side}", f"train.batch_size={batch_size}")
        world += (f"parallel.trainers={trainers}", f"parallel.servers={options.servers}")
    return train_unless_diverged(
        options.runs / f"{'ddp' if side == OPPONENT else side}-{trainers}-{batch_size}-{rate}",
        *(*world, *RUN, f"optimizer.lr={rate}"),
        f"train.evaluate_every={max(1, options.every // step_rows)}",
        f"train.steps={options.most_rows // step_rows}",
    )


def rows_until(run: Run, goal: float) -> int | None:
    """Rows seen at the first evaluation whose log-loss is not above the goal; None: at none."""
    scored = (one.values for one in run.events if one.kind is Kind.EVALUATED)
    return next((one["samples"] for one in scored if one["log_loss"] <= goal), None)


def rows_per_second(options: argparse.Namespace, side: str, batch_size: int) -> float:
    """The median of all turns over the link.

    Raises:
        SystemExit: there is none.
    """
    folder, trainers = options.speeds / options.link, options.trainers
    if side == OPPONENT:
        files = sorted(folder.glob(f"{side}-{trainers}-{batch_size}-*.json"))
        speeds = [json.loads(one.read_text("utf-8"))["samples_per_second"] for one in files]
    else:
        folders = sorted(folder.glob(f"{side}-{trainers}-{options.servers}-{batch_size}-*"))
        speeds = [read_run(one).summary["samples_per_second"] for one in folders]
    if not speeds:
        raise SystemExit(f"{folder}: has no {side} with {trainers} trainers, batch {batch_size}")
    return median(speeds)


def rows_of(options: argparse.Namespace) -> list[Row]:
    """A row for each side and batch size, with the learning rate that reaches the goal first."""
    first: dict[tuple[str, int], tuple[int, float]] = {}
    sides = [OPPONENT, *cast("list[str]", options.worlds)]
    batch_sizes, rates = cast("list[int]", options.batch_sizes), cast("list[float]", options.rates)
    for side, batch_size, rate in product(sides, batch_sizes, rates):
        run, of = learned(options, side, batch_size, rate), (side, batch_size)
        if run is not None and (seen := rows_until(run, options.goal)):
            first[of] = min(first.get(of, (seen, rate)), (seen, rate))
    seconds = {
        (side, batch_size): seen / rows_per_second(options, side, batch_size)
        for (side, batch_size), (seen, _) in first.items()
    }
    theirs = [took for (side, _), took in seconds.items() if side == OPPONENT]
    if not theirs:
        raise SystemExit(f"DDP reaches {options.goal} with none of the rates {rates}")
    return [
        {
            "side": f"DDP, {side}" if side == OPPONENT else side,
            "batch": batch_size,
            "learning rate": first[side, batch_size][1],
            "rows until then": first[side, batch_size][0],
            "seconds": round(took),
            "DDP's best ÷ it": f"{min(theirs) / took:.1f}",
        }
        for (side, batch_size), took in seconds.items()
    ]


def main() -> None:
    """Train what is missing, print the page."""
    parser = arguments(__doc__, runs=True)
    parser.add_argument("speeds", type=Path, help="folder of `practitioner.py speed`")
    parser.add_argument("--link", default="100mbit")
    parser.add_argument("--trainers", type=int, default=2)
    parser.add_argument("--worlds", nargs="+", default=["dp_levels"], help="experiments")
    parser.add_argument("--servers", type=int, default=0, help="of our worlds; default 0")
    parser.add_argument("--batch-sizes", type=int, nargs="+", default=[128, 2048])
    parser.add_argument("--rates", type=float, nargs="+", default=[0.1, 0.4, 1.6])
    parser.add_argument("--goal", type=float, default=0.470, help="test log-loss; default 0.470")
    text = f"of {TRAIN_ROWS:,} that a side may see; default all of them"
    parser.add_argument("--most-rows", type=int, default=TRAIN_ROWS, help=text)
    parser.add_argument("--every", type=int, default=100_000, help="rows between evaluations")
    options = parser.parse_args()
    title = f"Until log-loss {options.goal}, {options.trainers} trainers, {options.link}"
    publish(lambda: {title: rows_of(options)}, options.output)


if __name__ == "__main__":
    main()
