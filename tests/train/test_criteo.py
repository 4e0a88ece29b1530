"""Real rows, one epoch: the quality a plain DLRM reaches on them."""

import json
from pathlib import Path

import pytest

from dlrm_hybrid.cli.main import run


@pytest.fixture(scope="module")
def prepared(criteo_rows: Path, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    folder = tmp_path_factory.mktemp("criteo") / "prepared"
    options = ["data=criteo_kaggle", f"data.prepared={folder}"]
    assert run(["dlrm_hybrid", "prepare", *options, f"data.raw={criteo_rows}"]) == 0
    return options


@pytest.mark.slow
@pytest.mark.parametrize(
    ("seed", "precision"), [(0, "float32"), (0, "bfloat16"), (1, "float32"), (2, "float32")]
)
def test_one_epoch_reaches_the_reference(
    seed: int, precision: str, prepared: list[str], tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    options = [f"train.seed={seed}", f"precision={precision}", f"hydra.run.dir={folder}"]
    assert run(["dlrm_hybrid", "train", *prepared, *options]) == 0
    test = json.loads((folder / "summary.json").read_text())["test"]
    assert test["base_rate"] == pytest.approx(0.262, abs=0.0005)
    assert test["loss"] <= 0.540
    assert test["auc"] >= 0.710
    assert test["best_reachable"] is None
