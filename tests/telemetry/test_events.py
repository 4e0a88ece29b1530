from pathlib import Path

from dlrm_hybrid.telemetry import events
from dlrm_hybrid.telemetry.events import Event, Kind


def test_an_event_survives_its_line(tmp_path: Path) -> None:
    one = Event(Kind.PROGRESS, 7, 1.25, {"loss": 0.1 + 0.2, "auc": None, "path": "a b"})
    assert events.from_json(one.to_json()) == one


def test_a_line_cut_short_is_left_out(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    whole = Event(Kind.SAVED, 3, 2.0, {"path": "x"})
    path.write_text(whole.to_json() + "\n" + whole.to_json()[:9])
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
