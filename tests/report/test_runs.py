"""Runs: how they are found, read, called and put into frames."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from made_runs import make_run, plain_events, progress, world_events

from dlrm_hybrid.report import measures
from dlrm_hybrid.report.labels import labels, short, trained, varying
from dlrm_hybrid.report.runs import find_runs, read_run, read_runs
from dlrm_hybrid.telemetry.events import Kind
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


def test_runs_as_frames(tmp_path: Path) -> None:
    make_run(tmp_path / "a", ["name=world"], world_events(0.4))
    make_run(tmp_path / "b", ["name=plain"], plain_events(0.5))
    runs = read_runs([tmp_path])
    found = measures.frame(runs)
    assert found.loc["world", "test_loss"] == 0.4 + 0.01
    assert found["bytes_per_sample"].isna().to_dict() == {"world": False, "plain": True}
    points = measures.points(runs, Kind.PROGRESS)
    assert points.groupby("run")["step"].apply(list).to_dict() == {
        "world": [10, 20],
        "plain": [10, 20],
    }
    assert points[points["run"] == "plain"]["loss"].tolist() == [0.6, 0.5]


def labels_of(tmp_path: Path, *overrides: Sequence[str]) -> list[str]:
    folders = [tmp_path / f"run{number}" for number in range(len(overrides))]
    for folder, own in zip(folders, overrides, strict=True):
        make_run(folder, own)
    return labels([read_run(folder) for folder in folders])


def test_names_if_they_differ(tmp_path: Path) -> None:
    assert labels_of(tmp_path, ["+experiment=baseline"], ["+experiment=dct_dp"]) == [
        "baseline",
        "dct_dp",
    ]


def test_what_was_swept_if_names_are_alike(tmp_path: Path) -> None:
    rates = [["optimizer.lr=0.1", "train.seed=1"], ["optimizer.lr=0.2", "train.seed=1"]]
    assert labels_of(tmp_path / "a", *rates) == ["lr=0.1", "lr=0.2"]
    named = [
        ["+experiment=baseline", "train.seed=1"],
        ["+experiment=dct_dp", "train.seed=1"],
        ["+experiment=dct_dp", "train.seed=2", "checkpoint.resume=auto"],
    ]
    assert labels_of(tmp_path / "b", *named) == [
        "baseline seed=1",
        "dct_dp seed=1",
        "dct_dp seed=2",
    ]


def test_rows_by_the_names_of_their_files(tmp_path: Path) -> None:
    table = ("data=table", "data.schema=bars_criteo_x1")
    days = [[*table, f"data.raw=/in/{n}.csv", f"data.prepared=/run/{n}/rows"] for n in (1, 2)]
    assert labels_of(tmp_path / "a", *days) == ["raw=1.csv", "raw=2.csv"]
    alike = [[*table, f"data.raw=/in/{day}/rows.csv"] for day in (1, 2)]
    assert labels_of(tmp_path / "b", *alike) == ["default run0", "default run1"]
    lists = [[*table, f"data.raw=[/in/{names}]"] for names in ("1.csv,/in/2.csv", "3.csv")]
    assert labels_of(tmp_path / "c", *lists) == ["raw=[/in/1.csv,/in/2.csv]", "raw=[/in/3.csv]"]


def test_a_model_has_brackets_only_for_its_layers(tmp_path: Path) -> None:
    config = make_run(tmp_path / "run", record=plain_events())
    layers = {"bottom": [8, 4], "top": [2]}
    for model, told in ((layers, "net (bottom 8-4, top 2)."), ({}, "net.")):
        told_of = {**config, "model": {"name": "net", **model}}
        run = replace(read_run(tmp_path / "run"), config=told_of)
        assert trained([run]).startswith(f"Model: {told} Data: ")


def test_the_folder_if_nothing_else_tells_runs_apart(tmp_path: Path) -> None:
    assert labels_of(tmp_path / "a", [], []) == ["default run0", "default run1"]
    for sweep in ("one", "two"):
        make_run(tmp_path / sweep / "0")
    runs = [read_run(tmp_path / sweep / "0") for sweep in ("one", "two")]
    assert labels(runs) == [str(run.folder) for run in runs]
    many = [[], ["train.seed=1", "train.steps=2", "optimizer.lr=0.3", "train.batch_size=8"]]
    assert labels_of(tmp_path / "b", *many) == ["default run0", "default run1"]


def test_keys_that_vary_keep_their_order_and_may_be_absent() -> None:
    lines = [["+experiment=a", "x.lr=1", "same=0"], ["same=0", "x.lr=2"]]
    assert varying(lines) == {"experiment": ["a", None], "x.lr": ["1", "2"]}
    assert varying(lines[:1]) == {}


def test_a_short_key_is_no_other_keys() -> None:
    keys = ["optimizer.lr", "embedding.lr", "gradient.density", "name"]
    assert list(short(keys).values()) == ["optimizer.lr", "embedding.lr", "density", "name"]
