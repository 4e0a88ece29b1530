"""CPU time per sample of compressed worlds beside an uncompressed one, as Markdown tables.

    python scripts/benchmarks/cost.py worlds      dct_hybrid and its parts against baseline
    python scripts/benchmarks/cost.py lifespans   DCT-DP by how long its thresholds live

Worlds take turns, `--repeats` times; ratios are taken turn by turn. Encoding and decoding are the
share of one more run with a clock around them (`timed_rank.py`). What follows the first word goes
to every run.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

from table import Row, render, section, spread
from world import TIMED, read, train, trained_samples

from dlrm_hybrid.telemetry import events
from dlrm_hybrid.telemetry.events import Kind
from dlrm_hybrid.telemetry.machine import describe
from dlrm_hybrid.telemetry.traffic import Phase

COMMON = ("data.rows=300000", "train.steps=605")
EXACT = ("gradient.threshold=exact", "gradient.renewal=fixed")
WORLDS = {
    "worlds": {
        "baseline": ("+experiment=baseline",),
        "dct_dp": ("+experiment=dct_dp",),
        "dct_mp": ("+experiment=dct_mp",),
        "dct_hybrid": ("+experiment=dct_hybrid",),
    },
    "lifespans": {
        "nothing compressed": ("+experiment=baseline", "parallel.cuts=[]"),
        "by sorting, L = 1": (
            "+experiment=dct_dp",
            "parallel.cuts=[]",
            *EXACT,
            "gradient.lifespan=1",
        ),
        "by sorting, L = 1000": ("+experiment=dct_dp", "parallel.cuts=[]", *EXACT),
        "by counting, L = 1": (
            "+experiment=dct_dp",
            "parallel.cuts=[]",
            "gradient.renewal=fixed",
            "gradient.lifespan=1",
        ),
        "by counting, controlled": ("+experiment=dct_dp", "parallel.cuts=[]"),
    },
}
CODEC = ("encode", "decode")


def main() -> int:
    """Entry point; returns the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("what", choices=sorted(WORLDS))
    parser.add_argument("--repeats", type=int, default=5, help="turns")
    options, overrides = parser.parse_known_args()
    worlds = {name: (*world, *COMMON, *overrides) for name, world in WORLDS[options.what].items()}
    machine = describe()
    command = f"python scripts/benchmarks/cost.py {' '.join(sys.argv[1:])}"
    with TemporaryDirectory() as folder:
        costs: dict[str, list[float]] = {name: [] for name in worlds}
        for turn in range(options.repeats):
            for number, (name, world) in enumerate(worlds.items()):
                costs[name].append(cost(train(Path(folder, f"{number}-{turn}"), *world)))
        spans = {
            name: timed(train(Path(folder, f"{number}-timed"), *world, program=TIMED))
            for number, (name, world) in enumerate(worlds.items())
        }
    load = f"Load after it: {' '.join(f'{one:.2f}' for one in os.getloadavg())}."
    more = section("Where it goes, µs per sample", shares(spans), load)
    print(render("CPU time per sample", machine, command, rows_of(costs, spans)) + more)
    return 0


def cost(run: Path) -> float:
    """CPU microseconds per sample of all ranks, in training steps."""
    found = events.read(run / "events.jsonl")
    seconds = sum(
        event.values["cpu_seconds"][Phase.TRAIN] for event in found if event.kind is Kind.RANK
    )
    return 1e6 * seconds / trained_samples(run)


def timed(run: Path) -> dict[str, float]:
    """CPU microseconds per sample of all ranks by what they do."""
    samples = trained_samples(run)
    spent: dict[str, float] = {}
    for path in run.glob("log/*.spans.json"):
        for label, seconds in read(path).items():
            spent[label] = spent.get(label, 0.0) + 1e6 * seconds / samples
    return spent


def rows_of(
    costs: Mapping[str, Sequence[float]], spans: Mapping[str, Mapping[str, float]]
) -> list[Row]:
    """A row for each world; the first is what the others are compared with."""
    first = next(iter(costs.values()))
    return [
        {
            "world": name,
            "runs": len(values),
            "µs per sample": spread(values, 1),
            "to the first": spread([a / b for a, b in zip(values, first, strict=True)], 2),
            "encoding and decoding": f"{codec_share(spans[name]):.1%}",
        }
        for name, values in costs.items()
    ]


def codec_share(spent: Mapping[str, float]) -> float:
    """Of everything that a timed world does."""
    codec = sum(cost for label, cost in spent.items() if label.endswith(CODEC))
    return codec / sum(spent.values())


def shares(spans: Mapping[str, Mapping[str, float]]) -> list[Row]:
    """What each world does, the dearest first."""
    labels = dict.fromkeys(label for spent in spans.values() for label in spent)
    ordered = sorted(labels, key=lambda label: -max(one.get(label, 0.0) for one in spans.values()))
    return [
        {"what": label, **{name: f"{one.get(label, 0.0):.1f}" for name, one in spans.items()}}
        for label in ordered
    ]


if __name__ == "__main__":
    sys.exit(main())
