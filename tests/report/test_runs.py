from pathlib import Path

import pytest
from made_runs import make_run, progress

from dlrm_hybrid.report.runs import find_runs, read_run
from dlrm_hybrid.types import ConfigError


def test_runs_are_found_below_in_numeric_order_and_once(tmp_path: Path) -> None:
    for number in (10, 9, 2):
        make_run(tmp_path / "sweep" / str(number))
    make_run(tmp_path / "sweep" / "2" / "checkpoints" / "inside")
    (tmp_path / "sweep" / "notes").mkdir()
    found = find_runs([tmp_path / "sweep" / "9", tmp_path, tmp_path / "sweep" / "." / "2"])
    assert [str(folder.relative_to(tmp_path)) for folder in found] == [
        "sweep/9",
        "sweep/2",
        "sweep/10",
    ]


@pytest.mark.parametrize("name", ["empty", "missing"])
def test_a_path_without_runs_is_named(tmp_path: Path, name: str) -> None:
    (tmp_path / "empty").mkdir()
    make_run(tmp_path / "run")
    with pytest.raises(ConfigError, match=f"report.runs = {tmp_path / name}: no run folder"):
        find_runs([tmp_path / "run", tmp_path / name])


def test_a_run_that_nobody_has_summed_up_is_unfinished(tmp_path: Path) -> None:
    make_run(tmp_path / "run", ["train.seed=3"], [progress(10, 0.6)], status=None)
    with (tmp_path / "run" / "events.jsonl").open("a") as file:
        file.write('{"kind": "progr')  # the run goes on while it is read
    run = read_run(tmp_path / "run")
    assert (run.status, run.overrides) == ("unfinished", ("train.seed=3",))
    assert (run.summary["steps"], run.summary["train"]["loss"]) == (10, 0.6)
    assert run.summary["test"]["auc"] is None
    assert len(run.events) == 1


def test_a_run_that_has_only_begun_can_be_read(tmp_path: Path) -> None:
    make_run(tmp_path / "run", status=None)
    for name in ("events.jsonl", "environment.json", "overrides.yaml"):
        (tmp_path / "run" / name).unlink()
    run = read_run(tmp_path / "run")
    assert (run.status, run.summary["steps"], run.overrides) == ("unfinished", 0, ())
