"""Models with batch norm: every exported file scores as the checkpoint."""

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch

from dlrm_hybrid.cli.main import run

NORM = ("model.batch_norm=true", "model.dropout=0.1", "train.steps=40", "optimizer.lr=0.2")
MODEL = ("model.interaction=fm", "model.fm.deep=[16,8]")
Trained = Callable[[str], Path]
WORLDS = {
    "trainers": (
        *("parallel=hybrid", "parallel.world=in_process", "parallel.trainers=3", *MODEL),
        "parallel.cuts=[bottom.2]",
    ),
    "crossed": (
        *("model.interaction=cross", "model.cross.rank=null", "model.cross.layers=2"),
        "model.cross.deep=[16,8]",
    ),
    # What leaves stages is masked: predictions go from stage to stage.
    "masked": ("+experiment=dct_hybrid", "parallel.world=in_process"),
}


@pytest.fixture(scope="module")
def trained(small_rows: list[str], tmp_path_factory: pytest.TempPathFactory) -> Trained:
    """Run folders by world."""
    root = tmp_path_factory.mktemp("norms")

    @cache
    def folder_of(world: str) -> Path:
        argv = ["train", *small_rows, *WORLDS[world], *NORM, f"hydra.run.dir={root / world}"]
        assert run(["dlrm_hybrid", *argv]) == 0
        return root / world

    return folder_of


# Making a graph takes seconds: test_export.py makes some of models without norms.
QUICK = {("safetensors", "trainers")}


def evaluated(folder: Path, output: Path, *options: str) -> dict[str, Any]:
    given = (f"evaluate.checkpoint={folder}", f"evaluate.output={output}", *options)
    assert run(["dlrm_hybrid", "evaluate", *given]) == 0
    return json.loads(output.read_text())


@pytest.mark.parametrize(
    ("format", "world"),
    [
        pytest.param(format, world, marks=() if (format, world) in QUICK else pytest.mark.slow)
        for format in ("pt2", "onnx", "safetensors")
        for world in WORLDS
    ],
)
def test_what_is_written_scores_as_the_checkpoint(
    format: str, world: str, trained: Trained, tmp_path: Path
) -> None:
    output = tmp_path / "out"
    given = (f"export.checkpoint={trained(world)}", f"export.output={output}")
    assert run(["dlrm_hybrid", "export", *given, f"export.format={format}"]) == 0
    described = json.loads((output / "model.json").read_text())
    assert described["model"]["batch_norm"] is True
    assert described["check"]["score_difference"] <= 1e-5
    assert described["check"]["before"]["rows"] == 1000


def test_weights_and_statistics_make_a_checkpoint_with_the_same_scores(
    trained: Trained,
    small_rows: list[str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    output, theirs = tmp_path / "out", tmp_path / "theirs"
    given = (f"export.checkpoint={trained('trainers')}", f"export.output={output}")
    assert run(["dlrm_hybrid", "export", *given, "export.format=safetensors"]) == 0
    file = output / "model.safetensors"
    names = set(safetensors.torch.load_file(file))
    assert {"top.1.norm.weight", "top.1.norm.running_var"} <= names
    assert "top.1.bias" not in names
    rows = (one for one in small_rows if not one.startswith("telemetry"))
    shape = (*rows, *MODEL, *NORM)
    named = (f"import.file={file}", "import.names=ours", f"import.output={theirs}")
    assert run(["dlrm_hybrid", "import", *shape, *named]) == 0
    one, other = (
        evaluated(folder, tmp_path / f"{folder.name}.json")
        for folder in (trained("trainers"), theirs)
    )
    assert (one["log_loss"], one["auc"]) == (other["log_loss"], other["auc"])
    held = safetensors.torch.load_file(file)
    held["top.1.norm.running_var"][3] = -1
    safetensors.torch.save_file(held, tmp_path / "negative.safetensors")
    named = (f"import.file={tmp_path / 'negative.safetensors'}", "import.names=ours")
    assert run(["dlrm_hybrid", "import", *shape, *named, f"import.output={tmp_path / 'no'}"]) == 3
    assert "top.1.norm.running_var: holds a variance below 0" in capsys.readouterr().err


def test_others_have_no_such_models(
    trained: Trained, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = (f"export.checkpoint={trained('masked')}", f"export.output={tmp_path / 'out'}")
    names = ("export.format=safetensors", "export.names=torchrec")
    assert run(["dlrm_hybrid", "export", *given, *names]) == 2
    assert "has no model with batch norm" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
