from pathlib import Path

import pytest

from dlrm_hybrid.cli.main import run


def test_a_run_becomes_a_page_and_its_tables(
    train: object, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert callable(train)
    code, folder = train("run", "train.steps=20", "telemetry.every=5", "name=mine")
    assert code == 0
    capsys.readouterr()
    page = tmp_path / "pages" / "mine.html"
    page.parent.mkdir()
    pictures = tmp_path / "pictures"
    options = [f"report.runs={folder}", f"report.output={page}", f"report.pictures={pictures}"]
    assert run(["dlrm_hybrid", "report", *options]) == 0
    out = capsys.readouterr().out
    assert "│ mine │ complete │    20 │" in out
    assert "<h1>Run mine</h1>" in page.read_text()
    assert "| mine | complete |    20 |" in page.with_suffix(".md").read_text()
    assert sorted(path.name for path in page.parent.iterdir()) == ["mine.html", "mine.md"]
    assert "(../pictures/loss_over_training_steps.png)" in page.with_suffix(".md").read_text()
    assert (pictures / "loss_over_training_steps.png").is_file()


def test_what_to_report_must_be_named_and_be_there(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run(["dlrm_hybrid", "report"]) == 2
    assert "report.runs = null: name run folders" in capsys.readouterr().err
    assert run(["dlrm_hybrid", "report", "report.runs=[nowhere]"]) == 2
    assert "report.runs = nowhere: no run folder found here or below" in capsys.readouterr().err
    assert run(["dlrm_hybrid", "report", "report.runs=x", "report.pictures='p/*.gif'"]) == 2
    assert "report.pictures = p/*.gif: must be a folder, or one of" in capsys.readouterr().err
    assert run(["dlrm_hybrid", "report", "report.runs=x", "report.output=x.md"]) == 2
    assert "report.output = 'x.md'" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []
