"""Compares two checkouts of this program, run in turns: CPU time per sample, or bytes and losses.

    python scripts/costs/checkouts.py speed ../old . --repeats 5
    python scripts/costs/checkouts.py speed ../old . --worlds "dct_hybrid, 2 × 3 + 1"
    python scripts/costs/checkouts.py same ../old .

Each checkout has its own `.venv` (`make install` there) and prepares its own rows. `same` trains
every experiment on synthetic rows in processes, and every gradient and activation method in one
process, and compares to the last digit; exit code 1: something differs.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

sys.path.append(str(Path(__file__).parents[1] / "benchmarks"))
from harness import Page, Row, arguments, publish, spread
from lists import TIMED

WORLD_STEP = Path(__file__).with_name("world_step.py")
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
SAME: Mapping[str, Sequence[str]] = {
    "one process": (),
    **{f"+experiment={name}": (f"+experiment={name}",) for name in EXPERIMENTS},
    **{f"gradient={name}": (*IN_PROCESS, f"gradient={name}") for name in GRADIENTS},
    "gradient=dct, levels": (*IN_PROCESS, "gradient=dct", "gradient.precision=levels"),
    **{f"activation={name}": (*IN_PROCESS, f"activation={name}") for name in ACTIVATIONS},
}
COMMON = ("telemetry.tensorboard=false", *TIMED)
SHORT = ("data=synthetic", "data.rows=20000", "train.steps=24")
Summary = Mapping[str, Any]
Measure = Callable[[Path, Path], float]  # of a checkout, in a new folder


def train_in(checkout: Path, run: Path, overrides: Sequence[str]) -> Summary | str:
    """The summary of a run that a checkout trains; why there is none."""
    command = [str(checkout / ".venv" / "bin" / "python"), "-m", "dlrm_hybrid", "train", *COMMON]
    ended = subprocess.run(
        [*command, *overrides, f"hydra.run.dir={run}"],
        cwd=checkout,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    if ended.returncode:
        return f"exit {ended.returncode}: {ended.stderr.strip()}"
    return json.loads((run / "summary.json").read_text(encoding="utf-8"))


def cpu_of_run(overrides: Sequence[str], checkout: Path, run: Path) -> float:
    """CPU microseconds of all ranks, per sample of the timed steps of a run."""
    summary = train_in(checkout, run, overrides)
    if isinstance(summary, str):
        sys.exit(f"{checkout}: {summary}")
    return 1e6 * summary["cpu"]["seconds"] / summary["samples_per_second"] / summary["seconds"]


def cpu_of_world(checkout: Path, run: Path) -> float:
    """The same of `World.step`, which makes no run."""
    python = checkout / ".venv" / "bin" / "python"
    told = {**os.environ, "PYTHONPATH": str(checkout), "OMP_NUM_THREADS": "1"}
    return float(subprocess.check_output([python, WORLD_STEP], cwd=checkout, env=told))


def of_run(*overrides: str) -> Measure:
    """`cpu_of_run` with these overrides."""
    return partial(cpu_of_run, overrides)


SPEED: Mapping[str, Measure] = {
    "single, batch 128": of_run("train.batch_size=128", "train.steps=1500"),
    "single, batch 2,048": of_run("train.batch_size=2048", "train.steps=120"),
    "dct_hybrid, 2 × 3 + 1": of_run("+experiment=dct_hybrid", "train.steps=700"),
    "dct_levels, 2 × 3 + 1": of_run("+experiment=dct_levels", "train.steps=700"),
    "baseline, 2 × 3 + 1": of_run("+experiment=baseline", "train.steps=300"),
    "dp_levels, 2 + 1": of_run("+experiment=dp_levels", "train.steps=700"),
    "dp_levels, 2 + 1, batch 2,048": of_run(
        *("+experiment=dp_levels", "train.batch_size=2048", "train.steps=80"),
    ),
    "dp_levels, 4 + 1": of_run("+experiment=dp_levels", "parallel.trainers=4", "train.steps=400"),
    "dp_bfloat16, 2 + 1": of_run("+experiment=dp_bfloat16", "train.steps=500"),
    "asynchronous, 4 + 1 + 1": of_run(
        *("parallel=hybrid", "parallel.cuts=[]", "parallel.trainers=4", "gradient=dct"),
        *("sync=async", "embedding=served", "parallel.table_servers=1", "train.steps=600"),
    ),
    "World.step, 2 + 1": cpu_of_world,
}


def speed_rows(old: Path, new: Path, repeats: int, worlds: Sequence[str]) -> list[Row]:
    """A row for each world; the order of the two changes from turn to turn."""
    times: dict[str, list[tuple[float, float]]] = {world: [] for world in worlds}
    for turn in range(repeats):
        for world in worlds:
            with TemporaryDirectory() as folder:
                found: dict[Path, float] = {}
                for checkout in (old, new) if turn % 2 == 0 else (new, old):
                    run = Path(folder) / str(len(found))
                    found[checkout] = SPEED[world](checkout, run)
            times[world].append((found[old], found[new]))
            print(turn, world, *times[world][-1], file=sys.stderr)
    return [
        {
            "world": world,
            "old, µs": f"{median(before for before, _ in pairs):.1f}",
            "new, µs": f"{median(after for _, after in pairs):.1f}",
            "new / old": spread([after / before for before, after in pairs], 2),
        }
        for world, pairs in times.items()
    ]


def results(checkout: Path, overrides: Sequence[str], folder: Path) -> Summary:
    """Losses and counted bytes by class of a run with these overrides."""
    summary = train_in(checkout, folder, (*SHORT, *overrides))
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


def same_rows(old: Path, new: Path, worlds: Sequence[str]) -> list[Row]:
    """A row for each run of both; they run side by side."""
    rows: list[Row] = []
    with TemporaryDirectory() as folder, ThreadPoolExecutor(2) as both:
        for number, name in enumerate(worlds):
            folders = [Path(folder) / f"{number}-{side}" for side in ("old", "new")]
            was, now = both.map(results, (old, new), [SAME[name]] * 2, folders)
            differing = [key for key in {**was, **now} if was.get(key) != now.get(key)]
            told = "; ".join(f"{key}: {was.get(key)} → {now.get(key)}" for key in differing)
            row: Row = {
                "run": name,
                "training loss": str(was.get("training loss")),
                "bytes": sum(value for key, value in was.items() if "bytes" in key),
                "new against old": told or f"{was.get('failed') or 'equal'}",
            }
            print(row, file=sys.stderr)
            rows.append(row)
    return rows


def main() -> None:
    """Do what the first word says, print the page."""
    parser = arguments(__doc__, "speed", "same")
    parser.add_argument("old", type=Path, help="a checkout with a .venv")
    parser.add_argument("new", type=Path, help="another one")
    parser.add_argument("--worlds", nargs="+", help="or runs, by name; default all")
    options = parser.parse_args()
    old, new = options.old.resolve(), options.new.resolve()
    if old == new:
        sys.exit(f"{old}: old and new are the same checkout")
    known = list(SPEED if options.what == "speed" else SAME)
    worlds: Sequence[str] = options.worlds or known
    if unknown := set(worlds) - set(known):
        sys.exit(f"--worlds: {sorted(unknown)} are none of {known}")
    equal: list[bool] = []

    def measure() -> Page:
        if options.what == "speed":
            rows = speed_rows(old, new, options.repeats, worlds)
            return {"CPU time per sample of two checkouts": rows}
        rows = same_rows(old, new, worlds)
        equal.extend(row["new against old"] == "equal" for row in rows)
        return {"Bytes and losses of two checkouts": rows}

    publish(measure, options.output, compiles=options.what == "speed")
    sys.exit(not all(equal))


if __name__ == "__main__":
    main()
