"""Compares the CPU time per sample of compressed and uncompressed worlds, as Markdown tables.

    python scripts/benchmarks/cost.py worlds      dct_hybrid and its parts against baseline
    python scripts/benchmarks/cost.py lifespans   DCT-DP by how long its thresholds live

Worlds take turns, `--repeats` times; ratios are taken turn by turn. The shares of encoding and
decoding are of one more run, whose spans count CPU time (`cpu_spans.py`). Arguments after the first
word are overrides of every run.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

from harness import Page, Row, arguments, publish, spread, train_once, trained
from world import CPU_SPANS, microseconds_by_role, microseconds_by_span

from dlrm_hybrid.report.runs import Run
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
    options, overrides = arguments(__doc__, *sorted(WORLDS)).parse_known_args()

    def measure() -> Page:
        worlds = {name: (*world, *COMMON) for name, world in WORLDS[options.what].items()}
        with TemporaryDirectory() as folder:
            turns = trained(Path(folder), worlds, overrides, turns=options.repeats)
            spans = {
                name: microseconds_of(
                    train_once(Path(folder, f"spans-{k}"), *world, *overrides, start=CPU_SPANS)
                )
                for k, (name, world) in enumerate(worlds.items())
            }
        costs = {
            name: [sum(microseconds_by_role(run).values()) for run in runs]
            for name, runs in turns.items()
        }
        return {
            "CPU time per sample": rows_of(costs, spans),
            "Where it goes, µs per sample": shares(spans),
        }

    publish(measure, options.output)


def microseconds_of(run: Run) -> dict[str, float]:
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
