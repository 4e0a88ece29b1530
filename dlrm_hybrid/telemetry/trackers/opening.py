"""Which trackers a run has, and that none of them ever harms it."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path
from queue import SimpleQueue
from threading import Thread
from typing import Any, final

from dlrm_hybrid.disk import RUN_FOLDER_KEY, read_object, replace_text, writing
from dlrm_hybrid.telemetry.events import Event
from dlrm_hybrid.telemetry.sinks import Sink
from dlrm_hybrid.types import ResourceError

CLOSE_SECONDS = 60.0  # for what is queued, at the end of a run
IDS_FILE = "trackers.json"  # in the run folder: what the run is called by each
PACKAGES = {"wandb": "wandb", "mlflow": "mlflow"}


@final
class Guarded:
    """Hands events to a sink by a thread, and gives it up where it fails.

    Training never waits for a server, and events.jsonl has all that the sink would have got.
    """

    def __init__(self, sink: Sink, key: str, say: Callable[[str], object]) -> None:
        """Begin the thread.

        Args:
            sink: of a tracker.
            key: of the configuration that has chosen it, for messages.
            say: told once why the sink was given up.
        """
        self._sink = sink
        self._key = key
        self._say = say
        self._queue: SimpleQueue[Event | None] = SimpleQueue()
        self._thread = Thread(target=self._drain, name=key, daemon=True)
        self._thread.start()

    def write(self, event: Event) -> None:
        """Queue the event."""
        self._queue.put(event)

    def close(self) -> None:
        """Wait until the sink has all, but not for ever."""
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
    """Refuse trackers whose packages are not installed.

    Args:
        options: what is chosen, by the key of `telemetry`.

    Raises:
        ResourceError: names the key and what to install.
    """
    for key, value in options.items():
        if value is not None and find_spec(PACKAGES[key]) is None:
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
    """The sinks of the trackers that are chosen; what they call the run is kept in its folder.

    Args:
        folder: of the run.
        options: what is chosen, by the key of `telemetry`.
        config: by dotted key.
        name: of the run.
        say: told why one is given up.

    Raises:
        ResourceError: a tracker cannot begin; names its key.
    """
    require(options)
    ids = read_object(folder, IDS_FILE) if (folder / IDS_FILE).exists() else {}
    for key, value in options.items():
        if value is None:
            continue
        try:
            if key == "wandb":
                from dlrm_hybrid.telemetry.trackers.wandb import Wandb

                ids[key] = run_id = str(ids.get(key) or os.urandom(8).hex())
                sink: Sink = Wandb(folder, value, run_id, config, name)
            else:
                from dlrm_hybrid.telemetry.trackers.mlflow import Mlflow

                sink = mlflow = Mlflow(value, ids.get(key), config, name)
                ids[key] = mlflow.run_id
        except Exception as error:
            raise ResourceError(f"telemetry.{key} = {value}: {error}") from error
        with writing(folder / IDS_FILE, RUN_FOLDER_KEY):
            replace_text(folder / IDS_FILE, json.dumps(ids))
        yield Guarded(sink, f"telemetry.{key}", say)
