"""Run folders of anybody: texts are shown, damage is refused with its file, no link is followed."""

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest
from made_runs import evaluated, make_run, plain_events, progress, told

from dlrm_hybrid.cli.main import run
from dlrm_hybrid.plan import calibration
from dlrm_hybrid.report.page import build_report, markdown
from dlrm_hybrid.report.runs import read_run
from dlrm_hybrid.telemetry.events import Event, Kind
from dlrm_hybrid.types import ConfigError, DataError, ExitCode


def test_a_plan_needs_figures(tmp_path: Path) -> None:
    rank = told(0, "worker-0.0", 100)
    damaged = {
        **rank.values,
        "timed_steps": 100,
        "peak_rss_bytes": None,
        "seconds_by_span": {"nap": 1.0},
    }
    record = [*plain_events(), replace(rank, values=damaged)]
    make_run(tmp_path / "run", ["parallel=hybrid"], record)
    with pytest.raises(ConfigError, match=f"plan.calibration = {tmp_path}/run: its record is "):
        calibration.read(tmp_path / "run")


@pytest.mark.parametrize(
    ("file", "text", "told"),
    [
        ("events.jsonl", "null\n", "events.jsonl:6: no event: AttributeError"),
        ("events.jsonl", "[" * 100_000 + "\n", "events.jsonl:6: no event: "),
        ("events.jsonl", '{"kind": "dance", "step": 1, "time_seconds": 1}\n', "'dance' is not a"),
        ("events.jsonl", '{"kind": "saved", "step": "a", "time_seconds": 1}\n', "step = 'a'"),
        ("events.jsonl", '{"kind": "saved", "time_seconds": 1}\n', "KeyError('step')"),
        (
            "events.jsonl",
            f'{{"kind": "saved", "step": {10**400}, "time_seconds": 1}}\n',
            "events.jsonl:6: no event: ",
        ),
        ("events.jsonl", '{"kind": "saved", "step": 1, "time_seconds": 1e17}\n', "seconds = 1e+17"),
        ("events.jsonl", '{"kind": "saved", "step": 1, "time_seconds": NaN}\n', "seconds = nan"),
        (
            "events.jsonl",
            progress(30, 0.5, rows=10**400).to_json() + "\n",
            "events.jsonl: is damaged, or of another version of the program: OverflowError(",
        ),
        (
            "events.jsonl",
            '{"kind": "rank", "step": 20, "time_seconds": 1, "role": "\\u001b[2J"}\n',
            "events.jsonl: is damaged, or of another version of the program: KeyError(",
        ),
        ("summary.json", '{"status": "compl', "summary.json: cannot be read: EOF"),
        ("summary.json", '{"status": "complete"}', "summary.json: is of another version"),
        ("config.json", "[1]", "config.json: is not an object"),
        ("config.json", "{", "config.json: "),
        ("environment.json", "null", "environment.json: is not an object"),
        ("environment.json", '{"cores": "x"}', "environment.json: cores = 'x' is no number above"),
        ("environment.json", '{"cores": 0}', "environment.json: cores = 0 is no number above 0"),
        ("overrides.yaml", "- train.seed=1\n", "overrides.yaml: is not the list"),
    ],
)
def test_damage_is_refused_in_a_line_with_the_file(
    tmp_path: Path, file: str, text: str, told: str
) -> None:
    make_run(tmp_path / "run", record=plain_events())
    path = tmp_path / "run" / file
    path.write_text((path.read_text() if file == "events.jsonl" else "") + text)
    with pytest.raises(DataError) as caught:
        read_run(tmp_path / "run")
    (line,) = str(caught.value).splitlines()
    assert str(path) in line and told in line
    assert "\x1b" not in line


def of_wrong(event: Event, **values: object) -> Event:
    """An event whose other values are whole; None takes one away."""
    changed = {**event.values, **values}
    return replace(event, values={name: x for name, x in changed.items() if x is not None})


GRADIENT = {"gradient.top": {"elements": 2, "sent": 1}}


@pytest.mark.parametrize(
    ("file", "change", "told"),
    [
        ("config.json", {"data": 1}, ""),
        ("summary.json", {"network": {}}, "KeyError('bytes_per_sample')"),
        ("summary.json", {"samples": "many"}, ""),
        ("summary.json", {"descends_from": [1]}, ""),
        ("events.jsonl", Event(Kind.COMPRESSION, 20, 1.0, {"of": GRADIENT}), "KeyError('threshold"),
        ("events.jsonl", of_wrong(evaluated(20, 0.5), log_loss=None), "KeyError('log_loss')"),
        ("events.jsonl", of_wrong(evaluated(20, 0.5), log_loss="low"), ""),
        ("events.jsonl", of_wrong(evaluated(20, 0.5), part="none"), ""),
    ],
)
def test_a_wrong_value_is_told_with_the_folder(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    file: str,
    change: dict[str, object] | Event,
    told: str,
) -> None:
    make_run(tmp_path / "whole", record=plain_events())
    make_run(tmp_path / "wrong", record=plain_events())
    path, page = tmp_path / "wrong" / file, tmp_path / "report.html"
    text = path.read_text()
    is_event = isinstance(change, Event)
    path.write_text(
        f"{text}{change.to_json()}\n" if is_event else json.dumps({**json.loads(text), **change})
    )
    argv = ["dlrm_hybrid", "report", f"report.runs={tmp_path}", f"report.output={page}"]
    assert run(argv) == ExitCode.DATA
    error = capsys.readouterr().err
    assert f"{tmp_path}/wrong" in error and f"{tmp_path}/whole" not in error
    assert f": is damaged, or of another version of the program: {told}" in error
    assert not page.exists()


@pytest.mark.parametrize(
    ("event", "told"),
    [
        (of_wrong(plain_events()[0], steps_total="many"), "TypeError("),
        (progress(20, 0.5, sent_bytes=10**400, sent_rows=1), "OverflowError("),
    ],
    ids=["text", "large"],
)
def test_a_watched_run_may_be_wrong_too(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], event: Event, told: str
) -> None:
    make_run(tmp_path / "run", record=[*plain_events(), event])
    assert run(["dlrm_hybrid", "watch", f"watch.run={tmp_path}/run"]) == ExitCode.DATA
    said = f"{tmp_path}/run: is damaged, or of another version of the program: {told}"
    assert said in capsys.readouterr().err


def test_control_characters_are_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder, page = tmp_path / "run", tmp_path / "report.html"
    config = make_run(folder, record=plain_events())
    (folder / "config.json").write_text(json.dumps({**config, "name": "\x1b]0;owned\x07"}))
    argv = ["dlrm_hybrid", "report", f"report.runs={tmp_path}", f"report.output={page}"]
    assert run(argv) == 0
    for text in (capsys.readouterr().out, page.read_text(), page.with_suffix(".md").read_text()):
        assert "\x1b" not in text
        assert "\\x1b]0;owned\\x07" in text


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
    for file in ("summary.json", "environment.json", "overrides.yaml", "events.jsonl"):
        (folder / file).rename(tmp_path / "kept")
        (folder / file).symlink_to(secret)
        with pytest.raises(DataError, match=f"{file}: leads out of its folder"):
            read_run(folder)
        (tmp_path / "kept").replace(folder / file)
    (folder / "events.jsonl").unlink()
    os.mkfifo(folder / "events.jsonl")
    with pytest.raises(DataError, match=r"events\.jsonl: is not a plain file"):
        read_run(folder)
