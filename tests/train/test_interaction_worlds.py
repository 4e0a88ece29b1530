"""Models with other interactions through the command line: worlds of one process are plain ones."""

from pathlib import Path

import numpy as np
import pytest
from world_runs import PlainRuns, Train, assert_same, largest_difference, summary, tensors

WORLD = ("parallel=hybrid", "parallel.world=in_process")
CROSS = ("model.interaction=cross", "model.cross.rank=8", "model.cross.layers=2")
PARALLEL = ("model.interaction=cross", "model.cross.rank=null", "model.cross.deep=[16,8]")
MACHINE = ("model.interaction=fm", "model.fm.deep=[16,8]")
SPARSE = ("gradient=dct", "gradient.sparsity=0.9", "gradient.lifespan=3")


@pytest.fixture(scope="module")
def plain(small_rows: list[str], tmp_path_factory: pytest.TempPathFactory) -> PlainRuns:
    return PlainRuns(small_rows, tmp_path_factory.mktemp("plain"))


@pytest.mark.parametrize("model", [CROSS, PARALLEL, MACHINE], ids=["cross", "parallel", "machine"])
@pytest.mark.parametrize(
    ("cuts", "servers"), [((), 0), (("bottom.2", "top.1"), 3), (("bottom.4",), 1)]
)
def test_one_trainer_cut_anywhere_is_plain_training(
    cuts: tuple[str, ...], servers: int, model: tuple[str, ...], plain: PlainRuns, train: Train
) -> None:
    options = (*model, "train.steps=60", "checkpoint.every=30")
    layout = ("parallel.trainers=1", f"parallel.servers={servers}")
    code, folder = train("world", *options, *WORLD, *layout, f"parallel.cuts=[{','.join(cuts)}]")
    assert code == 0
    assert_same(plain(*options), folder, 60)
    assert largest_difference(tensors(folder, 30), tensors(folder, 60), "interaction") > 1e-4


@pytest.mark.parametrize("model", [CROSS, MACHINE], ids=["cross", "machine"])
def test_trainers_together_are_plain_training_of_the_global_batch(
    model: tuple[str, ...], plain: PlainRuns, train: Train
) -> None:
    options = (*model, "train.steps=20")
    layout = ("parallel.trainers=2", "parallel.servers=2", "parallel.cuts=[bottom.2,top.2]")
    code, folder = train("world", *options, *WORLD, *layout)
    assert code == 0
    expected = plain(*options, "train.batch_size=128")
    for prefix in ("bottom", "interaction", "top", "embedding"):
        assert largest_difference(tensors(expected, 20), tensors(folder, 20), prefix) <= 1e-6


@pytest.mark.parametrize("model", [CROSS, MACHINE], ids=["cross", "machine"])
def test_a_compressed_world_of_processes_is_that_of_one_and_resumes(
    model: tuple[str, ...], train: Train
) -> None:
    world = ("parallel=hybrid", "parallel.trainers=2", "parallel.servers=2", *SPARSE)
    world += ("parallel.cuts=[bottom.2,top.1]", "activation=dct", "activation.sparsity=0.5")
    alone = "parallel.world=in_process"
    code, folder = train("processes", *model, *world, "train.steps=12")
    assert code == 0
    assert train("unbroken", *model, *world, alone, "train.steps=12")[0] == 0
    assert_same(folder, folder.with_name("unbroken"), 12)
    assert train("broken", *model, *world, alone, "train.steps=5")[0] == 0
    broken = folder.with_name("broken")
    resume = f"checkpoint.resume={broken}"
    code, resumed = train("resumed", *model, *world, alone, "train.steps=12", resume)
    assert code == 0
    assert_same(folder, resumed, 12)


@pytest.mark.parametrize("model", ["dcnv2", "deepfm"])
def test_the_choices_learn(model: str, small_rows: list[str], tmp_path: Path) -> None:
    from dlrm_hybrid.cli.main import run

    rows = [one for one in small_rows if not one.startswith("model=")]
    options = [
        f"model={model}",
        "train.steps=90",
        "telemetry.every=30",
        f"hydra.run.dir={tmp_path}",
    ]
    assert run(["dlrm_hybrid", "train", *rows, *options]) == 0
    found = summary(tmp_path)
    assert found["status"] == "complete"
    assert np.isfinite(found["test"]["loss"])
    assert found["test"]["auc"] > 0.55
