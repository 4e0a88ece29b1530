"""NaN and infinity end a run with exit 4, are never saved, and never loaded."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from saver_kills import saver, tensors
from world_runs import Train, summary

from dlrm_hybrid.checkpoint import writer
from dlrm_hybrid.checkpoint.folder import find
from dlrm_hybrid.checkpoint.reader import open_checkpoint
from dlrm_hybrid.compress.gradient.layout import Layout, Spec
from dlrm_hybrid.parallel.dense.published import LargestChanges
from dlrm_hybrid.parallel.finite import is_finite
from dlrm_hybrid.run import training
from dlrm_hybrid.train.progress import Progress
from dlrm_hybrid.types import DataError, DivergedError
from dlrm_hybrid.wire.section import Dtype

NAN, INF = float("nan"), float("inf")
# ReLUs of oneDNN turn NaN into 0: behind them the loss of a model full of NaN is finite.
HIDDEN = ("model=dlrm_paper", "telemetry.every=1")
WORLD = (
    *("parallel=hybrid", "parallel.trainers=1", "parallel.cuts=[]", "parallel.servers=1"),
    *("train.batch_size=16", "train.steps=30", "checkpoint.every=10"),
)


@pytest.mark.parametrize(
    ("overrides", "told"),
    [
        (("embedding.lr=1e38",), "optimizer.lr = 0.1 or embedding.lr = 1e+38 may be too high"),
        (("optimizer.lr=1e3", "precision=bfloat16"), "optimizer.lr = 1000.0 or embedding.lr"),
    ],
)
def test_nan_that_hides_from_the_loss_ends_the_run(
    overrides: tuple[str, ...], told: str, train: Train, capsys: pytest.CaptureFixture[str]
) -> None:
    code, folder = train("run", *HIDDEN, *overrides)
    assert code == 4
    error = capsys.readouterr().err
    assert "is not finite; " in error
    assert told in error
    assert summary(folder)["status"] == "diverged"
    assert not (folder / "checkpoints").exists()


def test_one_bad_shard_of_a_world_stops_the_commit(
    train: Train, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(training, "TRAIN_RANK", "saving_faults:poisoned_rank")
    code, folder = train("run", *WORLD)
    assert code == 4
    assert capsys.readouterr().err == (
        "step 20: bottom.1.weight of server-0 (rank 1) is not finite, so no checkpoint was saved; "
        "optimizer.lr may be too high\n"
    )
    assert (folder / "checkpoints" / "latest").read_text() == "step_00000010\n"
    assert summary(folder)["status"] == "diverged"


@pytest.mark.parametrize("poison", [NAN, INF, -INF])
@pytest.mark.parametrize(
    ("name", "key"), [("bottom.1.weight", "optimizer.lr"), ("embedding.1.weight", "embedding.lr")]
)
def test_what_is_not_finite_is_never_written(
    name: str, key: str, poison: float, tmp_path: Path
) -> None:
    held = tensors(1)
    local = saver(tmp_path, held)
    local.save(Progress(step=1))
    assert local.finish() is not None
    held[name][2, 1] = poison
    local.save(Progress(step=2))
    with pytest.raises(DivergedError, match=rf"step 2: {name} of worker-0 .* {key} may be"):
        local.finish()
    assert find(tmp_path).name == "step_00000001"
    assert not list(tmp_path.glob("**/*00002*/*"))


@pytest.fixture
def unchecked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Path]:
    """A checkpoint as an older version of the program may have written it: with a NaN."""

    def write(name: str) -> Path:
        held = tensors(1)
        held[name] = torch.tensor([1.0, NAN])
        with monkeypatch.context() as patch:
            patch.setattr(writer, "first_not_finite", lambda _: None)
            local = saver(tmp_path, held)
            local.save(Progress(step=1))
            assert local.finish() is not None
        return find(tmp_path)

    return write


def test_what_is_not_finite_is_never_read(unchecked: Callable[[str], Path]) -> None:
    folder = unchecked("bottom.1.weight")
    told = rf"{folder}/dense.worker-0.safetensors: bottom.1.weight holds values that are not finite"
    with pytest.raises(DataError, match=told):
        open_checkpoint(folder).tensor("bottom.1.weight")


def test_a_threshold_that_is_not_found_yet_is_finite(unchecked: Callable[[str], Path]) -> None:
    layout, weight_N = Layout([Spec(0, "bias", (100,))]), np.zeros(100, np.float32)
    state = LargestChanges(layout, weight_N, Dtype.FLOAT32, 0.9).tensors()
    assert all(is_finite(one) for one in state.values())
    folder = unchecked("compressor.0.bottom.1.weight.threshold")
    with pytest.raises(DataError, match=r"threshold holds values that are not finite"):
        open_checkpoint(folder).tensor("compressor.0.bottom.1.weight.threshold")


def test_finite_values_near_the_limit_are_finite() -> None:
    assert is_finite(torch.full((1000,), 3e38))
    assert is_finite(torch.tensor([3e38, -3e38, 3e38]))
    assert is_finite(torch.arange(3))
    assert not is_finite(torch.tensor([INF, -INF]))
