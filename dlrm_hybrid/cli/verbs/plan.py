"""The verb `plan`: predicts how fast worlds would train, as a table, JSON and a picture."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from dlrm_hybrid.cli.terminal import Terminal, duration, quantity, quiet
from dlrm_hybrid.cli.verbs.train import TerminalView
from dlrm_hybrid.config.schema import Config
from dlrm_hybrid.data.shards import open_shards
from dlrm_hybrid.disk import writing
from dlrm_hybrid.plan import worlds
from dlrm_hybrid.plan.calibration import Calibration, check_same_model, read
from dlrm_hybrid.plan.costs import one_process_seconds
from dlrm_hybrid.plan.prediction import Costs, Prediction, most_like, predict, remarks, with_changes
from dlrm_hybrid.plan.probe import probe
from dlrm_hybrid.report.table import MISSING, Table
from dlrm_hybrid.run.assembly.build import semantics
from dlrm_hybrid.run.folder import output_file, write_whole
from dlrm_hybrid.run.readiness import ready_rows
from dlrm_hybrid.run.request import Request
from dlrm_hybrid.types import ConfigError, ExitCode

if TYPE_CHECKING:
    from dlrm_hybrid.plan.counting import Counter
    from dlrm_hybrid.plan.layout import Layout

OUTPUT_KEY, PICTURE_KEY = "plan.output", "plan.picture"
HEAD = ("world", "links", "samples/s", "time", "B/sample", "cores", "fullest link", "limited by")
SHOWN = 10  # worlds of a search


def run(request: Request) -> int:
    """Predict the worlds of `plan`."""
    from dlrm_hybrid.plan.counting import Counter  # torch takes seconds

    config, terminal = request.config, Terminal()
    for name, key in ((config.plan.output, OUTPUT_KEY), (config.plan.picture, PICTURE_KEY)):
        if name is not None:
            output_file(name, key)
    worlds.check(config)
    worlds.compared(config, request.values)  # raises before any work is done
    runs = _calibrations(request, terminal)
    hybrid = [one for one in runs if one.ranks]
    if not hybrid:
        raise ConfigError(
            "plan.calibration: only runs of one process; what messages and servers cost is known "
            "of parallel=hybrid"
        )
    shards = open_shards(ready_rows(request, None, terminal), semantics(config))
    counter = Counter(shards, config.plan.count_steps, terminal.line)
    known = [counter.layout(replace(one.config, data=config.data)) for one in hybrid]
    costs = list(map(Costs.of, hybrid, known))
    predictions = _predictions(request, costs, counter, terminal)
    configs = [one.planned.config for one in predictions]
    told = dict.fromkeys(remark for one in configs for remark in remarks(costs, one))
    measured = [one.samples_per_second for one in runs if not one.ranks]
    seconds = one_process_seconds(most_like(costs, config).units, counter.shape(config))
    alone = measured[0] if measured else config.train.batch_size / seconds
    terminal.table(table(predictions))
    for line in (*lines(predictions), *fastest(predictions), *told):
        terminal.line(line)
    how = "measured" if measured else "its parts added up"
    terminal.line(f"one process on one machine: {alone:,.0f} samples/s ({how})")
    _write(config, predictions, runs, alone, terminal)
    return ExitCode.DONE


def table(predictions: Sequence[Prediction]) -> Table:
    """The table of predictions, a line for each world."""
    return Table(HEAD, [_cells(one) for one in predictions], "llrrrrrl")


def lines(predictions: Sequence[Prediction]) -> list[str]:
    """A line for each world: what would make it faster, and how much memory it needs."""
    texts: list[str] = []
    for one in predictions[:SHOWN]:
        changes = sorted(one.what_if.items(), key=lambda change: -change[1])
        faster = ", ".join(f"{change} {100 * (times - 1):+.0f} %" for change, times in changes)
        most = max(one.memory_bytes, key=lambda name: one.memory_bytes[name])
        memory = f"{quantity(one.memory_bytes[most])}B of memory for {most}"
        where = f" on {one.planned.links}" if one.planned.rate else ""
        texts.append(f"{one.planned.name}{where}: {faster}; {memory}")
    return texts


def fastest(predictions: Sequence[Prediction]) -> list[str]:
    """A line with the fastest world for each kind of links on which several were compared."""
    texts: list[str] = []
    for links in dict.fromkeys(one.planned.links for one in predictions):
        compared = [one for one in predictions if one.planned.links == links]
        best = max(compared, key=lambda one: one.samples_per_second)
        where = f" on {links}" if links else ""
        if len(compared) > 1:
            speed = f"{best.samples_per_second:,.0f} samples/s"
            texts.append(f"fastest{where}: {best.planned.name}, {speed}")
    return texts


def _predictions(
    request: Request, costs: Sequence[Costs], counter: Counter, terminal: Terminal
) -> list[Prediction]:
    """Predict the worlds that are compared, or the fastest ones that a search has found."""
    from dlrm_hybrid.plan.search import searched

    config = request.config
    if config.plan.search is None:
        planned = worlds.compared(config, request.values)
        found = [(one, counter.layout(one.config)) for one in planned]
    else:
        found = searched(request, most_like(costs, config), counter)
    likes = [most_like(costs, one.config) for one, _ in found]
    simulated: list[tuple[Prediction, Layout, Costs]] = []
    with terminal.counter("predict", "worlds", is_late=True) as show:
        for (one, world), like in zip(found, likes, strict=True):
            simulated.append((predict(one, world, like, counter.train_rows), world, like))
            show(len(simulated), len(found))
    if config.plan.search is not None:
        simulated.sort(key=lambda one: -one[0].samples_per_second)
        simulated = simulated[:SHOWN]
    return [with_changes(*one) for one in simulated]


def _calibrations(request: Request, terminal: Terminal) -> list[Calibration]:
    folders = request.config.plan.calibration
    if folders is None:
        return probe(request, terminal, TerminalView(quiet()))
    runs = [read(Path(one)) for one in (folders if isinstance(folders, tuple) else (folders,))]
    for one in runs:
        check_same_model(one, request.config)
    return runs


def _cells(one: Prediction) -> list[str]:
    fullest = max(one.use_of("link").values(), default=0.0)
    return [
        one.planned.name,
        one.planned.links or MISSING,
        f"{one.samples_per_second:,.0f}",
        duration(one.seconds),
        quantity(sum(one.bytes_per_sample.values())),
        f"{100 * one.uses['cores']:.0f}%",
        f"{100 * fullest:.0f}%" if fullest else MISSING,
        str(one.bottleneck),
    ]


def _write(
    config: Config,
    predictions: Sequence[Prediction],
    runs: Sequence[Calibration],
    alone: float,
    terminal: Terminal,
) -> None:
    if config.plan.output is not None:
        values = {
            "one_process_samples_per_second": alone,
            "calibrations": [str(one.folder) for one in runs],
            "worlds": [one.to_json() for one in predictions],
        }
        write_whole(Path(config.plan.output), json.dumps(values, indent=1) + "\n", OUTPUT_KEY)
        terminal.line(f"wrote {config.plan.output}")
    if config.plan.picture is not None:
        from dlrm_hybrid.plan.picture import draw  # matplotlib takes most of a second

        path = Path(config.plan.picture)
        with writing(path, PICTURE_KEY):
            draw(predictions, path)
        terminal.line(f"wrote {path}")
