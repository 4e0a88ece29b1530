"""Compares bytes and losses of two checkouts of this program, to the last digit.

    python scripts/benchmarks/same.py ../old .

Trains every experiment on synthetic rows in processes, and every gradient and activation method in
one process; each checkout has its own `.venv`. Exit code 1: something differs.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from checkouts import train_in

COMMON = (
    "train.evaluate_every=0",
    "telemetry.tensorboard=false",
    "checkpoint.every=0",
    "data=synthetic",
    "data.rows=20000",
    "train.steps=24",
)
IN_PROCESS = ("parallel=hybrid", "parallel.world=in_process")
EXPERIMENTS = (
    *("baseline", "dct_dp", "dct_mp", "dct_hybrid", "dct_levels"),
    *("data_parallel", "dp_bfloat16", "dp_levels"),
)
GRADIENTS = (
    *("none", "cltk", "dct", "deft", "dgc", "gaussian"),
    *("hard", "randomk", "redsync", "sidco", "terngrad", "topk"),
)
ACTIVATIONS = ("none", "dct", "gradient_topk", "sketch")
RUNS: Mapping[str, Sequence[str]] = {
    "one process": (),
    **{f"+experiment={name}": (f"+experiment={name}",) for name in EXPERIMENTS},
    **{f"gradient={name}": (*IN_PROCESS, f"gradient={name}") for name in GRADIENTS},
    "gradient=dct, levels": (*IN_PROCESS, "gradient=dct", "gradient.precision=levels"),
    **{f"activation={name}": (*IN_PROCESS, f"activation={name}") for name in ACTIVATIONS},
}


def results(checkout: Path, overrides: Sequence[str], folder: Path) -> Mapping[str, Any]:
    """Losses and counted bytes by class of a run with these overrides."""
    summary = train_in(checkout, folder, (*COMMON, *overrides))
    if isinstance(summary, str):
        return {"failed": summary.splitlines()[-1:]}
    return {
        "training loss": summary["train"]["loss"],
        "test loss": summary["test"]["loss"],
        **{
            f"{name} bytes": traffic["bytes"]
            for name, traffic in summary["network"]["by_class"].items()
            if name != "control"  # its count depends on how often ranks happen to report
        },
    }


def main() -> None:
    """Print a line for each run; exit with 1 if results differ."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("old", type=Path, help="a checkout with a .venv")
    parser.add_argument("new", type=Path, help="another one")
    parser.add_argument("--only", nargs="+", choices=RUNS, default=list(RUNS), metavar="RUN")
    arguments = parser.parse_args()
    different = False
    print("| run | training loss | bytes | new against old |\n|---|--:|--:|---|")
    with TemporaryDirectory() as folder, ThreadPoolExecutor(2) as both:
        for number, name in enumerate(arguments.only):
            checkouts = (arguments.old.resolve(), arguments.new.resolve())
            folders = [Path(folder) / f"{number}-{side}" for side in ("old", "new")]
            old, new = both.map(results, checkouts, [RUNS[name]] * 2, folders)
            differing = [key for key in {**old, **new} if old.get(key) != new.get(key)]
            different |= bool(differing) or "failed" in old
            loss, size = old.get("training loss"), sum(v for k, v in old.items() if "bytes" in k)
            said = "; ".join(f"{key}: {old.get(key)} → {new.get(key)}" for key in differing)
            print(
                f"| {name} | {loss} | {size:,} | {said or old.get('failed') or 'equal'} |",
                flush=True,
            )
    sys.exit(int(different))


if __name__ == "__main__":
    main()
