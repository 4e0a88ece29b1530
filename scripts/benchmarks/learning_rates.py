"""Compares the learning rates that asynchronous and synchronous trainers tolerate.

    python scripts/benchmarks/learning_rates.py RUNS [overrides]

Each world is in one process, where the order of trainers is drawn from the seed. Trains in folders
of RUNS; complete runs are not repeated. Other arguments are overrides of every run. A run that
diverges is shown as such; any other failure ends the script.

The training loss over the last tenth of the rows, before the weights learn from each, is shown
beside the test loss, which single steps move by up to 5 % and back: a mean over time evens that.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from harness import Page, Row, arguments, losses_of, publish, scored

from dlrm_hybrid.report.measures import Summary, mean_spread

RUN = (
    *("parallel=hybrid", "parallel.world=in_process", "parallel.cuts=[]", "embedding=served"),
    *("parallel.table_servers=1", "checkpoint.every=0", "checkpoint.minutes=0"),
)
COMPRESSED = ("gradient=dct", "gradient.density=0.01")
CASES: Mapping[str, Sequence[str]] = {
    f"{trainers} trainers, {name}, lr {lr}": (
        *(f"parallel.trainers={trainers}", f"optimizer.lr={lr}"),
        *words,
    )
    for trainers, name, words, rates in (
        (4, "sync", (), (0.1, 0.4)),
        (4, "async", ("sync=async",), (0.1, 0.2, 0.4)),
        (4, "async, DCT 99 %", ("sync=async", *COMPRESSED), (0.2,)),
        (16, "sync", (), (0.1,)),
        (16, "async", ("sync=async",), (0.1, 0.4, 1.6)),
    )
    for lr in rates
}


def main() -> None:
    """Run what is missing, print the page."""
    parser = arguments(__doc__, runs=True)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    options, overrides = parser.parse_known_args()

    def measure() -> Page:
        worlds = {name: (*RUN, *words, *overrides) for name, words in CASES.items()}
        found = scored(options.runs, worlds, options.seeds)
        return {
            "Log-loss by learning rate": [
                row(name, runs, options.seeds) for name, runs in found.items()
            ]
        }

    publish(measure, options.output)


def row(name: str, found: Sequence[Summary | None], seeds: Sequence[int]) -> Row:
    """Of one case: test part and last tenth of each seed, and means of what did not diverge."""
    finite = [one for one in found if one is not None]
    means = {
        title: mean_spread([one[part]["loss"] for one in finite], 4) if finite else None
        for title, part in (("test", "test"), ("last tenth", "train"))
    }
    return {"world": name, **losses_of(found, seeds), **means}


if __name__ == "__main__":
    main()
