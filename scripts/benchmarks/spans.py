"""Measures the cost of time spans, as a share of the training steps they measure.

    python scripts/benchmarks/spans.py RUN +experiment=dct_hybrid train.steps=100

Arguments after RUN, its folder, go to `train`, whose ranks count how often they enter a span.
Every rank also measures an empty span before and after its steps, and reports the larger cost. The
share is of the rank's CPU time in training.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from harness import Row, arguments, publish, told_by_ranks

from dlrm_hybrid.run.rank.main import train_rank
from dlrm_hybrid.run.rank.process import Report
from dlrm_hybrid.telemetry.rank_meter import RankMeter
from dlrm_hybrid.telemetry.spans import Span, SpanClock, Within
from dlrm_hybrid.telemetry.traffic import Phase
from dlrm_hybrid.train.signals import StopRequest

EMPTY_SPANS = 20_000
ALLOWED_SHARE = 0.01


def counted_rank(argument: str, report: Report, stop: StopRequest) -> None:
    """A rank that counts its spans."""
    before = _span_seconds()
    entries = {True: 0, False: 0}
    counting = False
    enter, switch, values = Within.__enter__, SpanClock.switch, RankMeter.values

    def counted_enter(self: Within) -> None:
        entries[counting] += 1
        enter(self)

    def noted_switch(self: SpanClock, counts: bool, now: float) -> None:
        nonlocal counting
        counting = counts
        switch(self, counts, now)

    def told_values(self: RankMeter) -> dict[str, Any]:
        told = values(self)
        Within.__enter__ = enter
        span_seconds = max(before, _span_seconds())
        return {**told, "spans": entries[True], "span_seconds": span_seconds}

    Within.__enter__, SpanClock.switch, RankMeter.values = counted_enter, noted_switch, told_values
    train_rank(argument, report, stop)


def _span_seconds() -> float:
    """CPU time of a span that holds nothing."""
    within = SpanClock().within(Span.COMPUTE)
    start = time.thread_time()
    for _ in range(EMPTY_SPANS):
        with within:
            pass
    return (time.thread_time() - start) / EMPTY_SPANS


def main() -> None:
    """Train, then print a row for each rank; ends with 1 if a share is more than is allowed."""
    options, overrides = arguments(__doc__, runs=True).parse_known_args()
    shares: list[float] = []
    publish(lambda: {"Spans": rows(options.runs, overrides, shares)}, options.output)
    sys.exit(max(shares) > ALLOWED_SHARE)


def rows(folder: Path, overrides: Sequence[str], shares: list[float]) -> list[Row]:
    """Of each rank; adds its share to `shares`."""
    ranks = told_by_ranks("spans:counted_rank", folder, overrides)
    steps = max(rank["timed_steps"] for rank in ranks)
    found: list[Row] = []
    for rank in sorted(ranks, key=lambda one: one["rank"]):
        cost_seconds = rank["spans"] * rank["span_seconds"] / steps
        cpu_seconds = rank["cpu_seconds"][Phase.TRAIN] / steps
        shares.append(cost_seconds / cpu_seconds)
        found.append(
            {
                "rank": rank["role"],
                "spans per step": f"{rank['spans'] / steps:.0f}",
                "µs each": f"{1e6 * rank['span_seconds']:.2f}",
                "µs per step": f"{1e6 * cost_seconds:.0f}",
                "CPU µs per step": f"{1e6 * cpu_seconds:,.0f}",
                "share": f"{shares[-1]:.2%}",
            }
        )
    return found


if __name__ == "__main__":
    main()
