"""Scalars for MLflow: into a folder or database, or to a server."""

from __future__ import annotations

import os
from collections.abc import Mapping
from importlib import import_module
from typing import Any, final

from dlrm_hybrid.telemetry.events import Event, Kind
from dlrm_hybrid.telemetry.sinks import scalars

EXPERIMENT = "dlrm_hybrid"  # unless MLFLOW_EXPERIMENT_NAME names another
MOST_PARAMS, MOST_CHARACTERS = 100, 500  # of MLflow, in one request and of one value
ENDED = {Kind.FINISHED: "FINISHED", Kind.STOPPED: "KILLED"}


@final
class Mlflow:
    """A run of MLflow with the tags of TensorBoard; its step is the training rows seen."""

    def __init__(self, uri: str, run_id: str | None, config: Mapping[str, Any], name: str) -> None:
        """Begin a run, or go on with it.

        Args:
            uri: of the tracking server, database or folder.
            run_id: MLflow's, of an earlier attempt; None for a new run.
            config: all of it by dotted key.
            name: of the run.
        """
        if "://" not in uri or uri.startswith("file:"):
            os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")  # a folder was asked for
        self._entities: Any = import_module("mlflow.entities")
        self._client: Any = import_module("mlflow.tracking").MlflowClient(uri)
        self._ended = "FAILED"
        if run_id is None:
            run = self._client.create_run(self._experiment(), run_name=name)
            run_id = str(run.info.run_id)
            params = [
                self._entities.Param(key, str(value)[:MOST_CHARACTERS])
                for key, value in config.items()
            ]
            for begin in range(0, len(params), MOST_PARAMS):
                self._client.log_batch(run_id, params=params[begin : begin + MOST_PARAMS])
        else:
            self._client.update_run(run_id, status="RUNNING")
        self.run_id = run_id

    def write(self, event: Event) -> None:
        """Record the event's scalars, if it has any."""
        self._ended = ENDED.get(event.kind, self._ended)
        stamp = round(1000 * event.time_seconds)
        metrics = [
            self._entities.Metric(tag, value, stamp, event.values["samples"])
            for tag, value in scalars(event)
        ]
        if metrics:
            self._client.log_batch(self.run_id, metrics=metrics)

    def close(self) -> None:
        """Say how the run has ended."""
        self._client.set_terminated(self.run_id, self._ended)

    def _experiment(self) -> str:
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME", EXPERIMENT)
        found = self._client.get_experiment_by_name(name)
        return str(self._client.create_experiment(name) if found is None else found.experiment_id)
