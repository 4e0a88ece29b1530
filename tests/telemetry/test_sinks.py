"""Events: their lines, and what every sink makes of them."""

from pathlib import Path

from made_runs import progress
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from dlrm_hybrid.telemetry import compression, events
from dlrm_hybrid.telemetry.events import Event, Kind
from dlrm_hybrid.telemetry.sinks import JsonLines, TensorBoard


def point(samples: int, loss: float) -> Event:
    timed = {"timed_rows": 100, "timed_seconds": 2.0, "timed_cpu_seconds": 1.0}
    sent = {"sent_bytes": 3000, "dense_equivalent_bytes": 12_000, "sent_rows": 100}
    values = {**timed, **sent, "samples_per_step": 10, "accuracy": 0.5, "samples": samples}
    spans = {"compute": 1.5, "wait": 0.5}
    return progress(samples // 10, loss, seconds_by_span=spans, **values)


def scores(samples: int) -> Event:
    values = {
        "samples": samples,
        "log_loss": 0.4,
        "accuracy": 0.8,
        "auc": None,
        "normalized_entropy": 0.9,
    }
    return Event(Kind.EVALUATED, samples // 10, 1.0, values)


def cut(samples: int) -> Event:
    counts = {"gradient.w": compression.counted(100, 5, 1.0, 1)}
    values = {"samples": samples, "of": compression.values_of(counts)}
    return Event(Kind.COMPRESSION, samples // 10, 1.0, values)


def scalars(folder: Path) -> dict[str, list[tuple[int, float]]]:
    record = EventAccumulator(str(folder)).Reload()
    return {
        tag: [(one.step, round(one.value, 6)) for one in record.Scalars(tag)]
        for tag in record.Tags()["scalars"]
    }


def test_tensorboard_shows_the_usual_tags_over_samples(tmp_path: Path) -> None:
    sink = TensorBoard(tmp_path, first_samples=0)
    saved = Event(Kind.SAVED, 2, 1.0, {})
    for event in (point(10, 0.5), point(20, 0.25), cut(20), scores(20), saved):
        sink.write(event)
    sink.close()
    assert scalars(tmp_path) == {
        "train/loss": [(10, 0.5), (20, 0.25)],
        "train/accuracy": [(10, 0.5), (20, 0.5)],
        "lr": [(10, 0.1), (20, 0.1)],
        "train/step": [(10, 1.0), (20, 2.0)],
        "throughput/examples_per_s": [(10, 50.0), (20, 50.0)],
        "cpu/percent": [(10, 50.0), (20, 50.0)],
        "time/compute_ms": [(10, 150.0), (20, 150.0)],
        "time/wait_ms": [(10, 50.0), (20, 50.0)],
        "net/tx_bytes_per_step": [(10, 300.0), (20, 300.0)],
        "net/compression_ratio": [(10, 4.0), (20, 4.0)],
        "compression/gradient_density": [(20, 0.05)],
        "val/loss": [(20, 0.4)],
        "val/accuracy": [(20, 0.8)],
        "val/ne": [(20, 0.9)],
    }


def test_a_point_before_the_first_timed_step_has_no_times(tmp_path: Path) -> None:
    sink = TensorBoard(tmp_path, first_samples=0)
    untimed = {"timed_rows": 0, "timed_seconds": 1e-5, "seconds_by_span": {"compute": 1e-5}}
    early = point(10, 0.5)
    sink.write(Event(early.kind, early.step, 1.0, {**early.values, **untimed}))
    sink.close()
    tags = scalars(tmp_path)
    assert tags["train/loss"] == [(10, 0.5)]
    assert not [tag for tag in tags if tag.startswith(("throughput/", "cpu/", "time/"))]


def test_a_mean_of_fewer_steps_is_no_point_of_the_loss(tmp_path: Path) -> None:
    sink = TensorBoard(tmp_path, first_samples=0)
    last = point(13, 0.9)
    sink.write(point(10, 0.5))
    sink.write(Event(last.kind, last.step, 1.0, {**last.values, "is_short": True}))
    sink.close()
    assert scalars(tmp_path)["train/loss"] == [(10, 0.5)]
    assert scalars(tmp_path)["lr"] == [(10, 0.1), (13, 0.1)]


def test_a_resumed_run_shows_no_point_twice(tmp_path: Path) -> None:
    first = TensorBoard(tmp_path, first_samples=0)
    for samples in (10, 20, 30):
        first.write(point(samples, 0.5))
    first.close()
    resumed = TensorBoard(tmp_path, first_samples=10)
    for samples in (20, 30, 40):
        resumed.write(point(samples, 0.5))
    resumed.close()
    assert [step for step, _ in scalars(tmp_path)["train/loss"]] == [10, 20, 30, 40]


def test_events_survive_their_file_but_for_a_line_cut_short(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    whole = Event(Kind.PROGRESS, 7, 1.25, {"loss": 0.1 + 0.2, "auc": None, "path": "a b"})
    sink = JsonLines(path)
    sink.write(whole)
    sink.close()
    path.write_text(path.read_text() + whole.to_json()[:9])
    assert list(events.read(path)) == [whole]


def test_rewinding_drops_what_comes_again() -> None:
    record = [Event(Kind.PROGRESS, step, 0.0, {}) for step in (1, 2, 3)]
    record += [Event(Kind.FINISHED, 2, 0.0, {}), Event(Kind.EVALUATED, 2, 0.0, {})]
    assert [(event.kind.value, event.step) for event in events.until(record, 2, 2)] == [
        ("progress", 1),
        ("progress", 2),
        ("evaluated", 2),
    ]


def test_an_evaluation_after_saving_is_made_again() -> None:
    record = [Event(Kind.EVALUATED, step, 0.0, {}) for step in (10, 20)]
    attempt = Event(Kind.STARTED, 20, 0.0, {})
    assert events.until([*record, attempt], 20, 10) == [record[0], attempt]
    assert events.until([*record, attempt], 20, -1) == [attempt]
    validated = [
        Event(one.kind, one.step, 0.0, {"part": part})
        for one in record
        for part in ("validation", "test")
    ]
    assert events.until(validated, 20, 20, 10) == validated[:3]
    assert events.until(validated, 20, 10) == validated[:1]
