"""Run folders of anybody: what is not as the program writes it is left out, never a traceback."""

import json
import os
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from made_runs import async_events, make_run, plain_events

from dlrm_hybrid.cli.main import run
from dlrm_hybrid.plan import calibration
from dlrm_hybrid.report import curves, tables
from dlrm_hybrid.report.labels import labels
from dlrm_hybrid.report.measures import frame
from dlrm_hybrid.report.page import build_report, html, markdown
from dlrm_hybrid.report.ranks import ranks, steps
from dlrm_hybrid.report.runs import Run, read_run
from dlrm_hybrid.telemetry import events
from dlrm_hybrid.telemetry.events import fault_of
from dlrm_hybrid.types import ConfigError, DataError

# Tables and figures take 20 ms: half of the examples that the profile asks for.
EXAMPLES = settings.default.max_examples // 2 if settings.default else 50

ODD = st.recursive(
    st.sampled_from([None, True, "", "1", "\x1b[2J", -1, 0, 10**400, 1e308, -0.0])
    | st.floats()
    | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=5,
)


FREE = ("tick", "stopped", "finished", "failed")  # kinds of which no table needs a value


def spoil(data: st.DataObject, value: Any) -> Any:
    """Change, remove or add something anywhere inside a JSON value."""
    way = data.draw(st.sampled_from(["here", "below", "below", "below"]))
    if way == "below" and isinstance(value, dict) and value:
        key = data.draw(st.sampled_from(sorted(value)))
        if data.draw(st.integers(0, 9)) == 0:
            return {name: inner for name, inner in value.items() if name != key}
        return {**value, key: spoil(data, value[key])}
    if way == "below" and isinstance(value, list) and value:
        place = data.draw(st.integers(0, len(value) - 1))
        return [*value[:place], spoil(data, value[place]), *value[place + 1 :]]
    return data.draw(ODD)


def draw_all(run: Run) -> None:
    """All that a report is made of but its pictures, and what a plan reads."""
    runs, names = [run], labels([run])
    made = (tables.comparison, tables.traffic, tables.roles, tables.origins, tables.spans)
    for make in (*made, tables.staleness, tables.waits, ranks, steps):
        make(runs, names)
    tables.differences([run, run], ["one", "two"])
    for axis in curves.Axis:
        curves.training_loss(run, axis)
        curves.evaluated_loss(run, axis)
    for prefix in ("gradient.", "activation."):
        curves.density(run, prefix)
        curves.threshold(run, prefix)
    curves.network_use(run)
    curves.cpu_use_of_all(run)
    frame(runs)
    with suppress(ConfigError):
        calibration.read(run.folder)


@settings(max_examples=EXAMPLES)
@given(data=st.data(), file=st.sampled_from(["summary.json", "environment.json", "config.json"]))
def test_any_value_in_any_file_is_data(tmp_path: Path, data: st.DataObject, file: str) -> None:
    folder = tmp_path / "run"
    if not folder.exists():
        make_run(folder, record=async_events())
    original = (folder / file).read_text()
    changed = json.dumps(spoil(data, json.loads(original)))
    (folder / file).write_text(changed)
    try:
        draw_all(read_run(folder))
    except DataError as error:
        assert file == "config.json"
        assert str(error).startswith(f"{folder / file}: is not an object")
    finally:
        (folder / file).write_text(original)


def test_a_plan_needs_figures(tmp_path: Path) -> None:
    record = [
        replace(event, values={**event.values, "samples_per_step": 0}) for event in plain_events()
    ]
    make_run(tmp_path / "run", record=record)
    with pytest.raises(ConfigError, match=f"plan.calibration = {tmp_path}/run: its record is "):
        calibration.read(tmp_path / "run")


@settings(max_examples=EXAMPLES)
@given(data=st.data())
def test_any_value_in_any_event_is_data(tmp_path: Path, data: st.DataObject) -> None:
    folder = tmp_path / "run"
    if not folder.exists():
        make_run(folder, record=async_events(), status=None)
        (folder / "events.jsonl").rename(folder / "original")
    lines = (folder / "original").read_text().splitlines()
    for _ in range(data.draw(st.integers(1, 3))):
        place = data.draw(st.integers(0, len(lines) - 1))
        lines[place] = json.dumps(spoil(data, json.loads(lines[place])))
    (folder / "events.jsonl").write_text("".join(f"{line}\n" for line in lines))
    draw_all(read_run(folder))


def test_every_event_that_the_program_writes_is_accepted(paper_runs: Path) -> None:
    for record in [*paper_runs.glob("*/events.jsonl")]:
        found, faults = events.check(record)
        assert found
        assert faults == []


@pytest.mark.parametrize(
    ("line", "told"),
    [
        (b"what", "no event: expected"),
        (b"[]", " = []: "),
        (b'{"kind": "saved", "step": -1, "time_seconds": 1}', "step = -1: "),
        (b'{"kind": "saved", "step": 1, "time_seconds": 1}', "seconds = "),
        (b'{"kind": "saved", "step": 1, "time_seconds": 1, "seconds": NaN}', "no event: "),
        (b'{"kind": "saved", "step": 1, "time_seconds": 1, "seconds": "1"}', "seconds = '1': "),
        (b"\xff", "no event: "),
        (b"[" * 100_000, "no event: "),
    ],
)
def test_a_line_that_is_no_event_is_told_with_its_field(line: bytes, told: str) -> None:
    assert told in (fault_of(line) or "")


def test_every_kind_of_event_is_known_and_no_other(tmp_path: Path) -> None:
    path, whole = tmp_path / "events.jsonl", plain_events()
    others = [events.Event(kind, 1, 1.0, {}) for kind in events.Kind if kind.value in FREE]
    path.write_text("".join(f"{event.to_json()}\n" for event in [*whole, *others]))
    assert events.check(path) == ([*whole, *others], [])
    path.write_text('{"kind": "dance", "step": 1, "time_seconds": 1}\n')
    assert events.check(path) == ([], [f"{path}:1: kind: 'dance' is not a valid Kind"])


def test_what_is_left_out_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder, other, page = tmp_path / "run", tmp_path / "other", tmp_path / "report.html"
    config = make_run(folder, record=plain_events())
    (folder / "config.json").write_text(json.dumps({**config, "name": "\x1b]0;owned\x07"}))
    make_run(other, record=plain_events())
    (folder / "summary.json").write_text('{"status": "compl')
    (folder / "overrides.yaml").write_text("- train.seed=1\n")
    with (folder / "events.jsonl").open("a") as file:
        file.write('null\n{"kind": "progress", "step": "a", "time_seconds": 1}\n')
    argv = ["dlrm_hybrid", "report", f"report.runs={tmp_path}", f"report.output={page}"]
    assert run(argv) == 0
    told = capsys.readouterr().out
    assert f"{folder}: 2 lines of events left out, the first: {folder}/events.jsonl:6: " in told
    assert f"{folder}: left out: {folder}/summary.json: cannot be read: EOF" in told
    assert f"{folder}: left out: {folder}/overrides.yaml: is not the list" in told
    assert "unfinished" in told
    assert "\x1b" not in told + page.read_text() + page.with_suffix(".md").read_text()
    assert "2 lines of events left out" in page.read_text()


def test_names_are_texts_in_markdown_too(tmp_path: Path) -> None:
    named = "<script>x</script>[y](javascript:z)![w](http://v)|\n# u"
    for folder in (tmp_path / "one", tmp_path / "two"):
        config = make_run(folder, record=plain_events())
        (folder / "config.json").write_text(json.dumps({**config, "name": named}))
    for runs in ([tmp_path / "one"], [tmp_path / "one", tmp_path / "two"]):
        text = markdown(build_report([read_run(one) for one in runs], "now"), None)
        assert "&lt;script>" in text or "&lt;script&gt;" in text
        assert not [sign for sign in ("<", "](", "\n# u") if sign in text]


def test_nothing_is_read_through_links_or_pipes(tmp_path: Path) -> None:
    folder, secret = tmp_path / "run", tmp_path / "secret"
    make_run(folder, record=plain_events())
    secret.write_text("{}")
    for file in ("summary.json", "environment.json", "overrides.yaml"):
        (folder / file).unlink()
        (folder / file).symlink_to(secret)
    assert all("leads out of its folder" in remark for remark in read_run(folder).remarks)
    assert len(read_run(folder).remarks) == 3
    (folder / "events.jsonl").unlink()
    os.mkfifo(folder / "events.jsonl")
    with pytest.raises(DataError, match=r"events\.jsonl: is not a plain file"):
        read_run(folder)


def test_extreme_figures_make_a_page(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    make_run(folder, record=async_events())
    summary = json.loads((folder / "summary.json").read_text())

    def extreme(value: Any, figure: float) -> Any:
        if isinstance(value, dict):
            return {key: extreme(inner, figure) for key, inner in value.items()}
        return figure if isinstance(value, (int, float)) else value

    for number, figure in enumerate((1e24, -1e24, 0.0)):
        make_run(tmp_path / str(number), record=async_events())
        path = tmp_path / str(number) / "summary.json"
        path.write_text(json.dumps(extreme(summary, figure)))
    runs = [read_run(tmp_path / str(number)) for number in range(3)]
    document = build_report(runs, "now")
    assert html(document)
    assert markdown(document, None)
