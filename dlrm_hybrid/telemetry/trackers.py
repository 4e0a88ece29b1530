"""Experiment trackers (W&B, MLflow) as sinks that never block or fail a run.

Their packages are imported only if chosen.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from queue import SimpleQueue
from threading import Thread
from typing import Any, final

from dlrm_hybrid.disk import RUN_FOLDER_KEY, read_object, replace_text, writing
from dlrm_hybrid.process import masked
from dlrm_hybrid.telemetry.events import Event, Kind
from dlrm_hybrid.telemetry.sinks import Sink, scalars
from dlrm_hybrid.types import ResourceError

CLOSE_SECONDS = 60.0  # for the queued events, at the end of a run
IDS_FILE = "trackers.json"  # in the run folder: the run's id in each tracker
NAME = "dlrm_hybrid"  # unless WANDB_PROJECT or MLFLOW_EXPERIMENT_NAME names another
AXIS = "samples"
MOST_PARAMS, MOST_CHARACTERS = 100, 500  # MLflow's limits for one request and one value
ENDED = {Kind.FINISHED: "FINISHED", Kind.STOPPED: "KILLED"}  # MLflow's statuses


@final
class Guarded:
    """Passes events to a sink in a thread, and gives the sink up if it fails.

    Training never waits for a server; lost events are in events.jsonl.
    """

    def __init__(self, sink: Sink, key: str, say: Callable[[str], object]) -> None:
        """Start the thread that sends events.

        Args:
            key: configuration key that has chosen it, for messages.
            say: called once with the reason if the sink is given up.
        """
        self._sink = sink
        self._key = key
        self._say = say
        self._queue: SimpleQueue[Event | None] = SimpleQueue()
        self._thread = Thread(target=self._drain, name=key, daemon=True)
        self._thread.start()

    def write(self, event: Event) -> None:
        """Queue the event for the thread that sends it."""
        self._queue.put(event)

    def close(self) -> None:
        """Wait until the sink has all events, at most `CLOSE_SECONDS`."""
        self._queue.put(None)
        self._thread.join(CLOSE_SECONDS)
        if self._thread.is_alive():
            self._say(f"{self._key}: has not taken all in {CLOSE_SECONDS:g} s; the rest is lost")

    def _drain(self) -> None:
        try:
            while (event := self._queue.get()) is not None:
                self._sink.write(event)
            self._sink.close()
        except Exception as error:
            self._say(f"{self._key}: gets nothing more, the run goes on: {error!r:.400}")


def require(options: Mapping[str, str | None]) -> None:
    """Raise ResourceError, with the command, if the package of a chosen tracker is missing."""
    for key, value in options.items():
        if value is not None and find_spec(key) is None:
            raise ResourceError(
                f"telemetry.{key} = {value}: needs pip install 'dlrm-hybrid[tracking]'"
            )


def open_trackers(
    folder: Path,
    options: Mapping[str, str | None],
    config: Mapping[str, Any],
    name: str,
    say: Callable[[str], object],
) -> Iterator[Sink]:
    """Yield the sinks of the chosen trackers, and keep the run's ids in them in its folder.

    Raises:
        ResourceError: a tracker cannot start; names its key.
    """
    require(options)
    ids = read_object(folder, IDS_FILE) if (folder / IDS_FILE).exists() else {}
    for key, value in options.items():
        if value is None:
            continue
        try:
            if key == "wandb":
                ids[key] = run_id = str(ids.get(key) or os.urandom(8).hex())
                sink: Sink = Wandb(folder, value, run_id, config, name)
            else:
                sink = mlflow = Mlflow(value, ids.get(key), config, name)
                ids[key] = mlflow.run_id
        except Exception as error:
            raise ResourceError(f"telemetry.{key} = {value}: {error}") from error
        with writing(folder / IDS_FILE, RUN_FOLDER_KEY):
            replace_text(folder / IDS_FILE, json.dumps(ids))
        yield Guarded(sink, f"telemetry.{key}", say)


@final
class Wandb:
    """Sink to a run of W&B, with the tags of TensorBoard over training rows seen."""

    def __init__(
        self, folder: Path, mode: str, run_id: str, config: Mapping[str, Any], name: str
    ) -> None:
        """Start a run, or continue it.

        Args:
            folder: folder of the run; W&B writes to `wandb/` in it.
            run_id: id in W&B, the same for all attempts of a run.
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
        with masked():  # W&B's process must not see Ctrl-C: the run decides when to end
            self._run = library.init(
                project=os.environ.get("WANDB_PROJECT", NAME),
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
        """Record the queued events and end W&B's run."""
        self._run.finish()


@final
class Mlflow:
    """Sink to a run of MLflow, with the tags of TensorBoard; its step is training rows seen."""

    def __init__(self, uri: str, run_id: str | None, config: Mapping[str, Any], name: str) -> None:
        """Start a run, or continue it.

        Args:
            uri: address of the tracking server, database or folder.
            run_id: id in MLflow from an earlier attempt; None for a new run.
            config: the whole configuration by dotted key.
        """
        if "://" not in uri or uri.startswith("file:"):
            os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")  # a folder was asked for
        self._entities: Any = import_module("mlflow.entities")
        self._client: Any = import_module("mlflow.tracking").MlflowClient(uri)
        self._status = "FAILED"
        if run_id is None:
            title = os.environ.get("MLFLOW_EXPERIMENT_NAME", NAME)
            known = self._client.get_experiment_by_name(title)
            experiment = known.experiment_id if known else self._client.create_experiment(title)
            run = self._client.create_run(str(experiment), run_name=name)
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
        self._status = ENDED.get(event.kind, self._status)
        stamp = round(1000 * event.time_seconds)
        metrics = [
            self._entities.Metric(tag, value, stamp, event.values["samples"])
            for tag, value in scalars(event)
        ]
        if metrics:
            self._client.log_batch(self.run_id, metrics=metrics)

    def close(self) -> None:
        """Record how the run has ended."""
        self._client.set_terminated(self.run_id, self._status)
