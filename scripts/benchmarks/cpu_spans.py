"""Trains ranks as processes whose spans count CPU time instead of wall time.

    python scripts/benchmarks/cpu_spans.py train +experiment=baseline hydra.run.dir=FOLDER

Ranks that share cores wait for each other in any span, so wall time does not tell what a span
costs. Here `seconds_by_span` holds CPU seconds of each rank's main thread; its other threads
(ZeroMQ) take the rest of its CPU time.
"""

from __future__ import annotations

import sys
import time

from dlrm_hybrid.cli.main import run
from dlrm_hybrid.run import training
from dlrm_hybrid.run.rank.main import train_rank
from dlrm_hybrid.run.rank.process import Report
from dlrm_hybrid.telemetry.spans import SpanClock
from dlrm_hybrid.train.signals import StopRequest


def cpu_rank(argument: str, report: Report, stop: StopRequest) -> None:
    """Be a rank whose span clock is the CPU clock of its main thread."""
    switch, seconds = SpanClock.switch, SpanClock.seconds

    def switch_now(self: SpanClock, counts: bool, now: float) -> None:
        switch(self, counts, time.thread_time())

    def seconds_until_now(self: SpanClock, now: float | None = None) -> dict[str, float]:
        return seconds(self)

    SpanClock.__init__.__defaults__ = (time.thread_time,)
    SpanClock.switch, SpanClock.seconds = switch_now, seconds_until_now
    train_rank(argument, report, stop)


if __name__ == "__main__":
    training.TRAIN_RANK = "cpu_spans:cpu_rank"
    sys.exit(run(sys.argv))
