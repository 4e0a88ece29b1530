"""A disk that fills up: exit 5, file and key are named, and what was saved is whole."""

from pathlib import Path

import pytest
from small_disk import enlarge, needs_mount, small_disk
from world_runs import Train, assert_same, checkpoint

from dlrm_hybrid.cli.main import run
from dlrm_hybrid.telemetry import events

MORE_ROOM = 100_000
WORLD = ("parallel=hybrid", "parallel.trainers=1", "parallel.cuts=[bottom.1]")

pytestmark = needs_mount


def test_a_full_disk_while_training_is_named(
    train: Train, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with small_disk(tmp_path / "disk", 400) as disk:
        folder = f"hydra.run.dir={disk / 'run'}"
        code, _ = train("run", folder, "telemetry.every=1", "train.epochs=100")
        assert code == 5
        told = capsys.readouterr().err
        record = disk / "run" / "events.jsonl"
        assert told == f"{record}: cannot be written: No space left on device (hydra.run.dir)\n"
        steps = [one.step for one in events.read(record)]
        assert steps == list(range(len(steps)))
        assert record.read_bytes().endswith(b"\n")


@pytest.mark.parametrize("world", [(), pytest.param(WORLD, marks=pytest.mark.slow)])
def test_a_full_disk_while_saving_leaves_the_last_checkpoint(
    world: tuple[str, ...], train: Train, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = (*world, "train.steps=30", "checkpoint.every=10", "train.batch_size=16")
    code, whole = train("unbroken", *options, *(("parallel.world=in_process",) if world else ()))
    assert code == 0
    num_bytes = sum(path.stat().st_size for path in checkpoint(whole, 30).iterdir())
    capsys.readouterr()
    with small_disk(tmp_path / "disk", round(1.6e-3 * num_bytes)) as disk:  # for one, not for two
        folder = disk / "run"
        code, _ = train("run", f"hydra.run.dir={folder}", *options)
        assert code == 5
        told = capsys.readouterr().err
        assert str(folder / "checkpoints") in told
        assert "No space left" in told
        latest = (folder / "checkpoints" / "latest").read_text().strip()
        assert latest == checkpoint(folder, 10).name
        enlarge(disk, MORE_ROOM)
        code, _ = train("run", f"hydra.run.dir={folder}", *options, "checkpoint.resume=auto")
        assert code == 0
        assert_same(folder, whole, 30)


def test_a_disk_without_room_for_the_run_is_named(
    train: Train, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with small_disk(tmp_path / "disk", 4) as disk:
        code, _ = train("run", f"hydra.run.dir={disk / 'run'}")
        assert code == 5
        told = capsys.readouterr().err
        assert told.startswith(f"{disk / 'run'}/")
        assert told.endswith(": cannot be written: No space left on device (hydra.run.dir)\n")


@pytest.mark.parametrize("place", ["/proc/none", "/dev/null/run"])
def test_a_place_where_no_folder_can_be_is_named(
    place: str, train: Train, capsys: pytest.CaptureFixture[str]
) -> None:
    code, _ = train("run", f"hydra.run.dir={place}")
    assert code == 5
    assert capsys.readouterr().err.startswith(f"{place}: ")


@pytest.mark.parametrize(("kilobytes", "key"), [(500, "data.rows"), (2_500, "data.prepared")])
def test_a_full_disk_while_preparing_is_named(
    kilobytes: int,
    key: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    with small_disk(tmp_path / "disk", kilobytes) as disk:
        with monkeypatch.context() as patch:
            patch.chdir(disk)
            given = ("data.rows=7000", "data.processes=1")
            assert run(["dlrm_hybrid", "prepare", *given]) == 5
        told = capsys.readouterr().err
        assert key in told
        assert not list(disk.glob("data/prepared/*"))
