from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from dlrm_hybrid.config.compose import values_of
from dlrm_hybrid.config.identity import (
    MODEL,
    config_hash,
    differences,
    evaluated,
    is_below,
    kept_groups,
    same_results,
    with_value,
)
from dlrm_hybrid.config.keys import all_keys, keys_of
from dlrm_hybrid.config.validate import own_values
from dlrm_hybrid.record import Effect
from dlrm_hybrid.types import DataError, Group

# Sections and keys by what they decide; every other key decides none of it.
EFFECTS: Mapping[Effect, tuple[str, ...]] = {
    Effect.NOTHING: (
        *("name", "skip_completed", "conf", "sweep", "prepare", "evaluate", "telemetry", "report"),
        *("plan", "watch", "doctor", "predict", "export", "import"),
        *("checkpoint.every", "checkpoint.minutes", "checkpoint.keep", "checkpoint.keep_best"),
        *("checkpoint.max_restarts", "checkpoint.restart_window_seconds", "sync.record"),
        *("data.prepared", "data.raw", "data.max_bad_rows", "data.processes", "data.block_bytes"),
        *(
            "data.guess",
            "data.base",
            "data.follow",
            "data.follow_files",
            "data.follow_idle_seconds",
        ),
        "embedding.folder",
    ),
    Effect.FREE: (
        *("checkpoint.resume", "device", "threads", "data.test_part", "data.schema", "network"),
        *("embedding.kernel", "embedding.device", "tf32", "data.grow", "data.progressive"),
        *("activation.allow_rice", "activation.evaluate_masked", "activation.observe"),
        *("parallel.machines", "parallel.world", "parallel.elastic", "embedding.storage"),
        "sync.check_every",
        "train.evaluate_every",
    ),
    Effect.SEED: ("train.seed", "data.seed"),
    Effect.EVALUATION: (
        *("evaluate", "prepare", "threads", "activation.evaluate_masked", "embedding.storage"),
        *("embedding.folder", "embedding.kernel", "embedding.device", "data", "device", "tf32"),
    ),
    Effect.ANOTHER: (
        *("report", "plan", "doctor", "predict", "export", "import", "conf", "sweep", "watch"),
    ),
    Effect.PATH: (
        *("conf", "data.raw", "data.schema", "data.prepared", "data.base", "data.follow"),
        "embedding.folder",
        *("sync.replay", "network.keys", "checkpoint.resume"),
    ),
    Effect.PLACE: ("embedding.folder", "telemetry.wandb", "telemetry.mlflow"),
    Effect.STATE: (
        *("gradient", "activation", "schedule", "sync", "pull", "parallel.trainers"),
        *("parallel.cuts", "embedding.name", "embedding.levels", "embedding.row_error"),
        *("embedding.gradient_error", "embedding.copies_rows", "embedding.staleness"),
        *("embedding.cache_rows", "embedding.cache_batches"),
    ),
    Effect.NEW_RUN: (
        *("train.epochs", "train.steps", "train.patience", "train.min_delta", "train.monitor"),
        *("optimizer", "parallel", "embedding", "model.dropout", "model.bottom_dropout"),
    ),
}
NOT_OF_THEM: Mapping[Effect, tuple[str, ...]] = {
    Effect.EVALUATION: ("data.shuffle", "data.shuffle_block_rows", "data.shuffle_read_rows"),
    Effect.NEW_RUN: ("optimizer.name", "embedding.optimizer", "embedding.eps"),
}

ALL, LATER, ANEW = frozenset(Group), (False, True, frozenset(Group)), (False, True, MODEL)
CACHED = ("embedding.cache_rows=9", "embedding.cache_batches=2")
SAVED = {
    "name": "one",
    "train": {"seed": 1, "epochs": 1, "evaluate_every": 0},
    "optimizer": {"name": "sgd", "lr": 0.1},
    "data": {"rows": 10, "prepared": "here"},
}


def changed(section: str, **values: object) -> dict[str, object]:
    return {**SAVED, section: {**SAVED[section], **values}}  # type: ignore[dict-item]


@pytest.mark.parametrize("effect", EFFECTS)
def test_a_key_decides_what_it_always_did(effect: Effect) -> None:
    """Runs and checkpoints are compared by it."""
    keys = {key for key in all_keys() if is_below(key, EFFECTS[effect])}
    keys -= {*NOT_OF_THEM.get(effect, ())}
    free = Effect.NOTHING | Effect.FREE
    if effect is Effect.NEW_RUN:
        keys -= {*keys_of(Effect.STATE)}
    if effect in Effect.NEW_RUN | Effect.STATE:  # what is free is not compared
        keys = {key for key in keys if not free & all_keys()[key].effect}
    assert {*keys_of(effect)} == keys


def test_what_decides_no_weight_is_free() -> None:
    for other in (
        {**SAVED, "name": "two"},
        changed("train", evaluate_every=5),
        changed("data", prepared="there"),
        {**SAVED, "gradient": {"of_a_later_version": None}},
    ):
        assert config_hash(other) == config_hash(SAVED)
        assert differences(SAVED, other, new_run=False) == []


def test_what_decides_a_weight_is_named() -> None:
    other = changed("train", seed=2, epochs=3)
    assert config_hash(other) != config_hash(SAVED)
    assert differences(SAVED, other, new_run=False) == [
        "train.epochs = 3: the checkpoint was made with 1; another hydra.run.dir with "
        "checkpoint.resume=THIS_RUN takes it",
        "train.seed = 2: the checkpoint was made with 1",
    ]


@pytest.mark.parametrize(
    ("changes", "same_run", "new_run", "kept"),
    [
        (
            {
                "name": "two",
                "telemetry.every": 9,
                "train.evaluate_every": 5,
                "network.rate": "1gbit",
            },
            *(True, True, ALL),
        ),
        ({"train.epochs": 3, "train.steps": 9, "train.patience": 2}, *LATER),
        ({"optimizer.lr": 0.2, "model.dropout": 0.1, "embedding.betas": [0.8, 0.9]}, *LATER),
        ({"embedding.init": 0.01, "embedding.weight_decay": 0.1, "parallel.servers": 3}, *LATER),
        ({"gradient": {"name": "none"}}, *ANEW),
        ({"gradient.residual": "update"}, *ANEW),
        ({"activation.sparsity": 0.5}, *ANEW),
        ({"pull.precision": "levels"}, *ANEW),
        ({"parallel.trainers": 3}, *ANEW),
        ({"parallel.cuts": ["top.1"]}, *ANEW),
        ({"schedule": {"name": "dsp"}}, *ANEW),
        ({"sync": {"name": "bounded", "staleness": 2}}, *ANEW),
        ({"embedding.levels": True}, *ANEW),
        ({"embedding.cache_rows": 5}, *ANEW),
        ({"optimizer.name": "adagrad"}, False, False, ALL),
        ({"train.seed": 3}, False, False, ALL),
    ],
    ids=lambda case: "+".join(case) if isinstance(case, dict) else "",
)
def test_what_a_run_goes_on_with(
    changes: Mapping[str, Any], same_run: bool, new_run: bool, kept: frozenset[Group]
) -> None:
    """All of the same configuration; weights and optimizers alone of another one."""
    before = after = values_of(["+experiment=dct_hybrid"])
    for key, value in changes.items():
        after = with_value(after, key, value)
    for saved, now in ((before, after), (after, before)):
        assert (differences(saved, now, new_run=False) == []) == same_run
        assert (differences(saved, now, new_run=True) == []) == new_run
        assert kept_groups(saved, now, same_rows=True) == kept
        of_rows = MODEL | ({Group.COMPRESSOR} & kept)
        assert kept_groups(saved, now, same_rows=False) == of_rows


def test_in_lock_step_membership_says_whether_anything_is_ahead() -> None:
    """Trainers that may be lost rest before a checkpoint, as those of `async` always do."""
    plain = values_of(["parallel=hybrid", "embedding=served", *CACHED])
    elastic = with_value(plain, "parallel.elastic", True)
    assert differences(plain, elastic, new_run=False) == []
    assert kept_groups(elastic, plain, same_rows=True) == ALL
    assert kept_groups(plain, elastic, same_rows=True) == ALL - {Group.VERSIONS}
    ahead = [with_value(values, "embedding.staleness", 2) for values in (plain, elastic)]
    assert kept_groups(*ahead, same_rows=True) == ALL - {Group.VERSIONS, Group.LOOKUPS}
    assert kept_groups(*reversed(ahead), same_rows=True) == ALL
    more = with_value(plain, "parallel.table_servers", 3)
    assert kept_groups(plain, more, same_rows=True) == ALL - {Group.LOOKUPS, Group.LEVELS}
    asynchronous = [with_value(values, "sync", {"name": "async"}) for values in ahead]
    assert kept_groups(*asynchronous, same_rows=True) == ALL - {Group.VERSIONS}


def test_results_are_the_same_where_nothing_but_the_doing_differs() -> None:
    for same in (
        changed("data", prepared="there"),
        {**SAVED, "skip_completed": True, "checkpoint": {"every": 5, "resume": "auto"}},
    ):
        assert same_results(SAVED, same)
    # These lead to the same weights, yet not to the same scores and times.
    for other in (
        changed("data", test_part="first_half"),
        {**SAVED, "threads": 2},
        changed("optimizer", lr=1),
        {**SAVED, "checkpoint": {"resume": "runs/another"}},
    ):
        assert not same_results(SAVED, other)


def test_a_key_that_a_choice_lacks_is_what_it_does_without() -> None:
    """A single process is one trainer without cuts, also where its section does not say so."""
    single = values_of(["parallel=single"])
    one = values_of(["parallel=hybrid", "parallel.trainers=1", "parallel.cuts=[]"])
    three = with_value(one, "parallel.trainers", 3)
    assert "trainers" not in single["parallel"]
    assert evaluated(single, one, ["parallel.trainers", "parallel.cuts"])[1] == []
    assert evaluated(single, three, ["parallel.trainers"])[1] == [
        "parallel.trainers = 3: the checkpoint was made with 1"
    ]
    assert kept_groups(single, one, same_rows=True) == ALL
    assert kept_groups(single, three, same_rows=True) == MODEL


SERVED = ("parallel=hybrid", "embedding=served", "parallel.table_servers=2")


def test_where_rows_lie_decides_no_weight() -> None:
    in_memory = values_of(list(SERVED))
    in_files = values_of([*SERVED, "embedding.storage=mmap", "embedding.folder=rows"])
    assert config_hash(in_memory) == config_hash(in_files)
    assert not differences(in_memory, in_files, new_run=False)
    scored, faults = evaluated(in_files, in_memory, ["embedding.storage", "embedding.folder"])
    assert not faults
    assert scored == in_memory


def test_keys_that_an_earlier_version_lacked_get_their_defaults() -> None:
    now = values_of(["+experiment=dct_hybrid", "data=table", "data.schema=bars_criteo_x1"])
    before = {**now, "data": {**now["data"]}, "embedding": {**now["embedding"]}}
    del before["device"], before["telemetry"], before["data"]["base"], before["embedding"]["kernel"]
    assert own_values(Path("config.json"), before) == now
    del before["gradient"]
    with pytest.raises(DataError, match=r"^config\.json: config: .*\n  gradient: missing$"):
        own_values(Path("config.json"), before)
    before["gradient"] = {**now["gradient"], "sparsity": 0.99}
    with pytest.raises(DataError, match=r"gradient\.sparsity"):
        own_values(Path("config.json"), before)
