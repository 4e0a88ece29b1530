"""The verb `plan`: how fast worlds would train, as a table, as JSON and as a picture."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from dlrm_hybrid.cli.terminal import Terminal, duration, quantity, quiet
from dlrm_hybrid.cli.verbs.train import TerminalView
from dlrm_hybrid.config.schema import Config
from dlrm_hybrid.disk import writing
from dlrm_hybrid.plan import worlds
from dlrm_hybrid.plan.calibration import Calibration, check_same_model, read
from dlrm_hybrid.plan.layout import Densities
from dlrm_hybrid.plan.prediction import (
    CLASSES,
    MOST_RANKS,
    Costs,
    Prediction,
    most_like,
    one_process,
    predict,
)
from dlrm_hybrid.plan.probe import count, probe
from dlrm_hybrid.report.table import MISSING, Table
from dlrm_hybrid.run.assembly.build import topology
from dlrm_hybrid.run.folder import output_file, write_whole
from dlrm_hybrid.run.request import Request
from dlrm_hybrid.types import ConfigError, ExitCode

OUTPUT_KEY, PICTURE_KEY = "plan.output", "plan.picture"
HEAD = ("world", "links", "samples/s", "time", "B/sample", "cores", "fullest link", "limited by")
SHOWN = 10  # of a search


def run(request: Request) -> int:
    """Predict the worlds of `plan`."""
    config, terminal = request.config, Terminal()
    for name, key in ((config.plan.output, OUTPUT_KEY), (config.plan.picture, PICTURE_KEY)):
        if name is not None:
            output_file(name, key)
    worlds.check(config)
    with terminal.counter("possible worlds", "worlds", is_late=True) as show:
        planned = worlds.compared(config, request.values, show)
    runs = _calibrations(request, terminal)
    costs = [Costs.of(one) for one in runs if len(one.ranks) > 1]
    if not costs:
        raise ConfigError(
            "plan.calibration: only runs of one process; what messages and servers cost is known "
            "of parallel=hybrid"
        )
    chosen = [most_like(costs, one.config) for one in planned]
    counted = _counted(config, planned, terminal)
    predictions: list[Prediction] = []
    with terminal.counter("predict", "worlds", is_late=True) as show:
        for one, of, sent in zip(planned, chosen, counted, strict=True):
            predictions.append(predict(one, of, sent))
            show(len(predictions), len(planned))
    pairs = zip(planned, chosen, strict=True)
    remarks = dict.fromkeys(remark for one, of in pairs for remark in of.remarks(one.config))
    if config.plan.search is not None:
        predictions.sort(key=lambda one: -one.samples_per_second)
        predictions = predictions[:SHOWN]
    measured = [one.samples_per_second for one in runs if len(one.ranks) == 1]
    alone = measured[0] if measured else one_process(config, most_like(costs, config))
    terminal.table(table(predictions))
    for line in (*lines(predictions), *remarks):
        terminal.line(line)
    how = "measured" if measured else "its parts added up"
    terminal.line(f"one process on one machine: {alone:,.0f} samples/s ({how})")
    _write(config, predictions, runs, alone, terminal)
    return ExitCode.DONE


def table(predictions: Sequence[Prediction]) -> Table:
    """A line for each world."""
    return Table(HEAD, [_cells(one) for one in predictions], "llrrrrrl")


def lines(predictions: Sequence[Prediction]) -> list[str]:
    """What would make each world faster, and how much memory it needs."""
    told: list[str] = []
    for one in predictions[:SHOWN]:
        changes = sorted(one.what_if.items(), key=lambda change: -change[1])
        texts = (f"{change} {100 * (times - 1):+.0f} %" for change, times in changes)
        most = max(one.memory_bytes, key=lambda name: one.memory_bytes[name])
        memory = f"{quantity(one.memory_bytes[most])}B of memory for {most}"
        links = f" on {_links(one)}" if one.rate else ""
        how = ", calculated from one trainer" if one.method == CLASSES else ""
        told.append(f"{one.name}{links}: {', '.join(texts)}; {memory}{how}")
    return told


def _calibrations(request: Request, terminal: Terminal) -> list[Calibration]:
    given = request.config.plan.calibration
    if given is None:
        return probe(request, terminal, TerminalView(quiet()))
    runs = [read(Path(one)) for one in ([given] if isinstance(given, str) else given)]
    for one in runs:
        check_same_model(one, request.config)
    return runs


def _counted(
    config: Config, planned: Sequence[worlds.Planned], terminal: Terminal
) -> list[Densities | None]:
    """What each world sends, where that is to be counted."""
    steps = config.plan.count_steps
    if steps is None:
        return [None] * len(planned)
    largest = max(topology(one.config).size for one in planned)
    if largest > MOST_RANKS:
        raise ConfigError(
            f"plan.count_steps = {steps}: a world of {largest} ranks is too large to be trained in "
            f"this process; at most {MOST_RANKS}"
        )
    return list(count(planned, steps, terminal, TerminalView(quiet())))


def _cells(one: Prediction) -> list[str]:
    fullest = max(one.link_use.values(), default=0.0)
    return [
        one.name,
        _links(one) or MISSING,
        f"{one.samples_per_second:,.0f}",
        MISSING if one.seconds is None else duration(one.seconds),
        quantity(sum(one.bytes_per_sample.values())),
        f"{100 * one.core_use:.0f}%",
        f"{100 * fullest:.0f}%" if fullest else MISSING,
        str(one.bottleneck),
    ]


def _links(one: Prediction) -> str:
    return " ".join(text for text in (one.rate, one.latency) if text)


def _write(
    config: Config,
    predictions: Sequence[Prediction],
    runs: Sequence[Calibration],
    alone: float,
    terminal: Terminal,
) -> None:
    """The JSON file and the picture, where they are wanted."""
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
