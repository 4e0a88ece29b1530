"""Every choice of `gradient` and of models learns."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest
from world_runs import Trained, summary

from dlrm_hybrid.compress.gradient.methods import methods
from dlrm_hybrid.config.compose import values_of
from dlrm_hybrid.config.validate import validate
from dlrm_hybrid.types import Group

if TYPE_CHECKING:
    from dlrm_hybrid.train.in_process import InProcessEngine

STEPS = 100
WORLD = (
    *("parallel=hybrid", "parallel.cuts=[bottom.2]", "parallel.servers=2"),
    *("train.batch_size=16", f"train.steps={STEPS}", "optimizer.lr=0.5"),
)
OPTIONS = {
    "dct": ("gradient.threshold=sidco",),
    "dgc": ("gradient.warmup_steps=10", "optimizer.lr=0.05"),
    "sidco": ("gradient.scope=stage", "gradient.residual=update"),
}
IN_PROCESS = "parallel.world=in_process"


def options_of(method: str) -> tuple[str, ...]:
    sparse = ("gradient.density=0.1",) if methods()[method].is_sparse else ()
    return (*WORLD, f"gradient={method}", *sparse, *OPTIONS.get(method, ()))


def learned(small_rows: list[str], *options: str) -> tuple[InProcessEngine, list[float]]:
    """A world of one process at the end of its run, and its losses by step."""
    # Torch and TorchRec take seconds to import, which other choices of tests need not wait for.
    from dlrm_hybrid.data.loader import START
    from dlrm_hybrid.data.shards import open_shards
    from dlrm_hybrid.model.row_storage import IN_MEMORY
    from dlrm_hybrid.run.assembly import build
    from dlrm_hybrid.run.assembly import engine as build_engine

    config = validate(values_of([*small_rows, *options, IN_PROCESS]))
    shards = open_shards(build.prepared_folder(config), build.semantics(config))
    steps = config.train.steps or STEPS
    engine = build_engine.engine(config, shards, steps, IN_MEMORY)
    losses: list[float] = []
    at = START
    for step in range(steps):
        made, at = engine.make_step(step, at)
        losses.append(made.loss_sum / made.rows)
    return engine, losses


QUICK = ("dgc",)  # the others' worlds are rows of test_world_matrix.py, too


@pytest.mark.parametrize(
    "method",
    [pytest.param(one, marks=() if one in QUICK else pytest.mark.slow) for one in methods()],
)
def test_every_method_learns(method: str, small_rows: list[str]) -> None:
    engine, losses = learned(small_rows, *options_of(method))
    assert sum(losses[-20:]) < 0.95 * sum(losses[:20])
    counts = engine.compression()
    sent = sum(one["sent"] for name, one in counts.items() if name.startswith("gradient."))
    elements = sum(one["elements"] for name, one in counts.items() if name.startswith("gradient."))
    if methods()[method].is_sparse:
        assert 0 < sent < elements


def test_updates_move_weights_as_gradients_do(small_rows: list[str]) -> None:
    """Where lr · g waits instead of g, the server must not multiply by lr again."""
    from dlrm_hybrid.model.tensors import in_groups

    options = (*WORLD, "gradient=dct", "gradient.density=1", "optimizer.schedule=linear")
    engines = [
        learned(small_rows, *options, "train.steps=6", f"gradient.residual={residual}")[0]
        for residual in ("gradient", "update")
    ]
    of_gradients, of_updates = (
        {piece.name: piece.view for piece in in_groups(one.pieces(), Group.DENSE)}
        for one in engines
    )
    assert of_gradients.keys() == of_updates.keys()
    for name, weight in of_gradients.items():
        np.testing.assert_allclose(of_updates[name].numpy(), weight.numpy(), atol=1e-6)


@pytest.mark.parametrize("model", [pytest.param("dcnv2", marks=pytest.mark.slow), "deepfm"])
def test_every_model_learns(model: str, trained: Trained) -> None:
    folder = trained("run", f"model={model}", "train.steps=90", "telemetry.every=30")
    assert summary(folder)["test"]["auc"] > 0.55
