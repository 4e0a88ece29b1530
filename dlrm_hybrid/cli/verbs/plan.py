"""The verb `plan`: predicts how fast worlds would train, as a table, JSON and a picture."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dlrm_hybrid.cli.terminal import Terminal, duration, quantity, quiet
from dlrm_hybrid.cli.verbs.train import TerminalView
from dlrm_hybrid.config.schema import Config
from dlrm_hybrid.data.shards import open_shards
from dlrm_hybrid.disk import writing
from dlrm_hybrid.plan import worlds
from dlrm_hybrid.plan.calibration import Calibration, check_same_model, read
from dlrm_hybrid.plan.costs import one_process_seconds
from dlrm_hybrid.plan.prediction import (
    Costs,
    Prediction,
    cores,
    most_like,
    predict,
    remarks,
    with_changes,
)
from dlrm_hybrid.plan.probe import probe
from dlrm_hybrid.plan.worlds import Planned
from dlrm_hybrid.report.table import MISSING, Table
from dlrm_hybrid.run.assembly.build import semantics
from dlrm_hybrid.run.folder import output_file, write_whole
from dlrm_hybrid.run.launch.environment import where_to_start
from dlrm_hybrid.run.readiness import ready_rows
from dlrm_hybrid.run.request import Request
from dlrm_hybrid.types import ConfigError, ExitCode

if TYPE_CHECKING:
    from dlrm_hybrid.plan.counting import Counter
    from dlrm_hybrid.plan.layout import Layout

OUTPUT_KEY, PICTURE_KEY = "plan.output", "plan.picture"
HEAD = ("world", "links", "samples/s", "time", "B/sample", "cores", "fullest link", "limited by")


def run(request: Request) -> int:
    """Predict the worlds of `plan`."""
    from dlrm_hybrid.plan.counting import Counter  # torch takes seconds

    config, terminal = request.config, Terminal()
    for name, key in ((config.plan.output, OUTPUT_KEY), (config.plan.picture, PICTURE_KEY)):
        if name is not None:
            output_file(name, key)
    worlds.check(config)
    planned, probed = _planned(request)  # raises before any work is done
    runs = _calibrations(config, probed, terminal)
    hybrid = [run for run in runs if run.ranks]
    if not hybrid:
        raise ConfigError(
            "plan.calibration: only runs of one process; what messages and servers cost is known "
            "of parallel=hybrid"
        )
    shards = open_shards(ready_rows(request, None, terminal), semantics(config))
    counter = Counter(shards, config.plan.count_steps, terminal.line)
    layouts = [counter.layout(replace(run.config, data=config.data)) for run in hybrid]
    costs = list(map(Costs.of, hybrid, layouts))
    predictions = _predictions(planned, costs, counter, terminal)
    configs = [prediction.planned.config for prediction in predictions]
    notes = dict.fromkeys(remark for cfg in configs for remark in remarks(costs, cfg))
    rows = config.train.batch_size
    alike = [run for run in runs if not run.ranks and run.config.train.batch_size == rows]
    seconds = one_process_seconds(most_like(costs, config).units, counter.shape(config))
    alone = alike[0].samples_per_second if alike else rows / seconds
    terminal.table(table(predictions))
    for line in (*lines(predictions), *fastest(predictions), *notes):
        terminal.line(line)
    how = "measured" if alike else "its parts added up"
    terminal.line(f"one process on one machine: {alone:,.0f} samples/s ({how})")
    chosen = [_choice(best, costs, counter, alone) for best in _best(predictions)]
    for choice in chosen:
        terminal.line(in_words(choice))
    values = {
        "one_process_samples_per_second": alone,
        "calibrations": [str(run.folder) for run in runs],
        "worlds": [prediction.to_json() for prediction in predictions],
        "machines": chosen,
    }
    _write(config, values, predictions, terminal)
    return ExitCode.DONE


def table(predictions: Sequence[Prediction]) -> Table:
    """The table of predictions, a line for each world."""
    return Table(HEAD, [_cells(prediction) for prediction in predictions], "llrrrrrl")


def lines(predictions: Sequence[Prediction]) -> list[str]:
    """A line for each world: what would make it faster, and how much memory it needs."""
    texts: list[str] = []
    for world in predictions:
        if not world.what_if:
            continue
        changes = sorted(world.what_if.items(), key=lambda change: -change[1])
        faster = ", ".join(f"{change} {100 * (times - 1):+.0f} %" for change, times in changes)
        most = max(world.memory_bytes, key=lambda name: world.memory_bytes[name])
        memory = f"{quantity(world.memory_bytes[most])}B of memory for {most}"
        where = f" on {world.planned.links}" if world.planned.rate else ""
        texts.append(f"{world.planned.name}{where}: {faster}; {memory}")
    return texts


def fastest(predictions: Sequence[Prediction]) -> list[str]:
    """A line with the fastest world for each kind of links on which several were compared."""
    texts: list[str] = []
    for links in dict.fromkeys(world.planned.links for world in predictions):
        compared = [world for world in predictions if world.planned.links == links]
        if compared[0].planned.overrides:
            continue  # each number of machines has its own
        best = max(compared, key=lambda world: world.samples_per_second)
        where = f" on {links}" if links else ""
        if len(compared) > 1:
            speed = f"{best.samples_per_second:,.0f} samples/s"
            texts.append(f"fastest{where}: {best.planned.name}, {speed}")
    return texts


def in_words(choice: Mapping[str, Any]) -> str:
    """The best world on some machines, beside plain data parallelism and one machine."""
    speed, ddp = choice["samples_per_second"], choice["ddp_samples_per_second"]
    alone = choice["one_process_samples_per_second"]
    links = " ".join(filter(None, (choice["rate"], choice["latency"])))
    start = "start here" if choice["is_emulated"] else where_to_start()
    return (
        f"{choice['machines']} machines on {links}: {choice['name']}, {speed:,.0f} samples/s; "
        f"{speed / ddp:.2f} times DDP + TorchRec in bfloat16 ({ddp:,.0f}), "
        f"{speed / alone:.2f} times one process{'' if speed > alone else ', which is faster'}; "
        f"{start}: {choice['command']}"
    )


def _planned(request: Request) -> tuple[list[Planned], list[worlds.Values]]:
    """The worlds to predict, and configurations of those to make runs of if there are none."""
    numbers = request.config.plan.machines
    if numbers is None:
        return worlds.compared(request.config, request.values), [request.values]
    from dlrm_hybrid.plan.machines import kinds, worlds_on

    machine_kinds = kinds(request)
    several = numbers if isinstance(numbers, tuple) else (numbers,)
    planned = [world for number in several for world in worlds_on(machine_kinds, number)]
    return planned, [kind.values for kind in machine_kinds if kind.has_servers]


def _predictions(
    planned: Sequence[Planned], costs: Sequence[Costs], counter: Counter, terminal: Terminal
) -> list[Prediction]:
    """Predict worlds; those for the same machines come fastest first."""
    predicted: list[tuple[Prediction, Layout, Costs]] = []
    with terminal.counter("predict", "worlds", is_late=True) as show:
        for world in planned:
            layout, like = counter.layout(world.config), most_like(costs, world.config)
            predicted.append((predict(world, layout, like, counter.train_rows), layout, like))
            show(len(predicted), len(planned))
    if planned and planned[0].overrides:
        order = list(dict.fromkeys(_rivals(prediction) for prediction, *_ in predicted))
        predicted.sort(key=lambda row: (order.index(_rivals(row[0])), -row[0].samples_per_second))
        best = _best([prediction for prediction, *_ in predicted])
        return [with_changes(*row) if row[0] in best else row[0] for row in predicted]
    return [with_changes(*row) for row in predicted]


def _rivals(world: Prediction) -> tuple[int, str]:
    return world.planned.config.parallel.machines or 0, world.planned.links


def _best(predictions: Sequence[Prediction]) -> list[Prediction]:
    """The first prediction for each number of machines and kind of links."""
    first = {_rivals(world): world for world in reversed(predictions) if world.planned.overrides}
    return list(first.values())[::-1]


def _choice(
    best: Prediction, costs: Sequence[Costs], counter: Counter, alone: float
) -> dict[str, Any]:
    from dlrm_hybrid.plan.machines import command, ddp_seconds

    config, planned = best.planned.config, best.planned
    rows = config.train.batch_size
    hosts = planned.hosts(cores(config, most_like(costs, config)))
    number = config.parallel.machines or 1
    seconds = ddp_seconds(counter.shape(config), hosts, rows / alone)
    return {
        "machines": number,
        "rate": planned.rate,
        "latency": planned.latency,
        "is_emulated": config.network.name == "emulated",
        "name": planned.name,
        "samples_per_second": best.samples_per_second,
        "ddp_samples_per_second": config.parallel.trainers * rows / seconds,
        "one_process_samples_per_second": alone,
        "command": command(planned),
    }


def _calibrations(
    config: Config, probed: Sequence[worlds.Values], terminal: Terminal
) -> list[Calibration]:
    folders = config.plan.calibration
    if folders is None:
        return probe(probed, terminal, TerminalView(quiet()))
    runs = [read(Path(path)) for path in (folders if isinstance(folders, tuple) else (folders,))]
    for run in runs:
        check_same_model(run, config)
    return runs


def _cells(world: Prediction) -> list[str]:
    fullest = max(world.use_of("link").values(), default=0.0)
    return [
        world.planned.name,
        world.planned.links or MISSING,
        f"{world.samples_per_second:,.0f}",
        duration(world.seconds),
        quantity(sum(world.bytes_per_sample.values())),
        f"{100 * world.uses['cores']:.0f}%",
        f"{100 * fullest:.0f}%" if fullest else MISSING,
        str(world.bottleneck),
    ]


def _write(
    config: Config,
    values: Mapping[str, Any],
    predictions: Sequence[Prediction],
    terminal: Terminal,
) -> None:
    if config.plan.output is not None:
        write_whole(Path(config.plan.output), json.dumps(values, indent=1) + "\n", OUTPUT_KEY)
        terminal.line(f"wrote {config.plan.output}")
    if config.plan.picture is not None:
        from dlrm_hybrid.plan.picture import draw  # matplotlib takes most of a second

        path = Path(config.plan.picture)
        with writing(path, PICTURE_KEY):
            draw(predictions, path)
        terminal.line(f"wrote {path}")
