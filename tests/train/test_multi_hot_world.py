"""Whole runs on bags of several ids: worlds are equal, and runs go on as if nothing had been."""

import multi_hot_ranks
import pytest
from world_runs import (
    Train,
    assert_compiled_ahead,
    assert_moved,
    assert_same,
    assert_same_state,
    checkpoint,
    summary,
)

from dlrm_hybrid.run import training

WORLD = (
    *("parallel=hybrid", "parallel.cuts=[bottom.2]", "parallel.trainers=2"),
    *("network.patience_seconds=30", "train.batch_size=16", "train.steps=60", "train.epochs=3"),
    *("checkpoint.every=30", "checkpoint.keep=9", "train.evaluate_every=30"),
)
SERVED = ("embedding=served", "parallel.table_servers=2", "parallel.servers=1")
IN_PROCESS = "parallel.world=in_process"
CACHED = ("embedding.cache_rows=300", "embedding.cache_batches=5")
WORLDS = [
    pytest.param((), marks=pytest.mark.slow, id="holders pool"),
    pytest.param(
        ("embedding.deduplicate=true", "schedule=gpipe", "schedule.microbatches=4"), id="distinct"
    ),
    pytest.param((*SERVED, "embedding.staleness=2", *CACHED), id="served and cached"),
    pytest.param((*SERVED, "schedule=dsp", "gradient=dct"), marks=pytest.mark.slow, id="dsp"),
]


@pytest.fixture(autouse=True)
def multi_hot(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(training, "TRAIN_RANK", multi_hot_ranks.ENTRY)


@pytest.mark.parametrize("options", WORLDS)
def test_processes_equal_the_in_process_world(options: tuple[str, ...], train: Train) -> None:
    code, processes = train("processes", *WORLD, *options)
    assert code == 0
    code, in_process = train("in-process", *WORLD, *options, IN_PROCESS)
    assert code == 0
    assert_compiled_ahead(processes)
    assert_same(processes, in_process, 60)
    assert_moved(processes, 30, 60)
    assert summary(processes)["test"] == summary(in_process)["test"]
    assert summary(processes)["train"]["loss"] == summary(in_process)["train"]["loss"]


@pytest.mark.parametrize("options", WORLDS)
def test_a_resumed_run_equals_an_unbroken_one(options: tuple[str, ...], train: Train) -> None:
    code, unbroken = train("unbroken", *WORLD, *options, IN_PROCESS)
    assert code == 0
    resume = f"checkpoint.resume={checkpoint(unbroken, 30)}"
    code, resumed = train("resumed", *WORLD, *options, IN_PROCESS, resume)
    assert code == 0
    assert_same_state(resumed, unbroken, 60)
    assert_moved(unbroken, 30, 60)
    assert summary(resumed)["test"] == summary(unbroken)["test"]


def test_distinct_ids_send_less_and_count_as_much(
    train: Train, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent = {}
    for name, options in (("all", ()), ("distinct", ("embedding.deduplicate=true",))):
        code, folder = train(name, *WORLD, *options, "train.steps=20", "train.evaluate_every=0")
        assert code == 0
        sent[name] = summary(folder)["network"]["by_class"]["embedding"]
    assert sent["distinct"]["bytes"] < sent["all"]["bytes"]
    assert sent["distinct"]["dense_equivalent_bytes"] == sent["all"]["dense_equivalent_bytes"]
    monkeypatch.undo()
    code, folder = train("one id", *WORLD, "train.steps=20", "train.evaluate_every=0")
    assert code == 0
    # Bags are as many: other ids and lengths travel.
    one = summary(folder)["network"]["by_class"]["embedding"]
    assert one["dense_equivalent_bytes"] < sent["all"]["dense_equivalent_bytes"]
