"""Runs that cannot be: the message says what was expected, the exit code whose fault it is."""

import os
import socket
from pathlib import Path

import pytest
from launched_runs import slurm, started
from patience import HANG_SECONDS
from world_runs import Train

from dlrm_hybrid.checkpoint.folder import read_facts
from dlrm_hybrid.checkpoint.manifest import manifest_text
from dlrm_hybrid.disk import locked
from dlrm_hybrid.run.folder import one_run
from dlrm_hybrid.types import DataError

WORLD = ("parallel=hybrid", "parallel.trainers=1", "parallel.cuts=[bottom.1]", "train.steps=2")
ELSEWHERE = "192.0.2.1"  # set apart for documentation (RFC 5737): no machine has it


@pytest.fixture
def keys(tmp_path: Path) -> Path:
    from dlrm_hybrid.cli.main import run

    path = tmp_path / "keys.json"
    assert run(["dlrm_hybrid", "doctor", "doctor.action=keys", f"doctor.output={path}"]) == 0
    return path


@pytest.mark.slow
def test_a_port_in_use_is_named(small_rows: list[str], tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        given = (*small_rows, *WORLD, f"hydra.run.dir={tmp_path / 'run'}")
        (command, environment), *_ = slurm(3, *given, MASTER_PORT=port)
        with started([command], [environment]) as (rank_0,):
            text, _ = rank_0.communicate(timeout=HANG_SECONDS)
    assert rank_0.returncode == 5
    assert f"MASTER_PORT = {port}: rank 0 cannot listen there: " in text
    assert "Address already in use" in text


@pytest.mark.slow
def test_an_address_of_another_machine_is_named(
    train: Train, keys: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, _ = train("run", *WORLD, f"network.bind={ELSEWHERE}", f"network.keys={keys}")
    assert code == 5
    assert f"network.bind: cannot listen on {ELSEWHERE}: " in capsys.readouterr().err


@pytest.mark.parametrize(
    "wrong", ["missing", *(pytest.param(x, marks=pytest.mark.slow) for x in ("open", "broken"))]
)
def test_a_key_file_that_cannot_be_used_is_named(
    wrong: str, train: Train, keys: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    told = {
        "missing": f"network.keys: {keys}: No such file or directory",
        "open": f"network.keys: {keys} has mode 644, other users may read it: chmod 600 {keys}",
        "broken": f"network.keys: {keys} is not a key file",
    }
    if wrong == "missing":
        keys.unlink()
    elif wrong == "open":
        keys.chmod(0o644)
    else:
        keys.write_text("{")
    code, _ = train("run", *WORLD, "network.bind=127.0.0.1", f"network.keys={keys}")
    assert code == 2
    assert told[wrong] in capsys.readouterr().err


def test_a_checkpoint_of_another_model_or_of_other_rows_is_refused(
    train: Train, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, first = train("first", "train.steps=2")
    assert code == 0
    saved = first / "checkpoints" / "step_00000002"
    from_it = (f"checkpoint.resume={first}", "train.steps=4")
    others = ("data.seed=9", f"data.prepared={tmp_path / 'others'}")
    code, _ = train("second", *from_it, *others, "model.top=[64,1]", "train.seed=5")
    assert code == 3
    assert capsys.readouterr().err.splitlines() == [
        f"{saved}: cannot resume from this checkpoint",
        "  data.seed = 9: the checkpoint was made with 0",
        "  model.top = [64, 1]: the checkpoint was made with [32, 16, 8, 1]",
        "  train.seed = 5: the checkpoint was made with 0",
    ]
    assert not (tmp_path / "others").exists()
    facts = read_facts(saved)
    facts["rows"][0] = "others"
    (saved / "manifest.json").write_text(manifest_text(facts))
    assert train("third", *from_it)[0] == 3
    told = capsys.readouterr().err
    assert "data.prepared = " in told
    assert "only data=table goes on with those of another day: with data=synthetic name the" in told


@pytest.mark.parametrize("resume", ["never", "auto"])
def test_a_folder_has_one_run_at_a_time(
    resume: str, train: Train, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "run"
    given = ("train.steps=2", f"checkpoint.resume={resume}")
    folder.mkdir()
    with locked(folder / ".lock"):
        assert train("run", *given)[0] == 2
        assert [path.name for path in folder.iterdir()] == [".lock"]
    holder = f"process {os.getpid()} on {socket.gethostname()}"
    assert f"hydra.run.dir = {folder}: in use by {holder}\n" in capsys.readouterr().err
    assert train("run", *given)[0] == 0
    assert not (folder / ".lock").exists()


@pytest.mark.parametrize("place", ["log", "events.jsonl", "checkpoints", ".config.json.partial"])
def test_no_run_goes_on_in_a_folder_with_a_way_out(
    place: str, train: Train, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, own = tmp_path / "run", tmp_path / "own"
    own.mkdir()
    folder.mkdir()
    (folder / place).symlink_to(own)
    assert train("run", "train.steps=2", "checkpoint.resume=auto")[0] == 3
    told = f"{folder / place}: is a link that leads out of {folder}, to {own}"
    assert told in capsys.readouterr().err
    assert [*own.iterdir()] == []
    assert [path.name for path in folder.iterdir()] == [place]


def test_links_within_a_folder_and_those_of_a_tracker_are_nobodys_business(tmp_path: Path) -> None:
    (tmp_path / "run" / "wandb").mkdir(parents=True)
    (tmp_path / "run" / "wandb" / "debug.log").symlink_to("/elsewhere")
    (tmp_path / "run" / "best").symlink_to("wandb")
    with one_run(tmp_path / "run"):
        (tmp_path / "run" / "inner" / "wandb").mkdir(parents=True)
    for make in (os.mkfifo, lambda path: path.symlink_to("/elsewhere")):
        place = tmp_path / "run" / "inner" / "wandb" / "x"
        make(place)
        with pytest.raises(DataError, match=f"{place}: is "), one_run(tmp_path / "run"):
            pass
        place.unlink()


def test_a_folder_has_one_sweep_at_a_time_and_a_job_keeps_its_own(
    small_rows: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from dlrm_hybrid.cli.main import run

    sweep = tmp_path / "sweep"
    given = ("train.seed=1,2", "train.steps=2", f"hydra.sweep.dir={sweep}")
    argv = ["dlrm_hybrid", "train", "-m", *small_rows, *given]
    sweep.mkdir()
    with locked(sweep / ".lock"):
        assert run(argv) == 2
    told = capsys.readouterr()
    assert f"hydra.sweep.dir = {sweep}: in use by process {os.getpid()} on" in told.err
    assert "job" not in told.out
    (sweep / "1").mkdir()
    with locked(sweep / "1" / ".lock"):
        assert run(argv) == 2
    assert "job 1: configuration: 1 fault\n  hydra.run.dir = " in capsys.readouterr().err
    assert (sweep / "0" / "summary.json").exists()
    assert not (sweep / "1" / "config.json").exists()
