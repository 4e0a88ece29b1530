"""Measures what a slow trainer costs the others, with sync, bounded and async policies.

    python scripts/benchmarks/stragglers.py RUNS

The slow one is stopped by signals for nine tenths of each second. Rates are those of the other
trainers together in the middle of the run. Trains in folders of RUNS; complete runs are not
repeated. Needs what `network=emulated` needs. Other arguments are overrides of every run.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median

from harness import OURS, Page, Part, Row, arguments, middle, publish, slug, spread, train_once
from slow_stages import slowed

from dlrm_hybrid.train.asynchronous.order_log import order_file, read_order
from dlrm_hybrid.wire.frame import Kind as FrameKind

TRAINERS, SLOW = 4, 3
PERIOD_SECONDS, STOPPED = 1.0, 0.9
MIDDLE = (0.2, 0.8)  # of the batches of a run
SERVED = ("embedding=served", "parallel.table_servers=1")
# Reports come by leases of 8 batches: a long run lets that not count.
ASYNC = (*SERVED, "sync=async", "sync.record=true", "train.steps=300")
WORLDS: Mapping[str, Sequence[str]] = {
    "sync, sharded tables": (),
    "sync": SERVED,
    "bounded 1, lookups 4 ahead": (*SERVED, "sync=bounded", "embedding.staleness=4"),
    "async": ASYNC,
    "async, lookups 4 ahead": (*ASYNC, "embedding.staleness=4"),
}
RUN = (
    *("+experiment=dct_hybrid", f"parallel.trainers={TRAINERS}", "parallel.cuts=[]"),
    *("activation=none", "network=emulated"),
    *("network.rate=100mbit", "network.latency=20ms", "data.rows=100000", "train.epochs=10"),
    *("telemetry.every=2", "checkpoint.every=0", "checkpoint.minutes=0"),
)
NOTE = """
Batches per second of the three other trainers together, in the middle of the run: median (lowest –
highest) of the turns. `kept` is their rate beside a slow trainer to that without, turn by turn."""


def main() -> None:
    """Run what is missing, print the page."""
    parser = arguments(__doc__, runs=True, repeats=3)
    parser.add_argument(
        "--steps", type=int, nargs=2, default=(150, 60), help="even, with a slow one"
    )
    parser.add_argument("--worlds", nargs="+", choices=WORLDS, default=list(WORLDS))
    options, overrides = parser.parse_known_args()

    def measure() -> Page:
        rates: dict[str, list[tuple[float, float, float]]] = {name: [] for name in options.worlds}
        for turn in range(options.repeats):
            for name in options.worlds:
                folder = options.runs / f"{slug(name)}-{turn}"
                words = (*WORLDS[name], *overrides)
                even, _ = measured(folder / "even", words, options.steps[0], slow=False)
                rest, own = measured(folder / "slow", words, options.steps[1], slow=True)
                rates[name].append((even, rest, own))
        rows = [row(name, found) for name, found in rates.items()]
        return {"One slow trainer of four": Part(rows, NOTE)}

    publish(measure, options.output)


def row(name: str, found: Sequence[tuple[float, float, float]]) -> Row:
    """Of one world: rates of the others without and beside the slow one, and its own."""
    return {
        "world": name,
        "all alike": spread([even for even, _, _ in found], 1),
        "one slow": spread([rest for _, rest, _ in found], 1),
        "kept": f"{median(rest / even for even, rest, _ in found):.0%}",
        "its own": spread([own for _, _, own in found], 1),
    }


def measured(
    folder: Path, overrides: Sequence[str], steps: int, *, slow: bool
) -> tuple[float, float]:
    """Batches per second in the middle of a run: of all but the slow trainer, and of that one."""
    start = slowed(f"worker-{SLOW}*", PERIOD_SECONDS, lambda random: STOPPED) if slow else OURS
    run = train_once(folder, *RUN, f"train.steps={steps}", *overrides, start=start)
    first, last = middle(run, MIDDLE)
    batches = (last.step - first.step) * TRAINERS
    seconds = last.time_seconds - first.time_seconds
    share = share_of_the_slow(folder, first.step, last.step)
    return batches * (1 - share) / seconds, batches * share / seconds


def share_of_the_slow(folder: Path, first: int, last: int) -> float:
    """Of the batches between two steps; in lock-step all trainers have the same."""
    path = order_file(folder, "server-0")
    if not path.exists():
        return 1 / TRAINERS
    pushes = [one.sender for one in read_order(path) if one.kind is FrameKind.PUSH]
    middle = pushes[first * TRAINERS : last * TRAINERS]
    return middle.count(SLOW) / len(middle)


if __name__ == "__main__":
    main()
