from collections.abc import Sequence
from pathlib import Path

from made_runs import make_run

from dlrm_hybrid.report.labels import labels, short, varying
from dlrm_hybrid.report.runs import read_run


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
