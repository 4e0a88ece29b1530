"""Short runs here and now: to take costs from where no run is given, and to count bytes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from dlrm_hybrid.config import compose
from dlrm_hybrid.config.validate import plain_values, validate
from dlrm_hybrid.plan.calibration import Calibration, densities_of, read
from dlrm_hybrid.plan.layout import Densities
from dlrm_hybrid.plan.worlds import Planned
from dlrm_hybrid.report.runs import read_run
from dlrm_hybrid.run.display import Display, TrainingView
from dlrm_hybrid.run.request import Request
from dlrm_hybrid.run.training import train

STEPS = 300
RATE = "1gbit"
MOST_TRAINERS, MOST_SERVERS = 2, 1
COMMON = ("data", "model", "optimizer", "precision", "threads", "train")
FIRST = "plan.calibration: none given, so two short runs are made here"

Values = Mapping[str, Any]


def probe(request: Request, display: Display, view: TrainingView) -> list[Calibration]:
    """Train the configured world and one process, some seconds each.

    Args:
        request: of the command line.
        display: says what is done.
        view: shows the runs.

    Raises:
        ConfigError: the rows are too few to time anything.
        RunFailedError: a run ended without a result.
    """
    display.line(FIRST)
    found: list[Calibration] = []
    with TemporaryDirectory(prefix="dlrm_hybrid-plan-") as folder:
        for name, values in (("world", world_of(request.values)), ("one", alone(request.values))):
            run = Path(folder) / name
            train(Request(validate(values), values, run, ()), display, view)
            found.append(read(run))
    return found


def count(
    planned: Sequence[Planned], steps: int, display: Display, view: TrainingView
) -> Iterator[Densities]:
    """What each world sends, from so many steps of it in this process, without links.

    The same elements are sent as between processes: bit for bit with `sync` and `bounded`, in an
    order of arrival drawn from the seed with `async`.

    Args:
        planned: the worlds.
        steps: of each; a run that is shorter is made whole.
        display: says what is done.
        view: shows the runs.

    Raises:
        RunFailedError: a run ended without a result.
    """
    counted: dict[str, Densities] = {}
    for one in planned:
        values = in_process(one, steps)
        if (key := repr(values)) not in counted:  # links change nothing of it
            display.line(f"{one.name}: {values['train']['steps']} steps to count its bytes")
            with TemporaryDirectory(prefix="dlrm_hybrid-plan-") as folder:
                run = Path(folder) / "counted"
                train(Request(validate(values), values, run, ()), display, view)
                counted[key] = densities_of(read_run(run))
        yield counted[key]


def in_process(planned: Planned, steps: int) -> dict[str, Any]:
    """A world of one process that sends what a planned one sends."""
    values = plain_values(planned.config)
    plain = compose.values_of([])
    wanted = planned.config.train.steps
    return _short(
        {
            **values,
            "parallel": {**values["parallel"], "world": "in_process", "elastic": False},
            "embedding": {**values["embedding"], "sharding": "table_wise"},
            "network": plain["network"],
            "plan": plain["plan"],
            "sync": {**values["sync"], "record": False, "replay": None},
        },
        steps if wanted is None else min(steps, wanted),
    )


def world_of(values: Values) -> dict[str, Any]:
    """The configured world, not larger than needed, on links that are fast if it has some."""
    parallel, network = values["parallel"], values["network"]
    emulated = network["name"] == "emulated"
    return _short(
        {
            **values,
            "parallel": {
                **parallel,
                "trainers": min(parallel["trainers"], MOST_TRAINERS),
                "servers": min(parallel["servers"], MOST_SERVERS),
                "world": "processes",
            },
            "network": {**network, **({"rate": RATE, "latency": None} if emulated else {})},
            "sync": {**values["sync"], "record": False, "replay": None},
        }
    )


def alone(values: Values) -> dict[str, Any]:
    """The same model in one process."""
    plain: dict[str, Any] = dict(compose.values_of([]))
    return _short({**plain, **{key: values[key] for key in COMMON}})


def _short(values: Values, steps: int = STEPS) -> dict[str, Any]:
    return {
        **values,
        "train": {**values["train"], "steps": steps, "epochs": 1000, "evaluate_every": 0},
        "checkpoint": {**values["checkpoint"], "every": 0, "minutes": 0.0, "resume": "never"},
        "telemetry": {**values["telemetry"], "tensorboard": False, "wandb": None, "mlflow": None},
        "skip_completed": False,
    }
