from collections.abc import Mapping
from pathlib import Path

import pytest

from dlrm_hybrid.config.compose import values_of
from dlrm_hybrid.config.identity import (
    config_hash,
    differences,
    evaluated,
    in_flight,
    is_below,
    other_flights,
    same_compressors,
    same_levels,
    same_lookups,
    same_results,
    same_versions,
    with_value,
)
from dlrm_hybrid.config.keys import all_keys, keys_of
from dlrm_hybrid.config.validate import own_values
from dlrm_hybrid.record import Effect
from dlrm_hybrid.types import DataError

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
    Effect.COMPRESSORS: (
        "gradient",
        "activation",
        "parallel.trainers",
        "parallel.cuts",
        "schedule",
    ),
    Effect.VERSIONS: ("pull", "sync"),
    Effect.LOOKUPS: (
        *("parallel.trainers", "sync.name", "embedding.name", "embedding.staleness"),
        *("embedding.cache_rows", "embedding.cache_batches"),
    ),
    Effect.LEVELS: (
        *("parallel.trainers", "parallel.table_servers", "embedding.name", "embedding.levels"),
        *("embedding.row_error", "embedding.gradient_error", "embedding.copies_rows"),
    ),
    Effect.FLIGHTS: (
        *("parallel.trainers", "parallel.cuts", "schedule", "activation", "embedding.name"),
    ),
    Effect.NEW_RUN: (
        *("train.epochs", "train.steps", "train.patience", "train.min_delta", "train.monitor"),
        *("optimizer", "parallel", "sync", "schedule", "gradient", "activation", "pull"),
        *("embedding", "model.dropout", "model.bottom_dropout"),
    ),
}
NOT_OF_THEM: Mapping[Effect, tuple[str, ...]] = {
    Effect.EVALUATION: ("data.shuffle", "data.shuffle_block_rows", "data.shuffle_read_rows"),
    Effect.NEW_RUN: ("optimizer.name", "embedding.optimizer", "embedding.eps"),
}

STATE = Effect.NEW_RUN | Effect.COMPRESSORS | Effect.VERSIONS | Effect.LOOKUPS
STATE |= Effect.LEVELS | Effect.FLIGHTS

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
    if effect in STATE:  # what is free is not compared
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
        "train.epochs = 3: the checkpoint was made with 1",
        "train.seed = 2: the checkpoint was made with 1",
    ]


def test_a_new_run_may_be_longer_and_learn_at_another_rate() -> None:
    assert differences(SAVED, changed("train", epochs=3), new_run=True) == []
    assert differences(SAVED, changed("optimizer", lr=0.2), new_run=True) == []
    assert differences(SAVED, changed("optimizer", name="adagrad"), new_run=True) == [
        "optimizer.name = adagrad: the checkpoint was made with sgd"
    ]


def test_a_new_run_may_drop_decay_and_average_otherwise() -> None:
    one = {
        "model": {"dropout": 0.1, "bottom_dropout": None},
        "embedding": {"weight_decay": 0.0, "betas": [0.9, 0.999], "init": "uniform_rows"},
    }
    tables = one["embedding"]
    for other in (
        {**one, "model": {"dropout": 0.1, "bottom_dropout": 0.0}},
        {**one, "embedding": {**tables, "weight_decay": 0.1}},
        {**one, "embedding": {**tables, "betas": [0.8, 0.999]}},
        {**one, "embedding": {**tables, "init": 0.01}},
    ):
        assert differences(one, other, new_run=True) == []
        assert len(differences(one, other, new_run=False)) == 1


def test_a_new_run_may_be_spread_and_compressed_otherwise() -> None:
    one = {"parallel": {"trainers": 2, "cuts": [], "servers": 1}, "gradient": {"name": "dct"}}
    layout = one["parallel"]
    for other, same in (
        ({**one, "parallel": {**layout, "trainers": 1}}, False),
        ({**one, "parallel": {**layout, "cuts": ["top.1"]}}, False),
        ({**one, "parallel": {**layout, "servers": 3}}, True),
        ({**one, "gradient": {"name": "none"}}, False),
    ):
        assert differences(one, other, new_run=True) == []
        assert len(differences(one, other, new_run=False)) == 1
        assert same_compressors(one, other) == same


@pytest.mark.parametrize("sync", ["sync", "async"])
def test_in_lock_step_membership_says_whether_anything_is_ahead(sync: str) -> None:
    """Trainers that may be lost rest before a checkpoint, as those of `async` always do."""
    one = {"sync": {"name": sync}, "parallel": {"elastic": False, "trainers": 2}}
    one["embedding"] = {"cache_rows": 9, "staleness": 2}
    other = {**one, "parallel": {"elastic": True, "trainers": 2}}
    assert differences(one, other, new_run=False) == []
    for same in (same_versions, same_lookups):
        assert same(one, one)
        assert same(one, other) == same(other, one) == (sync == "async")
    for values in (one, other):
        values["embedding"] = {"cache_rows": 9, "staleness": 0}
    assert same_lookups(one, other) and same_lookups(other, one), "what is kept fits"


def test_what_waited_as_updates_does_not_go_on_as_gradients() -> None:
    updates = {"gradient": {"name": "dct", "residual": "update"}}
    for name, residual in (("dct", "gradient"), ("cltk", None)):
        gradients = {"gradient": {"name": name, "residual": residual}}
        for saved, now in ((gradients, updates), (updates, gradients)):
            assert differences(saved, now, new_run=True) == [
                f"gradient.residual = {now['gradient']['residual']}: the checkpoint was made with "
                f"{saved['gradient']['residual']}"
            ]
    for name in ("none", "terngrad"):
        nothing = {"gradient": {"name": name, "residual": None}}
        assert differences(updates, nothing, new_run=True) == []
        assert differences(nothing, updates, new_run=True) == []


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
    stale = values_of(["parallel=hybrid", "schedule=dsp"])
    facts = {"config": stale, "progress": {"step": 5}}
    lines = other_flights(facts, with_value(stale, "parallel", single["parallel"]))
    assert any(line.startswith("parallel.trainers = 1: the checkpoint was made") for line in lines)


STALE = ("parallel=hybrid", "schedule=dsp")
LEVELS = ("parallel=hybrid", "embedding.deduplicate=true", "embedding.levels=true")
SERVED = ("parallel=hybrid", "embedding=served", "parallel.table_servers=2")


def test_only_a_run_with_the_same_stages_goes_on_with_batches_in_flight() -> None:
    values = values_of(list(STALE))
    facts = {"config": values, "progress": {"step": 9, "emptied": 4}}
    assert in_flight(facts) and not other_flights(facts, values)
    assert not in_flight({**facts, "progress": {"step": 9, "emptied": 9}})
    assert not in_flight({**facts, "config": values_of(["parallel=hybrid"])})
    zeros = values_of([*STALE, "schedule.delays=[0,0,0]", "schedule.staleness=[0,0,0]"])
    assert not in_flight({**facts, "config": zeros})
    for override in ("parallel.trainers=1", "schedule.delays=[0,1,0]", "activation=dct"):
        key = override.partition("=")[0]
        lines = other_flights(facts, values_of([*STALE, override]))
        assert [line for line in lines if line.startswith(key)], override
    assert not other_flights(facts, values_of([*STALE, "parallel.servers=3", "optimizer.lr=0.3"]))


def test_where_rows_lie_decides_no_weight() -> None:
    in_memory = values_of(list(SERVED))
    in_files = values_of([*SERVED, "embedding.storage=mmap", "embedding.folder=rows"])
    assert config_hash(in_memory) == config_hash(in_files)
    assert not differences(in_memory, in_files, new_run=False)
    scored, faults = evaluated(in_files, in_memory, ["embedding.storage", "embedding.folder"])
    assert not faults
    assert scored == in_memory


def test_only_a_new_run_may_send_otherwise_and_then_remembers_nothing() -> None:
    values = values_of(list(LEVELS))
    for change in ("embedding.levels=false", "embedding.row_error=0.1", "embedding.copies_rows=9"):
        other = values_of([*LEVELS, change])
        assert differences(values, other, new_run=False)
        assert not differences(values, other, new_run=True)
        assert not same_levels(values, other)
    assert same_levels(values, values_of([*LEVELS, "optimizer.lr=0.01"]))


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
