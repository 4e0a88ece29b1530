"""A world that sends activations as levels is evaluated and predicted with the same levels."""

import json
from pathlib import Path

import torch

from dlrm_hybrid.cli.main import run
from dlrm_hybrid.data.loader import sequential_batches
from dlrm_hybrid.data.shards import open_shards
from dlrm_hybrid.predict.predictor import Predictor
from dlrm_hybrid.telemetry.metrics import BinaryMetrics


def test_run_evaluate_and_predict_give_one_score(small_rows: list[str], tmp_path: Path) -> None:
    folder, output = tmp_path / "run", tmp_path / "evaluated.json"
    world = ["+experiment=dct_hybrid", "parallel.world=in_process", "train.steps=20"]
    levels = ["activation.bits=[null,4]", "activation.sparsity=0.75", "optimizer.lr=0.2"]
    train = ["train", *small_rows, *world, *levels, f"hydra.run.dir={folder}"]
    evaluate = ["evaluate", f"evaluate.checkpoint={folder}", f"evaluate.output={output}"]
    assert run(["dlrm_hybrid", *train]) == run(["dlrm_hybrid", *evaluate]) == 0
    evaluated = json.loads(output.read_text())
    told = json.loads((folder / "summary.json").read_text())["test"]["loss"]
    assert told == evaluated["log_loss"]
    model = Predictor(folder)._serving.model  # pyright: ignore[reportPrivateUsage]
    wire = [(mask.dtype, mask.bits) for mask in model.masks.values()]
    assert wire == [(torch.bfloat16, None), (None, 4)]
    prepared = json.loads((folder / "config.json").read_text())["data"]["prepared"]
    shards, metrics = open_shards(Path(prepared), None), BinaryMetrics()
    for batch in sequential_batches(shards, shards.test_rows("day"), 1000):
        metrics.add(model.logits(batch), batch.label_B)
    found = metrics.scores()
    assert (found.log_loss, found.auc) == (evaluated["log_loss"], evaluated["auc"])
