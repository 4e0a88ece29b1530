"""Shows what each part of the compression saves and costs: bytes, test log-loss and CPU time.

    python scripts/studies/parts.py --bytes RUN... --quality RUN...

Prints a row for each run of `--bytes`, named like its folder; the first is uncompressed. The runs
of `--quality` may be longer and in one process: `NAME_SEED` is compared with the first name's run
of that seed. Bytes and CPU time are per training sample, of all ranks; `codes` is the share of that
time spent on encoding and decoding.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from frame import arguments, counted_bytes, cpu_microseconds

from dlrm_hybrid.report.measures import digits, mean_spread
from dlrm_hybrid.report.runs import Run, read_runs
from dlrm_hybrid.report.table import MISSING, Table
from dlrm_hybrid.types import ConfigError

CODES = ("encode", "decode")


def table(counted: Sequence[Run], trained: Sequence[Run]) -> Table:
    """A row for each of `counted`, named as its folder.

    Args:
        counted: worlds, the first uncompressed.
        trained: runs whose folders are named as one of these and its seed.

    Raises:
        ConfigError: a run has counted no bytes, or is named as nothing it could be held against.
    """
    names = [run.folder.name for run in counted]
    gaps = gaps_by_name(names, trained)
    sent = [counted_bytes(run) for run in counted]
    whole = sum(sent[0].values())
    rows = [
        (
            name,
            *(f"{own.get(kind, 0.0):,.1f}" for kind in sent[0]),
            f"{sum(own.values()):,.1f}",
            f"{whole / sum(own.values()):.1f}×",
            mean_spread(gaps[name], 2, "+") if name in gaps else MISSING,
            str(len(gaps.get(name, ()))),
            *_time(run),
        )
        for name, run, own in zip(names, counted, sent, strict=True)
    ]
    more = ("all", "fewer", "test log-loss, %", "seeds", "CPU µs", "codes")
    return Table(("bytes per sample", *sent[0], *more), rows)


def gaps_by_name(names: Sequence[str], trained: Sequence[Run]) -> dict[str, list[float]]:
    """By how many percent the test log-loss of each name's runs is above the first's of the seed.

    Raises:
        ConfigError: a run has none of the names, or no run of the first name has its seed.
    """
    losses: dict[tuple[str, int], float] = {}
    for run in trained:
        name = run.folder.name.rpartition("_")[0]
        if name not in names:
            raise ConfigError(f"{run.folder}: no run of --bytes is named {name!r}")
        losses[name, run.config["train"]["seed"]] = run.summary["test"]["loss"]
    found: dict[str, list[float]] = {}
    for (name, seed), loss in losses.items():
        if name == names[0]:
            continue
        if (names[0], seed) not in losses:
            raise ConfigError(f"{name}_{seed}: no run of {names[0]} has its train.seed = {seed}")
        found.setdefault(name, []).append(100 * (loss / losses[names[0], seed] - 1))
    return found


def _time(run: Run) -> tuple[str, str]:
    """CPU time per sample, and how much of it is for encoding and decoding."""
    roles = run.summary["roles"].values()
    spent = [rank["seconds_by_span"][span] for rank in roles for span in CODES]
    return digits(cpu_microseconds(run)), f"{sum(spent) / run.summary['cpu']['seconds']:.1%}"


def main() -> None:
    """Print the table."""
    parser = arguments(__doc__, has_picture=False)
    parser.add_argument("--bytes", nargs="+", type=Path, required=True, help="folders of worlds")
    parser.add_argument("--quality", nargs="*", type=Path, default=[], help="folders NAME_SEED")
    options = parser.parse_args()
    counted = read_runs(options.bytes)
    trained = read_runs(options.quality) if options.quality else []
    print(table(counted, trained).markdown(), end="")


if __name__ == "__main__":
    main()
