"""What compressed worlds learn: nothing else than plain ones, or than a textbook's reference."""

import json
from pathlib import Path

import numpy as np
import pytest
from compressed_reference import Reference
from world_runs import Trained, assert_moved, assert_same, summary, tensors

from dlrm_hybrid.cli.main import run

STEPS = 24
LENGTH = (f"train.steps={STEPS}", "checkpoint.every=12", "train.batch_size=16")
WORLD = ("parallel=hybrid", "parallel.world=in_process")
TOP_K = (
    *("gradient=dct", "gradient.threshold=exact", "gradient.lifespan=1", "gradient.renewal=fixed"),
    "gradient.density=0.1",
)
MASKS = ("activation=dct", "activation.sparsity=0.75")


@pytest.mark.parametrize(
    "layout",
    [
        (),
        pytest.param(("schedule=one_f_one_b", "schedule.microbatches=4"), marks=pytest.mark.slow),
        pytest.param(
            ("sync=bounded", "sync.staleness=2", "parallel.servers=2"), marks=pytest.mark.slow
        ),
        pytest.param(("optimizer=adagrad", "optimizer.lr=0.02"), marks=pytest.mark.slow),
    ],
)
def test_the_hybrid_that_leaves_nothing_out_is_the_baseline(
    layout: tuple[str, ...], trained: Trained
) -> None:
    baseline = trained("baseline", *WORLD, *LENGTH, *layout)
    everything = ("gradient=dct", "gradient.density=1", "activation=dct", "activation.sparsity=0")
    folder = trained("hybrid", *WORLD, *LENGTH, *layout, *everything)
    assert_same(folder, baseline, STEPS)
    assert_moved(folder, 12, STEPS)
    assert summary(folder)["test"] == summary(baseline)["test"]
    # Zeros stay at home, so these were other messages.
    assert summary(folder)["compression"]["activation_density"] < 0.9


@pytest.mark.parametrize(
    ("compressed", "layout"),
    [
        # Fast tests have both, and masks with micro-batches.
        pytest.param(TOP_K, ("parallel.cuts=[]", "parallel.servers=2"), marks=pytest.mark.slow),
        pytest.param(MASKS, ("parallel.trainers=1", "parallel.servers=0"), marks=pytest.mark.slow),
        (
            ("activation=dct", "activation.sparsity=[0.5,0.9]"),
            ("parallel.trainers=1", "schedule=sequential", "schedule.microbatches=4"),
        ),
        ((*TOP_K, *MASKS), ("schedule=one_f_one_b", "schedule.microbatches=2")),
    ],
    ids=["gradients", "activations", "micro-batches", "both"],
)
def test_a_compressed_world_is_its_textbook(
    compressed: tuple[str, ...], layout: tuple[str, ...], trained: Trained
) -> None:
    folder = trained("world", *WORLD, *LENGTH, *compressed, *layout)
    expected = Reference(folder).train(STEPS)
    found = tensors(folder, STEPS)
    assert found.keys() == expected.keys()
    for name, tensor in found.items():
        np.testing.assert_array_equal(tensor, expected[name].numpy(), err_msg=name)
    assert_moved(folder, 12, STEPS)


def scored(folder: Path, *options: str) -> float:
    """Loss of the last checkpoint, by the verb `evaluate`."""
    output = folder / "scores.json"
    wish = (f"evaluate.checkpoint={folder}", f"evaluate.output={output}")
    assert run(["dlrm_hybrid", "evaluate", *wish, *options]) == 0
    return json.loads(output.read_text())["log_loss"]


SHORT = ("+experiment=dct_hybrid", "parallel.world=in_process", "train.steps=12")


def test_scores_with_masks_and_without_are_two_and_evaluate_repeats_both(trained: Trained) -> None:
    losses: dict[str, float] = {}
    for masked in ("true", "false"):
        folder = trained(masked, *SHORT, f"activation.evaluate_masked={masked}")
        losses[masked] = summary(folder)["test"]["loss"]
    assert losses["true"] != losses["false"]
    for masked, loss in losses.items():
        # Both from the same run, which scored itself without masks.
        assert scored(folder, f"activation.evaluate_masked={masked}") == loss
