"""A run that is struck and resumed ends with the weights of one that was not."""

import json
import random
import shlex
from pathlib import Path

import pytest
from rank_faults import left, plan
from world_runs import Train, assert_same, curve, summary

from dlrm_hybrid.checkpoint.folder import find, read_facts
from dlrm_hybrid.cli.main import run
from dlrm_hybrid.run import training
from dlrm_hybrid.run.rank.facts import arithmetic, changes
from dlrm_hybrid.telemetry import events

STEPS = 93


def assert_equal_runs(one: Path, other: Path) -> None:
    assert_same(one, other, STEPS)
    assert learned(one) == learned(other)


def learned(folder: Path) -> list[tuple[object, ...]]:
    """By step: an attempt that was broken off has told less of its rows."""
    return [
        (step, told["loss"], told["accuracy"]) for step, told in curve(folder) if "loss" in told
    ]


@pytest.fixture(scope="module")
def unbroken(small_rows: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of one epoch that nothing has struck."""
    folder = tmp_path_factory.mktemp("unbroken") / "run"
    options = ("telemetry.every=1", f"hydra.run.dir={folder}")
    assert run(["dlrm_hybrid", "train", *small_rows, *options]) == 0
    return folder


@pytest.fixture
def struck(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(training, "TRAIN_RANK", "rank_faults:struck_rank")


def starts(folder: Path) -> list[int]:
    """The step at which each attempt began."""
    found = events.read(folder / "events.jsonl")
    return [event.step for event in found if event.kind is events.Kind.STARTED]


def test_a_run_killed_again_and_again_ends_like_the_unbroken_one(
    train: Train,
    unbroken: Path,
    struck: None,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    kills = sorted(random.Random("kills").sample(range(1, STEPS), 3))
    folder = tmp_path / "killed"
    plan(folder, "SIGKILL", *kills)
    code, _ = train(
        "killed", "telemetry.every=1", "checkpoint.every=7", "checkpoint.max_restarts=3"
    )
    assert code == 0
    assert left(folder) == []
    first, *later = starts(folder)
    assert first == 0
    told = capsys.readouterr().out
    for restart, (killed, begun) in enumerate(zip(kills, later, strict=True), 1):
        last = (killed - 1) // 7 * 7  # killed where it would save, it has not
        assert begun in (last, max(last - 7, 0)), "the last one may have been on its way"
        assert f"; restart {restart} of 3 from step {begun}\n" in told
    assert summary(folder)["restarts"] == 3
    assert_equal_runs(unbroken, folder)


def test_a_run_killed_just_before_its_end_still_ends_well(
    train: Train, struck: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plan(tmp_path / "run", "SIGKILL", 31)
    code, folder = train("run", "telemetry.every=1", "checkpoint.every=2", "train.steps=32")
    assert code == 0
    assert starts(folder) in ([0, 28], [0, 30])  # the last one may have been on its way
    told = summary(folder)
    assert told["samples_per_second"] is not None
    assert told["cpu"]["utilization"] is None  # the last attempt had no step after its warm-up
    assert "samples/s\n" in capsys.readouterr().out


def test_too_many_losses_end_a_run(
    train: Train, struck: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plan(tmp_path / "run", "SIGKILL", 5, 6)
    code, folder = train("run", "telemetry.every=1", "checkpoint.max_restarts=1")
    assert (code, starts(folder)) == (1, [0, 0])
    told = capsys.readouterr()
    assert "restart 1 of 1 from step 0" in told.out
    assert "no restarts left (checkpoint.max_restarts = 1 within 3600 s)" in told.err
    assert summary(folder)["status"] == "failed"
    assert train("run", "telemetry.every=1", "checkpoint.resume=auto")[0] == 0
    assert starts(folder) == [0, 0, 0]
    assert summary(folder)["restarts"] == 2


def test_sigterm_saves_the_step_it_interrupts(train: Train, struck: None, tmp_path: Path) -> None:
    options = ("telemetry.every=1", "train.evaluate_every=20", "optimizer.schedule=linear")
    assert train("unbroken", *options)[0] == 0
    folder = tmp_path / "preempted"
    plan(folder, "SIGTERM", 40)
    code, _ = train("preempted", *options)
    assert code == 75
    assert (folder / "checkpoints" / "latest").read_text() == "step_00000040\n"
    assert train("preempted", *options, "checkpoint.resume=auto")[0] == 0
    assert_equal_runs(tmp_path / "unbroken", folder)
    evaluated = [
        event.step
        for event in events.read(folder / "events.jsonl")
        if event.kind is events.Kind.EVALUATED
    ]
    assert evaluated == [20, 40, 60, 80, 93]
    told = summary(folder)
    assert (told["status"], told["restarts"], told["samples"]) == ("complete", 1, 5952)


def test_ctrl_c_saves_the_step_it_interrupts(
    train: Train,
    unbroken: Path,
    struck: None,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    name = "it's (interrupted), é = 1"  # what Hydra and the shell read otherwise
    folder = tmp_path / name
    plan(folder, "SIGINT", 40)
    assert train(name, "telemetry.every=1", "prepare.overwrite=true")[0] == 130
    told = capsys.readouterr()
    found = summary(folder)
    step = found["steps"]
    assert step in (40, 41)
    assert f"checkpoint at step {step} (Ctrl-C again to quit without saving)\n" in told.out
    assert f"stopped by Ctrl-C; checkpoint saved at step {step}; resume with\n" in told.err
    command = shlex.split(told.err.splitlines()[-1])
    assert command[:4] == ["python", "-m", "dlrm_hybrid", "train"]
    assert command[-1] == "checkpoint.resume=auto"
    assert "prepare.overwrite" not in told.err
    pid = int((folder / "log" / "worker-0.pid").read_text())
    assert not Path(f"/proc/{pid}").exists()
    assert (found["status"], found["samples"]) == ("interrupted", step * 64)
    assert (found["steps_planned"], found["steps_saved"]) == (STEPS, step)
    assert run(command[2:]) == 0
    assert_equal_runs(unbroken, folder)
    assert json.loads((folder / "config.json").read_text())["checkpoint"]["minutes"] == 10


def test_other_arithmetic_is_said_and_recorded(
    train: Train, struck: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "run"
    plan(folder, "SIGINT", 20)
    options = ("telemetry.every=1", "train.steps=22")
    assert train("run", *options)[0] == 130
    facts = read_facts(find(folder))
    saved, step = facts["arithmetic"], facts["step"]
    assert saved["threads"] == "1"
    assert train("run", *options, "checkpoint.resume=auto", "threads=2")[0] == 0
    changed = ["threads 1 → 2"]
    told = "no longer bit-identical to an uninterrupted run: threads 1 → 2\n"
    assert told in capsys.readouterr().out
    assert summary(folder)["arithmetic_changes"] == [{"step": step, "changed": changed}]
    assert read_facts(find(folder))["arithmetic"]["threads"] == "2"


def test_what_is_not_set_any_more_is_a_change() -> None:
    now = arithmetic()
    assert changes(now, now) == []
    assert changes({**now, "ATen": "none"}, now) == [f"ATen none → {now['ATen']}"]
    assert changes({}, now) == []  # of an older version of the program
    before = {**now, "MKL_CBWR": "AVX2", "processor": "another"}
    assert changes(before, now) == [
        f"processor another → {now['processor']}",
        "MKL_CBWR AVX2 → not set",
    ]


@pytest.mark.slow
def test_checkpoints_by_time_change_nothing_and_are_gone_on_from(
    train: Train, unbroken: Path, struck: None, tmp_path: Path
) -> None:
    folder = tmp_path / "timed"
    plan(folder, "SIGKILL", 60)
    options = ("telemetry.every=1", "checkpoint.minutes=0.0001", "checkpoint.keep=99")
    assert train("timed", *options)[0] == 0
    first, again = starts(folder)
    assert first == 0 < again < 60
    assert len(list((folder / "checkpoints").glob("step_*"))) > 2
    assert_equal_runs(unbroken, folder)


@pytest.mark.slow
def test_a_new_run_that_saved_nothing_begins_again_with_the_old_weights(
    train: Train, struck: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ("telemetry.every=1", "optimizer.lr=0.05")
    assert train("old", *options, "train.steps=20")[0] == 0
    old = tmp_path / "old" / "checkpoints" / "step_00000020"
    resume = f"checkpoint.resume={tmp_path / 'old'}"
    assert train("straight", *options, resume)[0] == 0
    folder = tmp_path / "new"
    plan(folder, "SIGKILL", 30)
    assert train("new", *options, resume, "checkpoint.max_restarts=0")[0] == 1
    assert summary(folder)["steps_saved"] is None
    capsys.readouterr()
    hidden = old.rename(tmp_path / "hidden")
    assert train("new", *options, "checkpoint.resume=auto")[0] == 3
    assert (
        f"started from the weights of {old} and has no checkpoint of its own; that one no longer"
        in capsys.readouterr().err
    )
    hidden.rename(old)
    assert train("new", *options, "checkpoint.resume=auto")[0] == 0
    assert f"starting from the weights of {old}\n" in capsys.readouterr().out
    assert starts(folder) == [20, 20]
    assert_equal_runs(tmp_path / "straight", folder)
    found = summary(folder)
    assert (found["first_step"], found["steps"], found["steps_planned"]) == (20, STEPS, STEPS)


def test_a_run_says_that_there_is_nothing_to_go_on_from_or_to_do(
    train: Train, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, folder = train("run", "train.steps=10", "checkpoint.resume=auto")
    assert code == 0
    told = capsys.readouterr().out
    assert f"checkpoint.resume=auto: no checkpoint in {folder} yet; starting at step 0\n" in told
    code, past = train("past", "train.steps=5", f"checkpoint.resume={folder}")
    assert code == 0
    assert "all steps are already trained" in capsys.readouterr().out
    found = summary(past)
    assert (found["steps"], found["steps_planned"]) == (10, 5)


def test_a_run_goes_on_as_its_folder_says_and_writes_where_the_command_line_says(
    train: Train, small_rows: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    given = ("train.steps=10", "checkpoint.every=5", "optimizer.lr=0.05", "name=mine")
    assert train("run", *given)[0] == 0
    _, folder = train("run", *given)
    config = (folder / "config.json").read_text()
    (folder / "summary.json").unlink()  # as of a run that was killed before its end
    alone = ["dlrm_hybrid", "train", f"hydra.run.dir={folder}", "checkpoint.resume=auto"]
    rows = small_rows[1]
    capsys.readouterr()
    assert run(alone) == 2
    told = capsys.readouterr().err
    assert told.startswith("configuration: 1 fault\n  data.prepared = null: the run has /")
    assert told.endswith(f"to go on there, add {rows}\n")
    assert run([*alone, rows, "optimizer.lr=0.1"]) == 2
    assert "  optimizer.lr = 0.1: the checkpoint was made with 0.05" in capsys.readouterr().err
    (folder / "checkpoints" / "latest").write_text("step_00000005\n")
    assert run([*alone, rows, "threads=2", "++optimizer.lr=0.05"]) == 0
    told = capsys.readouterr().out
    assert f"going on with the run in {folder}, as configured there" in told
    assert "replaces those of later steps: step_00000010\n" in told
    changed = json.loads(config) | {"threads": 2}
    changed["checkpoint"]["resume"] = "auto"
    assert json.loads((folder / "config.json").read_text()) == changed
    lines = (folder / "overrides.yaml").read_text().splitlines()
    assert {'- "name=mine"', '- "++optimizer.lr=0.05"', '- "threads=2"'} <= {*lines}
    assert '- "optimizer.lr=0.05"' not in lines  # typed anew
    assert lines.count(f'- "{rows}"') == 1
    (folder / "summary.json").unlink()
    (folder / "config.json").write_text('{"data": 5}')
    assert run([*alone, rows]) == 3
    assert f"{folder / 'config.json'}: config: " in capsys.readouterr().err


def test_a_run_on_rows_at_their_default_place_goes_on_without_naming_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    start = ["dlrm_hybrid", "train", "data.rows=1000", "model=dlrm_small", "train.batch_size=64"]
    start += ["data.processes=1", "telemetry.tensorboard=false", "train.steps=2"]
    start += ["hydra.run.dir=run"]
    assert run(start) == 0
    alone = ["dlrm_hybrid", "train", "hydra.run.dir=run", "checkpoint.resume=auto"]
    for again in (alone, [*start, "checkpoint.resume=auto"]):
        (tmp_path / "run" / "summary.json").unlink()  # as of a run that was killed before its end
        capsys.readouterr()
        assert run(again) == 0
        assert "generate" not in capsys.readouterr().out
    (tmp_path / "run" / "summary.json").unlink()
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert run([*alone[:2], f"hydra.run.dir={tmp_path / 'run'}", alone[3]]) == 2
    assert "data.prepared = null: the run has /" in capsys.readouterr().err
    assert not list((tmp_path / "elsewhere").iterdir())


@pytest.mark.slow
def test_a_longer_run_goes_on_from_an_old_checkpoint(train: Train, tmp_path: Path) -> None:
    assert train("twice", "train.epochs=2", "optimizer.lr=0.05")[0] == 0
    assert train("once", "optimizer.lr=0.05")[0] == 0
    resume = f"checkpoint.resume={tmp_path / 'once'}"
    assert train("again", "train.epochs=2", "optimizer.lr=0.05", resume)[0] == 0
    last = "checkpoints/step_00000186/dense.worker-0.safetensors"
    assert (tmp_path / "twice" / last).read_bytes() == (tmp_path / "again" / last).read_bytes()
    first = tmp_path / "once/checkpoints/step_00000093/dense.worker-0.safetensors"
    assert first.read_bytes() != (tmp_path / "twice" / last).read_bytes()


def test_what_does_not_fit_is_refused(
    train: Train, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, folder = train("run", "train.steps=10")
    assert code == 0
    capsys.readouterr()
    refused = [
        (("run",), 2, "is not empty; two runs never share a folder"),
        (("run", "checkpoint.resume=auto", "train.steps=10"), 2, "this run is complete"),
        (
            ("new", f"checkpoint.resume={folder}", "train.batch_size=32"),
            3,
            "train.batch_size = 32: the checkpoint was made with 64",
        ),
        (("new2", f"checkpoint.resume={tmp_path / 'nowhere'}"), 3, "no checkpoint found"),
    ]
    for arguments, code, message in refused:
        assert train(*arguments)[0] == code
        assert message in capsys.readouterr().err


def test_a_loss_that_is_not_finite_ends_the_run(
    train: Train, capsys: pytest.CaptureFixture[str]
) -> None:
    code, folder = train("diverged", "optimizer.lr=1e18")
    assert code == 4
    assert "step 2: the loss is nan" in capsys.readouterr().err
    found = summary(folder)
    assert (found["status"], found["steps"], starts(folder)) == ("diverged", 1, [0])
