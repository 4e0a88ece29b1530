"""Short runs on this machine, to take costs from if no run is given."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from dlrm_hybrid.config import compose
from dlrm_hybrid.config.validate import validate
from dlrm_hybrid.plan.calibration import Calibration, read
from dlrm_hybrid.run.display import Display, TrainingView
from dlrm_hybrid.run.request import Request
from dlrm_hybrid.run.training import train

STEPS = 300
RATE = "1gbit"
MOST_TRAINERS, MOST_SERVERS = 2, 1
COMMON = ("data", "model", "optimizer", "precision", "threads", "train")
FIRST = "plan.calibration: none given, so short runs are made here"

Values = Mapping[str, Any]


def probe(worlds: Sequence[Values], display: Display, view: TrainingView) -> list[Calibration]:
    """Train worlds and one process, some seconds each.

    Raises:
        ConfigError: the rows are too few to time anything.
        RunFailedError: a run ended without a result.
    """
    display.line(FIRST)
    calibrations: list[Calibration] = []
    with TemporaryDirectory(prefix="dlrm_hybrid-plan-") as folder:
        for number, values in enumerate((*map(world_of, worlds), alone(worlds[0]))):
            run = Path(folder) / str(number)
            train(Request(validate(values), values, run, ()), display, view)
            calibrations.append(read(run))
    return calibrations


def world_of(values: Values) -> dict[str, Any]:
    """The configured world with few trainers and servers, on fast links if it has links."""
    parallel, network = values["parallel"], values["network"]
    emulated = network["name"] == "emulated"
    sync, off = values["sync"], {"record": False, "replay": None}
    most = {"trainers": MOST_TRAINERS, "servers": MOST_SERVERS}
    few = {key: min(parallel[key], number) for key, number in most.items() if key in parallel}
    return _short(
        {
            **values,
            "parallel": {**parallel, **few, "world": "processes", "machines": None},
            "network": {**network, **({"rate": RATE, "latency": None} if emulated else {})},
            "sync": {**sync, **{key: off[key] for key in off.keys() & sync.keys()}},
        }
    )


def alone(values: Values) -> dict[str, Any]:
    """The same model in one process."""
    plain: dict[str, Any] = dict(compose.values_of([]))
    return _short({**plain, **{key: values[key] for key in COMMON}})


def _short(values: Values) -> dict[str, Any]:
    return {
        **values,
        "train": {**values["train"], "steps": STEPS, "epochs": 1000, "evaluate_every": 0},
        "checkpoint": {**values["checkpoint"], "every": 0, "minutes": 0.0, "resume": "never"},
        "telemetry": {**values["telemetry"], "tensorboard": False, "wandb": None, "mlflow": None},
        "skip_completed": False,
    }
