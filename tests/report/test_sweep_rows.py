import csv
from collections.abc import Sequence
from io import StringIO
from pathlib import Path

from made_runs import make_run, plain_events, progress, values_of, world_events

from dlrm_hybrid.config.compose import Job
from dlrm_hybrid.report.runs import read_run
from dlrm_hybrid.report.tables import over_seeds, sweep_frame, sweep_means, sweep_table
from dlrm_hybrid.telemetry.events import Kind
from dlrm_hybrid.telemetry.traffic import Phase
from dlrm_hybrid.types import ExitCode


def job(folder: Path, *overrides: str, code: int = ExitCode.DONE) -> tuple[Job, int]:
    return Job(values_of(*overrides), folder, overrides), code


def test_every_job_has_a_row_whatever_became_of_it(tmp_path: Path) -> None:
    rates = [f"optimizer.lr={rate}" for rate in ("0.1", "1e+18", "0.3", "0.4", "0.5")]
    make_run(tmp_path / "0", ["train.seed=1", rates[0]], world_events(0.4))
    make_run(tmp_path / "1", ["train.seed=1", rates[1]], [], status="diverged")
    make_run(tmp_path / "2", ["train.seed=1", rates[2]], [progress(10, 0.6)], status=None)
    make_run(tmp_path / "3", ["train.seed=1", rates[0]], plain_events())  # was here before
    (tmp_path / "4").mkdir()
    codes = [ExitCode.DONE, ExitCode.DIVERGED, ExitCode.RESOURCES, *[ExitCode.CONFIGURATION] * 2]
    frame = sweep_frame(
        [
            job(tmp_path / str(number), "train.seed=1", rate, code=code)
            for number, (rate, code) in enumerate(zip(rates, codes, strict=True))
        ]
    )
    table = sweep_table(frame)
    assert tuple(table.columns[:5]) == ("job", "lr", "status", "test log-loss", "AUC")
    table_rows = [tuple(row) for row in table.rows]
    assert table_rows[0] == (
        *("0", "0.1", "complete", "0.4100", "0.7000", "0.7500"),
        *("10.0", "4.0×", "640"),
    )
    dashes = ("–",) * 6
    assert table_rows[1] == ("1", "1e+18", "diverged", *dashes)
    assert table_rows[2] == ("2", "0.3", "failed", *dashes[1:], "640")
    assert table_rows[3:] == [("3", "0.4", "refused", *dashes), ("4", "0.5", "refused", *dashes)]


def test_a_job_that_was_killed_before_it_recorded_anything_is_not_refused(tmp_path: Path) -> None:
    (tmp_path / "0").mkdir()
    assert list(sweep_frame([job(tmp_path / "0", code=ExitCode.FAILED)])["status"]) == ["failed"]


def test_a_job_that_was_stopped_before_its_summary_is_not_failed(tmp_path: Path) -> None:
    make_run(tmp_path / "0", [], [progress(10, 0.6)], status=None)
    make_run(tmp_path / "1", [], [progress(10, 0.6)], status=None)
    codes = (ExitCode.INTERRUPTED, ExitCode.PREEMPTED, ExitCode.INTERRUPTED)
    jobs = [job(tmp_path / str(number), code=code) for number, code in enumerate(codes)]
    assert list(sweep_frame(jobs)["status"]) == ["interrupted", "preempted", "interrupted"]


def test_the_csv_keeps_every_digit_and_leaves_unknown_empty(tmp_path: Path) -> None:
    for number, loss in enumerate((1 / 3, 1 / 7)):
        make_run(tmp_path / str(number), [f"train.seed={number}"], plain_events(loss))
    jobs = [job(tmp_path / str(number), f"train.seed={number}") for number in range(2)]
    rows = list(csv.DictReader(StringIO(sweep_frame(jobs).to_csv(index=False))))
    assert [row["train.seed"] for row in rows] == ["0", "1"]
    assert float(rows[0]["test_loss"]) == 1 / 3 + 0.01
    assert rows[0]["bytes_per_sample"] == rows[0]["dense_ratio"] == ""


def test_means_and_deviations_are_over_seeds_alone(tmp_path: Path) -> None:
    jobs: list[tuple[Job, int]] = []
    points = [(rate, seed) for rate in ("0.1", "0.2") for seed in (1, 2, 3)]
    for number, (rate, seed) in enumerate(points):
        overrides = (f"optimizer.lr={rate}", f"train.seed={seed}")
        make_run(tmp_path / str(number), overrides, plain_events(float(rate) + seed / 100))
        jobs.append(job(tmp_path / str(number), *overrides))
    jobs[-1] = job(tmp_path / "none", *jobs[-1][0].overrides, code=ExitCode.FAILED)
    shown = sweep_means(sweep_frame(jobs))
    assert shown is not None
    assert tuple(shown.columns[:4]) == ("over seeds", "runs", "test log-loss", "AUC")
    cells = [tuple(row[:4]) for row in shown.rows]
    assert cells[0] == ("lr=0.1", "3", "0.1300 ± 0.0100", "0.7000 ± 0.0000")
    assert cells[1] == ("lr=0.2", "2", "0.2250 ± 0.0071", "0.7000 ± 0.0000")
    runs = [read_run(one.folder) for one, _ in jobs[:-1]]
    table = over_seeds(runs)
    assert table is not None
    assert [tuple(row[:2]) for row in table.rows] == [("lr=0.1", "3"), ("lr=0.2", "2")]
    assert "0.1300 ± 0.0100" in table.rows[0]
    assert over_seeds(runs[2:4]) is None
    others = ("model=dlrm_small", "train.batch_size=64", "train.steps=9")
    make_run(tmp_path / "alone", others, plain_events(0.5))  # gives no group its name
    assert over_seeds([read_run(tmp_path / "alone"), *runs]) == table
    assert sweep_means(sweep_frame(jobs[2:4])) is None


def test_a_world_in_one_process_has_the_bytes_that_it_counts(tmp_path: Path) -> None:
    record = world_events(0.4)
    for event in record:
        if event.kind is Kind.RANK:
            del event.values["traffic"][Phase.TRAIN]["embedding"]
    make_run(tmp_path / "0", [], record)
    row = dict(zip(*_cells(tmp_path / "0"), strict=True))
    assert (row["bytes/sample"], row["bytes/sample without embedding"]) == ("–", "10.0")


def _cells(folder: Path) -> tuple[Sequence[str], Sequence[str]]:
    table = sweep_table(sweep_frame([job(folder)]))
    return table.columns, table.rows[0]
