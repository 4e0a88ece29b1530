"""Compares the worlds of a list: their speed on links, by turns, or their scores, by seed.

    python scripts/benchmarks/worlds.py speed experiments RUNS --links 100mbit 1gbit --repeats 3
    python scripts/benchmarks/worlds.py speed tables RUNS train.steps=125 --links 100mbit-20ms
    python scripts/benchmarks/worlds.py scores rates RUNS data.rows=3500000 --seeds 0 1 2

Lists are in `lists.py`. A link is a rate, with a latency behind a dash, or loopback. Trains in
RUNS/<link> or in RUNS; complete runs are not repeated, so an interrupted measurement continues.
Arguments before the options are overrides of every run. Links need what `network=emulated` needs.

Scores are log-loss of the test part and of the last tenth of the training rows, before the weights
learn from each; single steps move the first by up to 5 % and back. Of runs that diverge there are
none; any other failure ends the script.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import product
from pathlib import Path
from statistics import mean, median

from harness import (
    Page,
    Part,
    Row,
    arguments,
    publish,
    samples_of,
    slug,
    spread,
    train_once,
    train_unless_diverged,
)
from hosts import LOOPBACK
from lists import LISTS, Listed, Words

from dlrm_hybrid.report.measures import mean_spread
from dlrm_hybrid.report.runs import Run

NOTE = """
Samples/s, ratio and use: median (lowest – highest) of the turns, compared turn by turn. Network use
is that of the busiest link, CPU use that of all cores, CPU time that of all ranks."""


def main() -> None:
    """Run what is missing of what the first words say, print the page."""
    parser = arguments(__doc__, "speed", "scores", repeats=3)
    parser.add_argument("list", choices=LISTS)
    parser.add_argument("runs", type=Path, help="folder of the runs")
    parser.add_argument("--worlds", nargs="+", help="of the list, by name; default all")
    parser.add_argument("--links", nargs="+", default=[LOOPBACK], help="of speed; default loopback")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2], help="of scores")
    options, overrides = parser.parse_known_args()
    listed = LISTS[options.list]
    names: Sequence[str] = options.worlds or list(listed.worlds)

    def words_of(*beside: str) -> dict[str, Words]:
        return {name: (*listed.common, *listed.worlds[name], *beside, *overrides) for name in names}

    def measure() -> Page:
        if options.what == "scores":
            found = scored(options.runs, words_of(*listed.scores), options.seeds)
            return {f"Log-loss, {options.list}": score_rows(found, options.seeds, listed)}
        tables: dict[str, Part] = {}
        for link in options.links:
            worlds = words_of(*listed.speed, *link_words(link))
            turns = timed(options.runs / link, worlds, options.repeats)
            rows = speed_rows(turns, listed)
            tables[f"Speed, {options.list}, {link}"] = Part(rows, "" if tables else NOTE)
        return tables

    publish(measure, options.output)


def link_words(link: str) -> Words:
    """Overrides for a link: a rate, perhaps with a latency behind a dash, or loopback."""
    if link == LOOPBACK:
        return ()
    rate, _, latency = link.partition("-")
    late = (f"network.latency={latency}",) if latency else ()
    return ("network=emulated", f"network.rate={rate}", *late)


def timed(runs: Path, worlds: Mapping[str, Words], repeats: int) -> dict[str, list[Run]]:
    """Runs of each world, by turns."""
    turns: dict[str, list[Run]] = {name: [] for name in worlds}
    for turn, (name, words) in product(range(repeats), worlds.items()):
        turns[name].append(train_once(runs / f"{slug(name)}-{turn}", *words))
    return turns


def scored(
    runs: Path, worlds: Mapping[str, Words], seeds: Sequence[int]
) -> dict[str, list[Run | None]]:
    """A run of each world and seed, None of what diverged."""
    found: dict[str, list[Run | None]] = {name: [] for name in worlds}
    for seed, (name, words) in product(seeds, worlds.items()):
        folder = runs / f"{slug(name)}-{seed}"
        found[name].append(train_unless_diverged(folder, *words, f"train.seed={seed}"))
    return found


def speed_rows(turns: Mapping[str, Sequence[Run]], listed: Listed) -> list[Row]:
    """What each world reaches beside the first one."""
    first = next(iter(turns.values()))
    rows: list[Row] = []
    for name, runs in turns.items():
        faster = [speed(run) / speed(other) for run, other in zip(runs, first, strict=True)]
        cpu = [1e6 * run.summary["cpu"]["seconds"] / samples_of(run) for run in runs]
        row: Row = {
            "world": name,
            "samples/s": spread([speed(run) for run in runs], 0),
            "to the first": spread(faster, 2),
            "time, %": f"{100 * (1 / median(faster) - 1):+.1f}",
            "network, %": percents([run.summary["network"]["utilization"] for run in runs]),
            "CPU, %": percents([run.summary["cpu"]["utilization"] for run in runs]),
            "CPU, µs/sample": spread(cpu, 1),
            "bytes/sample": f"{median(bytes_per_sample(run) for run in runs):,.0f}",
            "sent, %": sent_percent(runs),
            "train loss": f"{mean(run.summary['train']['loss'] for run in runs):.4f}",
        }
        if listed.paper:
            row = {**row, "paper, time %": listed.paper.get(name, ("", ""))[0] or None}
        rows.append(row)
    return rows


def score_rows(
    found: Mapping[str, Sequence[Run | None]], seeds: Sequence[int], listed: Listed
) -> list[Row]:
    """Losses by seed; means of what did not diverge, and against the first world seed by seed."""
    first = next(iter(found.values()))
    rows: list[Row] = []
    for name, runs in found.items():
        pairs = [(run, other) for run, other in zip(runs, first, strict=True) if run and other]
        row: Row = {"world": name}
        for seed, run in zip(seeds, runs, strict=True):
            losses = [f"{loss(run, part):.4f}" for part in ("test", "train")] if run else []
            row = {**row, f"seed {seed}": ", ".join(losses) or "diverged"}
        for title, part in (("test", "test"), ("last tenth", "train")):
            own = [loss(run, part) for run in runs if run]
            more = [100 * (loss(run, part) / loss(other, part) - 1) for run, other in pairs]
            row = {
                **row,
                title: mean_spread(own, 4) if own else None,
                f"{title}, %": mean_spread(more, 3, "+") if more else None,
            }
        if listed.paper:
            row = {**row, "paper": listed.paper.get(name, ("", ""))[1] or None}
        rows.append({**row, "sent, %": sent_percent([run for run in runs if run])})
    return rows


def speed(run: Run) -> float:
    """Training samples in a second of training."""
    return run.summary["samples_per_second"]


def loss(run: Run, part: str) -> float:
    """Log-loss of a part of the rows."""
    return run.summary[part]["loss"]


def bytes_per_sample(run: Run) -> float:
    """Of all ranks, counted as frames."""
    return run.summary["network"]["bytes_per_sample"]


def percents(shares: Sequence[float | None]) -> str | None:
    """The spread of shares in percent, None if they were not measured."""
    measured = [100 * share for share in shares if share is not None]
    return spread(measured, 1) if measured else None


def sent_percent(runs: Sequence[Run]) -> str | None:
    """Shares of gradients and activations that were sent; None for all of both."""
    shares = {
        what: median(run.summary["compression"][f"{what}_density"] for run in runs)
        for what in ("gradient", "activation")
        if runs and runs[0].config[what]["name"] != "none"
    }
    return ", ".join(f"{what}s {100 * share:.1f}" for what, share in shares.items()) or None


if __name__ == "__main__":
    main()
