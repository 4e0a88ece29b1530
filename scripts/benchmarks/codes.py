"""Measures the CPU time of each part of every rank's encoding and decoding of levels.

    python scripts/benchmarks/codes.py RUN +experiment=dct_hybrid activation.bits=4

Arguments after RUN, its folder, go to `train`. Each rank, a process, counts the calls of functions
below in timed steps, and their own time without that of each other. Some 0.5 µs of each are the
clock's.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from harness import Row, arguments, publish, told_by_ranks

from dlrm_hybrid.report.runs import read_run
from dlrm_hybrid.run.rank.main import train_rank
from dlrm_hybrid.run.rank.process import Report
from dlrm_hybrid.telemetry.rank_meter import RankMeter
from dlrm_hybrid.telemetry.spans import SpanClock
from dlrm_hybrid.train.signals import StopRequest

# By module: functions as it calls them, and methods of its classes.
PARTS = {
    "compress.gradient.error_feedback": ("ErrorFeedback._rounded",),
    "parallel.dense.published": ("_published_levels",),
    "compress.gradient.compressor": ("Selected.elements", "encode_sparse"),
    "wire.gradient_levels": (
        *("UpdateSender.encode", "quanta", "list_update", "write_update"),
        *("UpdateReceiver.decode", "read_update", "collect_update"),
        *("Popularity.add", "Popularity.payload", "read_payload"),
    ),
    "wire.frequencies": ("TableSender.begin", "TableReceiver.begin"),
    "compress.activation.levels": (
        *("LevelCodec.encode", "largest_of_rows", "quantise", "LevelCodec.encode_gradient"),
        *("LevelCodec.decode", "LevelCodec.decode_gradient", "restore"),
    ),
    "wire.activation_levels": (
        *("UnitSender.section", "flip", "count_symbols", "group_units", "encode_units"),
        *("UnitReceiver.levels", "decode_units"),
    ),
    "model.exchange.distinct": (
        *("DistinctExchange.send_rows", "DistinctExchange.send_gradients"),
        "GroupMessages.exchange",
    ),
    "compress.embedding.memory": (
        *("take_slots", "find_slots", "row_levels", "rows_of_levels", "gradient_levels"),
        *("add_squares", "scale_levels", "Copies.send", "Copies.receive", "Residuals.forget"),
    ),
    "compress.embedding.messages": (
        *("LevelSender.encode", "count_levels", "encode_levels"),
        *("LevelReceiver.decode", "decode_levels"),
    ),
    "compress.embedding.trainer": (
        *("TrainerMemory.read", "TrainerMemory.take", "TrainerMemory.own_rows"),
        *("TrainerMemory.round", "TrainerMemory.encode"),
        *("RowResponder.rows", "RowResponder.gradients"),
    ),
}


@dataclass(slots=True)
class Spent:
    """On one function."""

    calls: int = 0
    seconds: float = 0.0


class Stopwatch:
    """CPU time of the main thread by function, each without the others that it calls."""

    def __init__(self) -> None:
        self.counts = False
        self.spent: defaultdict[str, Spent] = defaultdict(Spent)
        self._open: list[str] = []
        self._since = 0.0

    def timed(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """The same function, timed."""

        def call(*arguments: Any, **named: Any) -> Any:
            self._enter(name)
            try:
                return function(*arguments, **named)
            finally:
                self._leave()

        return call

    def _enter(self, name: str) -> None:
        self._count()
        self._open.append(name)
        if self.counts:
            self.spent[name].calls += 1

    def _leave(self) -> None:
        self._count()
        self._open.pop()

    def _count(self) -> None:
        now = time.thread_time()
        if self._open and self.counts:
            self.spent[self._open[-1]].seconds += now - self._since
        self._since = now


def timed_rank(argument: str, report: Report, stop: StopRequest) -> None:
    """A rank that times the parts."""
    watch = Stopwatch()
    for module_name, names in PARTS.items():
        module = import_module(f"dlrm_hybrid.{module_name}")
        for name in names:
            head, _, last = name.rpartition(".")
            owner = getattr(module, head) if head else module
            setattr(owner, last, watch.timed(f"{module_name} {name}", getattr(owner, last)))
    switch, values = SpanClock.switch, RankMeter.values

    def noted_switch(self: SpanClock, counts: bool, now: float) -> None:
        watch.counts = counts
        switch(self, counts, now)

    def told_values(self: RankMeter) -> dict[str, Any]:
        spent = {name: (one.calls, one.seconds) for name, one in watch.spent.items()}
        return {**values(self), "parts": spent}

    SpanClock.switch, RankMeter.values = noted_switch, told_values
    train_rank(argument, report, stop)


def main() -> None:
    """Train, then print a row for each function that was called."""
    options, overrides = arguments(__doc__, runs=True).parse_known_args()
    publish(lambda: {"Levels, function by function": rows(options.runs, overrides)}, options.output)


def rows(folder: Path, overrides: Sequence[str]) -> list[Row]:
    """Of each function, and of all together."""
    ranks = told_by_ranks("codes:timed_rank", folder, overrides)
    steps = max(rank["timed_steps"] for rank in ranks)
    config = read_run(folder).config
    samples = steps * config["train"]["batch_size"] * config["parallel"]["trainers"]
    total: defaultdict[str, Spent] = defaultdict(Spent)
    for rank in ranks:
        for name, (calls, seconds) in rank["parts"].items():
            total[name].calls += calls
            total[name].seconds += seconds
    whole = Spent(0, sum(one.seconds for one in total.values()))
    return [
        {
            "module": name.partition(" ")[0],
            "function": name.partition(" ")[2],
            "calls per step": f"{one.calls / steps:.1f}" if one.calls else None,
            "µs each": f"{1e6 * one.seconds / one.calls:.1f}" if one.calls else None,
            "µs per sample": f"{1e6 * one.seconds / samples:.2f}",
        }
        for name, one in {**total, "all ": whole}.items()
    ]


if __name__ == "__main__":
    main()
