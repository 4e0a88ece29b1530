"""Compares the CPU time per sample of compressed and uncompressed worlds, as Markdown tables.

    python scripts/benchmarks/cost.py worlds      dct_hybrid and its parts against baseline
    python scripts/benchmarks/cost.py lifespans   DCT-DP by how long its thresholds live

Worlds take turns, `--repeats` times; ratios are taken turn by turn. The shares of encoding and
decoding are of one more run, whose spans count CPU time (`cpu_spans.py`). Arguments after the first
word are overrides of every run.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

from harness import Row, command, load, render, section, spread
from world import CPU_SPANS, microseconds_by_role, microseconds_by_span, train

from dlrm_hybrid.telemetry.machine import describe
from dlrm_hybrid.telemetry.spans import Span

COMMON = ("data.rows=300000", "train.steps=605")
DCT_DP = ("+experiment=dct_dp", "parallel.cuts=[]")
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
        "by sorting, L = 1": (*DCT_DP, *EXACT, "gradient.lifespan=1"),
        "by sorting, L = 1000": (*DCT_DP, *EXACT),
        "by counting, L = 1": (*DCT_DP, "gradient.renewal=fixed", "gradient.lifespan=1"),
        "by counting, controlled": DCT_DP,
    },
}
CODEC = ("encode", "decode")


def main() -> None:
    """Measure what the first word says, print the page."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=sorted(WORLDS))
    parser.add_argument("--repeats", type=int, default=5, help="turns")
    options, overrides = parser.parse_known_args()
    worlds = {name: (*world, *COMMON, *overrides) for name, world in WORLDS[options.what].items()}
    machine = describe()
    with TemporaryDirectory() as folder:
        costs: dict[str, list[float]] = {name: [] for name in worlds}
        for turn in range(options.repeats):
            for number, (name, world) in enumerate(worlds.items()):
                run = train(Path(folder, f"{number}-{turn}"), *world)
                costs[name].append(sum(microseconds_by_role(run).values()))
        spans = {
            name: microseconds_of(train(Path(folder, f"{number}-spans"), *world, program=CPU_SPANS))
            for number, (name, world) in enumerate(worlds.items())
        }
    more = section("Where it goes, µs per sample", shares(spans), load())
    print(render("CPU time per sample", machine, command(), rows_of(costs, spans)) + more)


def microseconds_of(run: Path) -> dict[str, float]:
    """CPU time per sample of all ranks by span."""
    return {span: sum(row.values()) for span, row in microseconds_by_span(run).items()}


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
    """Of everything that a world does."""
    return (spent[Span.ENCODE] + spent[Span.DECODE]) / sum(spent.values())


def shares(spans: Mapping[str, Mapping[str, float]]) -> list[Row]:
    """What each world does, the dearest of the first one first."""
    return [
        {"what": label, **{name: f"{spent[label]:.1f}" for name, spent in spans.items()}}
        for label in next(iter(spans.values()))
    ]


if __name__ == "__main__":
    main()
