"""Sinks of W&B and MLflow, offline, and that none of them ever harms a run."""

import json
import struct
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import made_runs
import pytest
from patience import HANG_SECONDS
from world_runs import Train

from dlrm_hybrid.config.compose import values_of
from dlrm_hybrid.config.validate import validate
from dlrm_hybrid.run.rank import training
from dlrm_hybrid.telemetry import trackers
from dlrm_hybrid.telemetry.events import Event, Kind
from dlrm_hybrid.telemetry.trackers import Guarded, open_trackers, require
from dlrm_hybrid.train.progress import Progress
from dlrm_hybrid.types import ResourceError


def progress(step: int, loss: float) -> Event:
    values = {"samples": 100 * step, "timed_rows": 0, "seconds_by_span": {}}
    return made_runs.progress(step, loss, 1e9 + step, **values)


FINISHED = Event(Kind.FINISHED, 3, 1e9 + 4, {})


class Failing:
    """Takes two events and fails at the third."""

    def __init__(self) -> None:
        self.taken: list[int] = []

    def write(self, event: Event) -> None:
        if len(self.taken) == 2:
            raise ConnectionError("the server is gone")
        self.taken.append(event.step)

    def close(self) -> None:
        raise AssertionError("it was given up")


def test_a_tracker_that_fails_is_given_up_once_and_said() -> None:
    sink, said = Failing(), list[str]()
    guarded = Guarded(sink, "telemetry.mlflow", said.append)
    for step in range(6):
        guarded.write(progress(step, 0.5))
    guarded.close()
    assert sink.taken == [0, 1]
    assert said == [
        "telemetry.mlflow: gets nothing more, the run goes on: "
        "ConnectionError('the server is gone')"
    ]


def test_training_does_not_wait_for_a_server(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trackers, "CLOSE_SECONDS", 0.05)
    answers, said = threading.Event(), list[str]()

    class Slow:
        def write(self, event: Event) -> None:
            assert answers.wait(HANG_SECONDS)

        def close(self) -> None:
            pass

    guarded = Guarded(Slow(), "telemetry.wandb", said.append)
    for step in range(1000):
        guarded.write(progress(step, 0.5))
    guarded.close()
    assert said == ["telemetry.wandb: has not taken all in 0.05 s; the rest is lost"]
    answers.set()


def test_what_is_not_installed_is_named_with_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(trackers, "find_spec", lambda package: None)
    require({"wandb": None, "mlflow": None})
    with pytest.raises(ResourceError) as refused:
        require({"wandb": None, "mlflow": "file:///runs"})
    assert str(refused.value) == (
        "telemetry.mlflow = file:///runs: needs pip install 'dlrm-hybrid[tracking]'"
    )


def test_mlflow_has_the_tags_of_tensorboard_and_goes_on_with_its_run(tmp_path: Path) -> None:
    tracking = pytest.importorskip("mlflow.tracking", reason="needs dlrm-hybrid[tracking]")
    uri = (tmp_path / "store").as_uri()
    config = {f"section.key{number}": number for number in range(120)} | {"long": "x" * 900}

    def record(*events: Event) -> None:
        (sink,) = open_trackers(
            tmp_path, {"wandb": None, "mlflow": uri}, config, "mine", lambda text: pytest.fail(text)
        )
        for event in events:
            sink.write(event)
        sink.close()

    record(progress(1, 0.7), progress(2, 0.6))
    run_id = json.loads((tmp_path / "trackers.json").read_text())["mlflow"]
    client = tracking.MlflowClient(uri)
    assert client.get_run(run_id).info.status == "FAILED"  # it has not said that it is finished
    record(progress(3, 0.5), FINISHED)
    run = client.get_run(run_id)
    assert (run.info.status, run.info.run_name) == ("FINISHED", "mine")
    assert len(run.data.params) == 121
    assert run.data.params["section.key7"] == "7"
    points = client.get_metric_history(run_id, "train/loss")
    assert [(one.step, one.value) for one in points] == [(100, 0.7), (200, 0.6), (300, 0.5)]
    assert run.data.metrics["train/step"] == 3


def test_mlflow_that_cannot_begin_is_refused(tmp_path: Path) -> None:
    pytest.importorskip("mlflow.tracking", reason="needs dlrm-hybrid[tracking]")
    with pytest.raises(ResourceError, match=r"^telemetry.mlflow = nowhere://x: "):
        list(open_trackers(tmp_path, {"mlflow": "nowhere://x"}, {}, "mine", lambda text: None))


class Opened:
    """A sink that knows whether it was closed."""

    is_open = True

    def close(self) -> None:
        self.is_open = False


def test_what_has_been_opened_is_closed_where_the_next_cannot_begin(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    opened: list[Opened] = []

    def open_one(*given: object) -> Opened:
        opened.append(Opened())
        return opened[-1]

    def refuse(*given: object) -> Opened:
        raise ConnectionError("no server")

    for name, make in (("Wandb", open_one), ("Mlflow", refuse), ("require", lambda options: None)):
        monkeypatch.setattr(trackers, name, make)
    monkeypatch.setattr(training, "JsonLines", open_one)
    chosen = ("telemetry.tensorboard=false", "telemetry.wandb=offline", "telemetry.mlflow=x")
    config = validate(values_of(chosen))
    task = SimpleNamespace(run_folder=str(tmp_path))
    job: Any = SimpleNamespace(task=task, config=config, values={}, report=lambda event: None)
    with (
        pytest.raises(ResourceError, match="telemetry.mlflow = x: no server"),
        training._recording(job, Progress()),
    ):
        pass
    assert [one.is_open for one in opened] == [False, False]


BLOCK_BYTES, BEGIN_BYTES, HEAD_BYTES = 1 << 15, 7, 7


def records(path: Path) -> Iterator[bytes]:
    """Those of a file of W&B: LevelDB's log format after a head of its own."""
    data, at, parts = path.read_bytes(), BEGIN_BYTES, list[bytes]()
    assert data[:4] == b":W&B"
    while at + HEAD_BYTES <= len(data):
        if BLOCK_BYTES - at % BLOCK_BYTES < HEAD_BYTES:
            at += BLOCK_BYTES - at % BLOCK_BYTES
            continue
        length, kind = struct.unpack_from("<HB", data, at + 4)
        parts.append(data[at + HEAD_BYTES : at + HEAD_BYTES + length])
        at += HEAD_BYTES + length
        if kind in (1, 4):  # whole, or its last part
            yield b"".join(parts)
            parts.clear()


def history(path: Path) -> list[dict[str, Any]]:
    """What was logged to W&B, one row a call."""
    protocol = pytest.importorskip("wandb.proto.wandb_internal_pb2")
    found: list[dict[str, Any]] = []
    for data in records(path):
        record = protocol.Record()
        record.ParseFromString(data)
        if record.HasField("history"):
            items = record.history.item
            found.append(
                {one.key or ".".join(one.nested_key): json.loads(one.value_json) for one in items}
            )
    return found


@pytest.mark.slow
def test_a_run_is_recorded_offline_for_wandb(train: Train) -> None:
    pytest.importorskip("wandb", reason="needs dlrm-hybrid[tracking]")
    options = ("telemetry.wandb=offline", "telemetry.every=10", "train.evaluate_every=20")
    code, folder = train("run", "train.steps=40", *options)
    assert code == 0
    (record,) = folder.glob("wandb/offline-run-*/run-*.wandb")
    run_id = json.loads((folder / "trackers.json").read_text())["wandb"]
    assert record.name == f"run-{run_id}.wandb"
    logged = history(record)
    events = [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]
    losses = {one["samples"]: one["loss"] for one in events if one["kind"] == "progress"}
    assert {one["samples"]: one["train/loss"] for one in logged if "train/loss" in one} == losses
    assert len(losses) == 4
    assert [one["samples"] for one in logged if "val/loss" in one] == [20 * 64, 40 * 64]
    assert "gets nothing more" not in (folder / "log" / "worker-0.log").read_text()


def test_a_run_that_lacks_a_tracker_does_not_begin(
    train: Train, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(trackers, "find_spec", lambda package: None)
    code, folder = train("run", "telemetry.wandb=offline")
    assert code == 5
    assert capsys.readouterr().err == (
        "telemetry.wandb = offline: needs pip install 'dlrm-hybrid[tracking]'\n"
    )
    assert not folder.exists()
