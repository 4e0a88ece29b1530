"""Compares threads of one worker with trainers of one thread, which share only the servers.

    python scripts/benchmarks/threads.py RUNS

Asynchronous worlds without cuts, with one server and one table server. Trains in folders of RUNS;
complete runs are not repeated. Other arguments are overrides of every run.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median

from harness import Page, Part, Row, arguments, publish, spread, trained

from dlrm_hybrid.report.runs import Run
from dlrm_hybrid.telemetry.events import Kind

WORLDS: Mapping[str, tuple[int, int]] = {
    "1 thread": (1, 1),
    "2 threads": (1, 2),
    "2 trainers": (2, 1),
}
RUN = (
    *("+experiment=dct_hybrid", "sync=async", "embedding=served", "parallel.table_servers=1"),
    *("parallel.cuts=[]", "activation=none", "data.rows=400000"),
    *("train.epochs=10", "checkpoint.every=0", "checkpoint.minutes=0", "train.evaluate_every=0"),
)
NOTE = """
Samples per second of the whole world: median (lowest – highest) of the turns; `to 1 thread` is
taken turn by turn. `CPU` is that of all workers for a thousand samples, in milliseconds."""


def main() -> None:
    """Run what is missing, print the page."""
    parser = arguments(__doc__, runs=True, repeats=3)
    parser.add_argument("--batches", type=int, nargs="+", default=[128, 512])
    parser.add_argument("--samples", type=int, default=200_000, help="of a run; default 200,000")
    options, overrides = parser.parse_known_args()

    def measure() -> Page:
        worlds = {
            f"{batch}-{name}": (*RUN, *of_world(name, batch, options.samples))
            for batch in options.batches
            for name in WORLDS
        }
        runs = trained(options.runs, worlds, overrides, turns=options.repeats)
        rows = [row(batch, name, runs) for batch in options.batches for name in WORLDS]
        return {"Threads and trainers": Part(rows, NOTE)}

    publish(measure, options.output)


def of_world(name: str, batch: int, samples: int) -> tuple[str, ...]:
    """The overrides for a world that learns from so many samples."""
    trainers, threads = WORLDS[name]
    return (
        *(f"parallel.trainers={trainers}", f"parallel.threads={threads}"),
        *(f"train.batch_size={batch}", f"train.steps={samples // (batch * trainers)}"),
    )


def row(batch: int, name: str, runs: Mapping[str, Sequence[Run]]) -> Row:
    """Of one world at one batch size."""
    own, first = ([rate(run) for run in runs[f"{batch}-{one}"]] for one in (name, "1 thread"))
    return {
        "batch": batch,
        "world": name,
        "samples/s": spread(own, 0),
        "to 1 thread": f"{median(a / b for a, b in zip(own, first, strict=True)):.2f}",
        "CPU": spread([cpu(run) for run in runs[f"{batch}-{name}"]], 1),
    }


def rate(run: Run) -> float:
    """Samples per second of timed steps."""
    return float(run.summary["samples_per_second"])


def cpu(run: Run) -> float:
    """Milliseconds of CPU of all workers for a thousand samples, of timed steps."""
    ranks = [one.values for one in run.events if one.kind is Kind.RANK]
    workers = [one for one in ranks if one["role"].startswith("worker")]
    samples = sum(one["timed_steps"] for one in workers) * run.config["train"]["batch_size"]
    return 1e6 * sum(one["cpu_seconds"]["train"] for one in workers) / samples


if __name__ == "__main__":
    main()
