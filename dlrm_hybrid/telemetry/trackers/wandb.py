"""Scalars for Weights & Biases: into the run folder, to be sent later, or to its server at once."""

from __future__ import annotations

import os
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any, final

from dlrm_hybrid.process import masked
from dlrm_hybrid.telemetry.events import Event
from dlrm_hybrid.telemetry.sinks import scalars

PROJECT = "dlrm_hybrid"  # unless WANDB_PROJECT names another
AXIS = "samples"


@final
class Wandb:
    """A run of W&B with the tags of TensorBoard, over training rows seen."""

    def __init__(
        self, folder: Path, mode: str, run_id: str, config: Mapping[str, Any], name: str
    ) -> None:
        """Begin a run, or go on with it.

        Args:
            folder: of the run; `wandb/` in it gets what is recorded.
            mode: offline or online.
            run_id: the same for all attempts of a run.
            config: all of it.
            name: of the run.
        """
        library: Any = import_module("wandb")
        settings = library.Settings(
            console="off",
            silent=True,
            disable_git=True,
            disable_code=True,
            disable_job_creation=True,
            x_disable_stats=True,
        )
        with masked():  # its own process hears no Ctrl-C: the run decides when to end
            self._run = library.init(
                project=os.environ.get("WANDB_PROJECT", PROJECT),
                dir=str(folder),
                mode=mode,
                id=run_id,
                name=name,
                config=dict(config),
                resume="allow",
                settings=settings,
            )
        self._run.define_metric(AXIS)
        self._run.define_metric("*", step_metric=AXIS)

    def write(self, event: Event) -> None:
        """Record the event's scalars, if it has any."""
        if values := dict(scalars(event)):
            self._run.log({**values, AXIS: event.values["samples"]})

    def close(self) -> None:
        """Record what is queued."""
        self._run.finish()
