"""What of a checkpoint a world goes on with: of another configuration weights and optimizers."""

import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from saved_tensors import saved_groups

from dlrm_hybrid.config.identity import MODEL
from dlrm_hybrid.model.spec import ModelSpec
from dlrm_hybrid.types import Group
from dlrm_hybrid.world.world import World

Keys = Mapping[str, Any]
SPEC = ModelSpec(embedding_dim=8, bottom=(5, 16, 8), top=(8, 1), table_rows=(40, 7, 30))
ROWS, STEPS = 6, 7
COMMON: Keys = {
    **{"parallel.trainers": 2, "parallel.cuts": ["bottom.1"], "train.batch_size": ROWS},
    **{"optimizer": "adam", "optimizer.lr": 0.01, "gradient": "dct", "gradient.density": 0.1},
    **{"embedding.optimizer": "rowwise_adagrad", "embedding.lr": 0.1},
    **{"pull.precision": "bfloat16", "activation": "dct", "activation.sparsity": 0.5},
}
WORLDS: Mapping[str, Keys] = {
    "stale": {
        **{**COMMON, "schedule": "dsp"},
        **{"schedule.delays": [1, 0], "schedule.staleness": [2, 0]},
    },
    "levels": {
        **{**COMMON, "embedding.deduplicate": True, "embedding.levels": True},
        "pull.sparsity": 0.5,
    },
    "served": {
        **{**COMMON, "embedding": "served", "parallel.table_servers": 2, "sync": "bounded"},
        **{"embedding.cache_rows": 20, "embedding.cache_batches": 3, "optimizer": "sgd"},
    },
}
STATE = {
    "stale": "residuals and thresholds, published weights, batches in flight",
    "levels": "residuals and thresholds, published weights, copies and residuals of rows sent as "
    "levels",
    "served": "residuals and thresholds, published weights, rows looked up ahead or cached",
}
SAME: tuple[Keys, ...] = (
    {"optimizer.lr": 0.5, "embedding.lr": 0.5, "embedding.weight_decay": 0.1},
    {"parallel.servers": 3, "train.evaluate_every": 5},
)
OTHER: Mapping[str, tuple[Keys, ...]] = {
    "stale": (
        {"parallel.trainers": 1},
        {"gradient": "topk"},
        {"gradient.density": 0.2},
        {"activation": "none"},
        {"pull.sparsity": 0.9},
        {"sync": "bounded", "sync.staleness": 2},
        {"schedule": "sequential"},
        {"schedule.staleness": [1, 0]},
    ),
    "levels": (
        {"parallel.trainers": 3},
        {"embedding.row_error": 0.1},
        {"parallel.cuts": ["top.1"]},
    ),
    "served": (
        *({"gradient.residual": "update"}, {"embedding.cache_rows": 9}, {"sync": "sync"}),
        {
            **{"embedding": "fused", "embedding.optimizer": "rowwise_adagrad"},
            "parallel.table_servers": 0,
        },
    ),
}


def cases(of: Mapping[str, tuple[Keys, ...]]) -> list[Any]:
    return [
        pytest.param(name, changes, id=f"{name} {' '.join(map(str, changes))}")
        for name in WORLDS
        for changes in of[name]
    ]


def world_of(name: str, changes: Keys) -> World:
    """The keys of a choice go with it."""
    keys = {
        key: value
        for key, value in WORLDS[name].items()
        if key.partition(".")[0] not in changes or key in changes
    }
    return World.in_process(SPEC, config={**keys, **changes})


def learn(world: World, steps: int) -> None:
    draw, rows = np.random.default_rng(0), ROWS * world.config.parallel.trainers
    for _ in range(steps):
        ids = np.stack([draw.integers(0, few, rows) for few in SPEC.table_rows], axis=1)
        dense = draw.normal(size=(rows, 5)).astype(np.float32)
        world.step((dense, ids, (dense[:, 0] > 0).astype(np.float32)))


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folders: dict[str, Path] = {}
    for name in WORLDS:
        with world_of(name, {}) as world:
            learn(world, STEPS)
            folders[name] = world.save(tmp_path_factory.mktemp(name))
    return folders


def assert_equal(one: dict[str, np.ndarray], other: dict[str, np.ndarray]) -> None:
    assert one.keys() == other.keys()
    for name, tensor in one.items():
        assert tensor.tobytes() == other[name].tobytes(), name


@pytest.mark.parametrize(("name", "changes"), cases(dict.fromkeys(WORLDS, SAME)))
def test_all_goes_on_where_nothing_changes_that_it_depends_on(
    name: str, changes: Keys, saved: dict[str, Path], tmp_path: Path
) -> None:
    with world_of(name, changes) as world, warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        world.load(saved[name])
        before, after = saved_groups(saved[name]), saved_groups(world.save(tmp_path))
    assert before.keys() == after.keys() and len(before) == 5
    for group, tensors in before.items():
        assert_equal(tensors, after[group])


@pytest.mark.parametrize(("name", "changes"), cases(OTHER))
def test_of_another_configuration_weights_and_optimizers_go_on(
    name: str, changes: Keys, saved: dict[str, Path], tmp_path: Path
) -> None:
    with world_of(name, changes) as world:
        fresh = saved_groups(world.save(tmp_path / "fresh"))
        line = f"^weights and optimizers of {saved[name]} go on; {STATE[name]} begin anew$"
        with pytest.warns(UserWarning, match=line):
            world.load(saved[name])
        assert world.steps == STEPS
        found = saved_groups(world.save(tmp_path / "found"))
        learn(world, 3)
    before, versions = saved_groups(saved[name]), found.pop(Group.VERSIONS, {})
    assert found.keys() == fresh.keys() - {Group.VERSIONS}
    for group in found:
        assert_equal(found[group], before[group] if group in MODEL else fresh[group])
    assert versions.keys() == fresh.get(Group.VERSIONS, {}).keys()
    for version, tensor in versions.items():
        weight, _, what = version.rpartition(".")
        is_weight = what.startswith(("published", "behind"))
        begun = before[Group.DENSE][weight] if is_weight else fresh[Group.VERSIONS][version]
        assert tensor.tobytes() == begun.tobytes(), version
