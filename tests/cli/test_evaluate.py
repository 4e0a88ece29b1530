"""What `evaluate` takes from its own command line, and what it refuses."""

import json
import os
import shutil
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dlrm_hybrid.checkpoint.manifest import manifest_text
from dlrm_hybrid.cli import terminal
from dlrm_hybrid.cli.main import run
from dlrm_hybrid.config import compose
from dlrm_hybrid.config.choices import CriteoKaggle
from dlrm_hybrid.config.identity import evaluated
from dlrm_hybrid.disk import locked
from dlrm_hybrid.record import defaults_of
from dlrm_hybrid.run.evaluating import saved_config

Evaluate = Callable[..., int]


@pytest.fixture(scope="module")
def trained(small_rows: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two steps."""
    folder = tmp_path_factory.mktemp("trained") / "run"
    argv = ["dlrm_hybrid", "train", *small_rows, "train.steps=2", f"hydra.run.dir={folder}"]
    assert run(argv) == 0
    return folder


@pytest.fixture
def evaluate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Evaluate:
    """In an empty folder of its own."""
    home = tmp_path / "home"
    home.mkdir()
    monkeypatch.chdir(home)
    return lambda checkpoint, *given: run(
        ["dlrm_hybrid", "evaluate", f"evaluate.checkpoint={checkpoint}", *given]
    )


@pytest.fixture
def shows_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Work of any length is shown, at every report."""
    monkeypatch.setattr(terminal, "PLAIN_LINE_SECONDS", 0.0)


def forged(run_folder: Path, target: Path, change: Callable[[dict[str, Any]], object]) -> Path:
    """A copy of a run, with another manifest in its checkpoint."""
    shutil.copytree(run_folder, target)
    path = target / "checkpoints" / "step_00000002" / "manifest.json"
    values = json.loads(path.read_text())
    del values["format"], values["xxh3"]
    change(values)
    path.write_text(manifest_text(values))
    return target


def test_an_output_that_is_no_file_is_refused(
    trained: Path, evaluate: Evaluate, capsys: pytest.CaptureFixture[str]
) -> None:
    assert evaluate(trained, "evaluate.output=.") == 2
    assert "evaluate.output = .: not the name of a file" in capsys.readouterr().err


@pytest.mark.parametrize("kind", ["pipe", "link"])
@pytest.mark.parametrize(
    ("verb", "key", "name"),
    [
        ("evaluate", "evaluate.output", "x"),
        ("plan", "plan.output", "x"),
        ("plan", "plan.picture", "x.svg"),
        ("predict", "predict.output", "x.csv"),
        ("report", "report.output", "x.html"),
        ("watch", "watch.output", "x.html"),
        ("export", "export.output", "x"),
        ("import", "import.output", "x"),
        ("doctor", "doctor.output", "x"),
    ],
)
def test_only_plain_files_are_replaced_by_outputs(
    kind: str,
    verb: str,
    key: str,
    name: str,
    trained: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    own, path = tmp_path / "own", tmp_path / name
    own.write_text("mine")
    if kind == "link":
        path.symlink_to(own)
    else:
        os.mkfifo(path)
    given = [f"{one}.checkpoint={trained}" for one in (verb,) if one in ("evaluate", "export")]
    given += {
        "predict": [f"predict.checkpoint={trained}", f"predict.rows={own}"],
        "report": [f"report.runs={trained}"],
        "watch": [f"watch.run={trained}"],
        "import": [f"import.file={own}"],
        "doctor": ["doctor.action=keys"],
    }.get(verb, [])
    code = 5 if verb == "doctor" else 2  # keys never replace a file, whatever it is
    assert run(["dlrm_hybrid", verb, *given, f"{key}={path}"]) == code
    assert str(path) in capsys.readouterr().err
    assert path.is_symlink() if kind == "link" else path.is_fifo()
    assert own.read_text() == "mine"
    assert sorted(one.name for one in tmp_path.iterdir()) == sorted(["own", name])


def test_leave_to_replace_rows_is_never_the_checkpoints() -> None:
    saved = {"prepare": {"overwrite": True}, "data": {"prepared": "a"}}
    now = {"prepare": {"overwrite": False}, "data": {"prepared": "b"}}
    values, faults = evaluated(saved, now, ["data.prepared"])
    assert (values["prepare"], values["data"], faults) == (now["prepare"], now["data"], [])
    saved, now = now, saved
    assert evaluated(saved, now, ["prepare.overwrite"])[1] == []


def test_what_contradicts_the_checkpoint_is_refused_with_its_value(
    trained: Path, evaluate: Evaluate, capsys: pytest.CaptureFixture[str]
) -> None:
    given = ("model.top=[64,32,16,1]", "train.seed=5", "+experiment=dct_dp", "data.shuffle=false")
    assert evaluate(trained, *given, "model.bottom=[13,32,16]", "data.test_part=day") == 2
    told = capsys.readouterr().err
    for line in (
        "model.top = [64, 32, 16, 1]: the checkpoint was made with [32, 16, 8, 1]",
        "train.seed = 5: the checkpoint was made with 0",
        "gradient = 'dct': the checkpoint was made with 'none'",
        "parallel = 'hybrid': the checkpoint was made with 'single'",
        "data.shuffle = false: the checkpoint was made with true",
    ):
        assert line in told


def test_keys_of_other_commands_are_noted_and_what_the_run_reads_is_compared(
    trained: Path, evaluate: Evaluate, capsys: pytest.CaptureFixture[str]
) -> None:
    others = ("report.output=x.html", "doctor.output=k.json", "prepare.check=true")
    assert evaluate(trained, *others, "train.seed=5") == 2
    note, head, *told = capsys.readouterr().err.splitlines()
    assert note == f"not read by `evaluate`: {' '.join(others)}"
    assert head == "configuration: 1 fault"
    assert told == ["  train.seed = 5: the checkpoint was made with 0"]


def test_only_what_somebody_has_written_counts(small_rows: list[str]) -> None:
    small, paper = (
        compose.values_of([*small_rows[:-3], model])
        for model in ("model=dlrm_small", "model=dlrm_paper")
    )
    assert evaluated(small, paper, compose.given_keys(["evaluate.checkpoint=x"]))[1] == []
    _, faults = evaluated(small, paper, compose.given_keys(["model=dlrm_paper"]))
    assert any(fault.startswith("model.bottom = ") for fault in faults)
    plain = compose.given_keys(["+experiment=dct_dp"])
    for quoted in ("'dct_dp'", '["dct_dp"]', "[ dct_dp ]"):
        assert compose.given_keys([f"+experiment={quoted}"]) == plain
    # The default, but written: it counts, and agrees.
    assert (
        evaluated(small, small, compose.given_keys(["model=dlrm_small", "train.seed=0"]))[1] == []
    )
    values, _ = evaluated(small, {**paper, "threads": 3}, ["threads"])
    assert values == {**small, "threads": 3, "evaluate": paper["evaluate"]}
    values, _ = evaluated(small, paper, ["threads"])
    assert values["threads"] == small["threads"]


def test_the_output_names_checkpoint_data_and_part(
    trained: Path,
    evaluate: Evaluate,
    small_rows: list[str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    output = tmp_path / "scores.json"
    assert evaluate(trained, "data.test_part=first_half", f"evaluate.output={output}") == 0
    told, rows = capsys.readouterr().out, small_rows[1].partition("=")[2]
    checkpoint = trained / "checkpoints" / "step_00000002"
    assert f"checkpoint {checkpoint}, step 2" in told
    assert f"rows {rows}, test part `first_half`: 500 rows\n" in told
    assert "prepared, first_half" in told
    scores = json.loads(output.read_text())
    assert scores["checkpoint"] == str(checkpoint)
    assert (scores["data"], scores["part"], scores["trained_on"]) == (rows, "first_half", True)
    assert scores["rows"] == 500
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []


def test_an_output_has_one_writer_at_a_time(
    trained: Path, evaluate: Evaluate, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with locked(tmp_path / ".scores.json.lock"):
        assert evaluate(trained, f"evaluate.output={tmp_path / 'scores.json'}") == 2
    told = capsys.readouterr().err
    assert f"evaluate.output = {tmp_path / 'scores.json'}: in use by process" in told
    assert f" on {socket.gethostname()}" in told
    assert evaluate(trained, f"evaluate.output={tmp_path / 'none' / 'scores.json'}") == 5
    assert "(evaluate.output)" in capsys.readouterr().err


def test_other_rows_are_scored_if_their_ids_mean_the_same(
    trained: Path, evaluate: Evaluate, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    # The same file cut into other days: other test rows, the vocabulary is that of all days.
    assert evaluate(trained, "data.days=5") == 0
    told = capsys.readouterr().out
    assert "test part `day`: 1,400 rows (not those it was trained on, same vocab" in told
    assert "Bayes optimum" in told
    (folder,) = (Path("data") / "prepared").iterdir()
    assert evaluate(trained, f"data.prepared={folder}") == 0
    assert "1,400 rows (not those it was trained on" in capsys.readouterr().out
    assert evaluate(trained, "data.seed=1") == 3
    told = capsys.readouterr().err
    assert "not the rows that" in told
    assert "their vocabulary differs: vocabulary_xxh3 is " in told

    # Rows that have changed since, and that nobody has asked for.
    def move(values: dict[str, Any]) -> None:
        values["config"]["data"]["prepared"] = str(folder.absolute())

    changed = forged(trained, tmp_path / "changed", move)
    assert evaluate(changed) == 3
    assert f"data.prepared={folder.absolute()} scores it on them" in capsys.readouterr().err


def test_a_checkpoint_decides_no_path(
    trained: Path, evaluate: Evaluate, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = tmp_path / "not" / "mine"
    own = forged(
        trained, tmp_path / "own", lambda v: v["config"]["data"].update(prepared=str(target))
    )
    assert evaluate(own) == 0
    assert not target.parent.exists()
    assert [path.name for path in Path("data").iterdir() if any(path.iterdir())] == ["prepared"]
    real = {**defaults_of(CriteoKaggle), "raw": "/etc/passwd", "prepared": str(target)}
    other = forged(trained, tmp_path / "other", lambda v: v["config"].update(data=real))
    assert evaluate(other) == 3
    told = capsys.readouterr().err
    assert f"{target}: the rows that " in told
    assert "set data.prepared=FOLDER" in told
    assert not target.parent.exists()
    served = ("parallel=hybrid", "embedding=served", "parallel.table_servers=1")
    files = compose.values_of([*served, "embedding.storage=mmap", f"embedding.folder={target}"])
    assert files["embedding"]["folder"] == str(target)
    assert saved_config(own, {"config": files}).embedding.folder is None


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda v: v["config"].update(model=None), "config: configuration: "),
        (lambda v: v["config"]["data"].update(prepared="\x1b[2J"), "no prepared rows"),
        (lambda v: v.pop("config"), "does not say config"),
        (lambda v: v.pop("vocabulary"), "does not say which vocabulary"),
    ],
)
def test_a_checkpoint_of_nonsense_is_refused(
    change: Callable[[dict[str, Any]], object],
    told: str,
    trained: Path,
    evaluate: Evaluate,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    folder = forged(trained, tmp_path / "other", change)
    code = evaluate(folder, *(["data.days=5"] if "vocabulary" in told else []))
    message = capsys.readouterr()
    if "prepared" in told:  # synthetic rows are made anew, under the default folder
        assert code == 0
        return
    assert code == 3
    assert told in message.err
    assert message.err.replace("\n", "").isprintable()


@pytest.mark.usefixtures("shows_at_once")
def test_evaluations_and_checks_of_checkpoints_show_how_far_they_are(
    small_rows: list[str],
    trained: Path,
    evaluate: Evaluate,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert evaluate(trained) == 0
    told = capsys.readouterr().out
    assert "\ncheckpoint 100%" in f"\n{told}"
    assert "\nevaluate   0%  0 rows/s" in told
    resumed = (f"checkpoint.resume={trained}", "train.steps=3", f"hydra.run.dir={tmp_path / 'run'}")
    assert run(["dlrm_hybrid", "train", *small_rows, *resumed]) == 0
    told = capsys.readouterr().out
    assert "\ncheckpoint 100%" in told
    assert "\nevaluate   0%  0 rows/s" in told
