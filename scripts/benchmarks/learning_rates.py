"""Which learning rates asynchronous trainers bear, beside those of lock-step.

    python scripts/benchmarks/learning_rates.py RUNS [overrides]

Each world in one process, where the order of trainers is drawn from the seed. Trains in folders of
RUNS; what is complete there is not run again. What else stands on the command line goes to every
run. A run whose loss is not finite is named so.
"""

from __future__ import annotations

import argparse
import subprocess
from collections.abc import Mapping, Sequence
from itertools import product
from pathlib import Path

from harness import Row, command, load, render, train_once

from dlrm_hybrid.report.measures import mean_spread
from dlrm_hybrid.telemetry.machine import describe

RUN = (
    *("parallel=hybrid", "parallel.world=in_process", "parallel.cuts=[]", "embedding=served"),
    *("parallel.table_servers=1", "checkpoint.every=0", "checkpoint.minutes=0"),
)
COMPRESSED = ("gradient=dct", "gradient.sparsity=0.99")
CASES: Mapping[str, Sequence[str]] = {
    f"{trainers} trainers, {name}, lr {lr}": (
        *(f"parallel.trainers={trainers}", f"optimizer.lr={lr}"),
        *words,
    )
    for trainers, name, words, rates in (
        (4, "sync", (), (0.1, 0.4)),
        (4, "async", ("sync=async",), (0.1, 0.2, 0.4)),
        (4, "async, DCT 99 %", ("sync=async", *COMPRESSED), (0.2,)),
        (16, "sync", (), (0.1,)),
        (16, "async", ("sync=async",), (0.1, 0.4, 1.6)),
    )
    for lr in rates
}


def main() -> None:
    """Run what is missing, print the page."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("runs", type=Path, help="folder of the runs")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    options, overrides = parser.parse_known_args()
    machine = describe()
    losses: dict[str, list[float | None]] = {name: [] for name in CASES}
    for seed, (name, words) in product(options.seeds, CASES.items()):
        folder = options.runs / f"{name.replace(', ', '-').replace(' ', '-')}-{seed}"
        losses[name].append(test_loss(folder, *words, f"train.seed={seed}", *overrides))
    rows = [row(name, found, options.seeds) for name, found in losses.items()]
    print(f"{render('Test log-loss by learning rate', machine, command(), rows)}\n{load()}")


def test_loss(folder: Path, *overrides: str) -> float | None:
    """Of one run; None if it diverged."""
    try:
        return train_once(folder, *RUN, *overrides).summary["test"]["loss"]
    except subprocess.CalledProcessError:
        return None


def row(name: str, found: Sequence[float | None], seeds: Sequence[int]) -> Row:
    """Of one case: each seed, and the mean of those that did not diverge."""
    finite = [one for one in found if one is not None]
    return {
        "world": name,
        **{
            f"seed {seed}": "diverged" if loss is None else f"{loss:.4f}"
            for seed, loss in zip(seeds, found, strict=True)
        },
        "mean": mean_spread(finite, 4) if finite else None,
    }


if __name__ == "__main__":
    main()
