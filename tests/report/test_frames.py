from pathlib import Path

from made_runs import make_run, plain_events, world_events

from dlrm_hybrid.report import measures
from dlrm_hybrid.report.runs import read_runs
from dlrm_hybrid.telemetry.events import Kind


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
