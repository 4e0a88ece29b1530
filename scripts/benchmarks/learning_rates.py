"""Compares the learning rates that asynchronous and synchronous trainers tolerate.

    python scripts/benchmarks/learning_rates.py RUNS [overrides]

Each world is in one process, where the order of trainers is drawn from the seed. Trains in folders
of RUNS; complete runs are not repeated. Other arguments are overrides of every run. A run that
diverges is shown as such; any other failure ends the script.

The training loss over the last tenth of the rows, before the weights learn from each, is shown
beside the test loss, which single steps move by up to 5 % and back: a mean over time evens that.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Mapping, Sequence
from itertools import product
from pathlib import Path

from harness import Row, command, load, render, train_once

from dlrm_hybrid.report.measures import Summary, mean_spread
from dlrm_hybrid.telemetry.machine import describe
from dlrm_hybrid.types import ExitCode

RUN = (
    *("parallel=hybrid", "parallel.world=in_process", "parallel.cuts=[]", "embedding=served"),
    *("parallel.table_servers=1", "checkpoint.every=0", "checkpoint.minutes=0"),
)
COMPRESSED = ("gradient=dct", "gradient.density=0.01")
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
    found: dict[str, list[Summary | None]] = {name: [] for name in CASES}
    for seed, (name, words) in product(options.seeds, CASES.items()):
        folder = options.runs / f"{name.replace(', ', '-').replace(' ', '-')}-{seed}"
        found[name].append(train(folder, *words, f"train.seed={seed}", *overrides))
    rows = [row(name, runs, options.seeds) for name, runs in found.items()]
    print(f"{render('Log-loss by learning rate', machine, command(), rows)}\n{load()}")


def train(folder: Path, *overrides: str) -> Summary | None:
    """One run; None if it diverged.

    Raises:
        SystemExit: the run failed otherwise; it has said on standard error why.
    """
    try:
        return train_once(folder, *RUN, *overrides).summary
    except subprocess.CalledProcessError as failure:
        if failure.returncode == ExitCode.DIVERGED:
            return None
        sys.exit(f"{folder}: exit code {failure.returncode}")


def row(name: str, found: Sequence[Summary | None], seeds: Sequence[int]) -> Row:
    """Of one case: test part and last tenth of each seed, and means of what did not diverge."""
    finite = [one for one in found if one is not None]
    means = {
        title: mean_spread([one[part]["loss"] for one in finite], 4) if finite else None
        for title, part in (("test", "test"), ("last tenth", "train"))
    }
    return {
        "world": name,
        **{
            f"seed {seed}": f"{one['test']['loss']:.4f}, {one['train']['loss']:.4f}"
            if one
            else "diverged"
            for seed, one in zip(seeds, found, strict=True)
        },
        **means,
    }


if __name__ == "__main__":
    main()
