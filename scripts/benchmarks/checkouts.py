"""Compares the CPU time per sample of two checkouts of this program, run in turns.

    python scripts/benchmarks/checkouts.py ../old . --repeats 5
    python scripts/benchmarks/checkouts.py ../old . --worlds "dct_hybrid, 2 × 3 + 1"

Each checkout has its own `.venv` (`make install` there) and prepares its own rows.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

from harness import Page, Row, arguments, publish, spread

WORLDS: Mapping[str, tuple[str, ...]] = {
    "single, batch 128": ("train.batch_size=128", "train.steps=1500"),
    "single, batch 2,048": ("train.batch_size=2048", "train.steps=120"),
    "dct_hybrid, 2 × 3 + 1": ("+experiment=dct_hybrid", "train.steps=700"),
    "baseline, 2 × 3 + 1": ("+experiment=baseline", "train.steps=300"),
    "dp_levels, 2 + 1": ("+experiment=dp_levels", "train.steps=700"),
    "dp_levels, 2 + 1, batch 2,048": (
        *("+experiment=dp_levels", "train.batch_size=2048", "train.steps=80"),
    ),
    "dp_levels, 4 + 1": ("+experiment=dp_levels", "parallel.trainers=4", "train.steps=400"),
    "dp_bfloat16, 2 + 1": ("+experiment=dp_bfloat16", "train.steps=500"),
}
COMMON = ("train.evaluate_every=0", "telemetry.tensorboard=false", "checkpoint.every=0")


def train_in(checkout: Path, run: Path, overrides: Sequence[str]) -> Mapping[str, Any] | str:
    """The summary of a run that a checkout trains; why there is none."""
    command = [str(checkout / ".venv" / "bin" / "python"), "-m", "dlrm_hybrid", "train", *overrides]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    ended = subprocess.run(
        [*command, f"hydra.run.dir={run}"],
        cwd=checkout,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    if ended.returncode:
        return f"exit {ended.returncode}: {ended.stderr.strip()}"
    return json.loads((run / "summary.json").read_text(encoding="utf-8"))


def cpu_microseconds(checkout: Path, overrides: Sequence[str], run: Path) -> float:
    """Of all ranks, per sample of the timed steps of one run."""
    summary = train_in(checkout, run, (*overrides, *COMMON))
    if isinstance(summary, str):
        sys.exit(f"{checkout}: {summary}")
    return 1e6 * summary["cpu"]["seconds"] / summary["samples_per_second"] / summary["seconds"]


def measure(old: Path, new: Path, repeats: int, worlds: Sequence[str]) -> list[Row]:
    """A row for each world; the order of the two changes from turn to turn."""
    times: dict[str, list[tuple[float, float]]] = {world: [] for world in worlds}
    for turn in range(repeats):
        for world in worlds:
            with TemporaryDirectory() as folder:
                found: dict[Path, float] = {}
                for checkout in (old, new) if turn % 2 == 0 else (new, old):
                    run = Path(folder) / str(len(found))
                    found[checkout] = cpu_microseconds(checkout, WORLDS[world], run)
            times[world].append((found[old], found[new]))
    return [
        {
            "world": world,
            "old, µs": f"{median(before for before, _ in pairs):.1f}",
            "new, µs": f"{median(after for _, after in pairs):.1f}",
            "new / old": spread([after / before for before, after in pairs], 2),
        }
        for world, pairs in times.items()
    ]


def main() -> None:
    """Print the page."""
    parser = arguments(__doc__)
    parser.add_argument("old", type=Path, help="a checkout with a .venv")
    parser.add_argument("new", type=Path, help="another one")
    parser.add_argument("--worlds", nargs="+", choices=WORLDS, default=list(WORLDS))
    given = parser.parse_args()
    old, new = given.old.resolve(), given.new.resolve()
    if old == new:
        sys.exit(f"{old}: old and new are the same checkout")

    def page() -> Page:
        rows = measure(old, new, given.repeats, given.worlds)
        return {"CPU time per sample of two checkouts": rows}

    publish(page, given.output, compiles=True)


if __name__ == "__main__":
    main()
