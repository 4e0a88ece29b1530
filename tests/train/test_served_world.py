"""Worlds with table servers: processes equal objects, and runs go on as if nothing had been."""

import json
import os
import signal
from pathlib import Path

import numpy as np
import pytest
from patience import PATIENT
from test_process_world import Watcher
from world_runs import (
    Train,
    assert_compiled_ahead,
    assert_moved,
    assert_same,
    assert_same_state,
    checkpoint,
    curve,
    summary,
    tensors,
)

from dlrm_hybrid.checkpoint.reader import open_checkpoint
from dlrm_hybrid.cli.main import run
from dlrm_hybrid.config.compose import values_of
from dlrm_hybrid.config.validate import validate
from dlrm_hybrid.run.rank.facts import lookups_ahead
from dlrm_hybrid.telemetry import events
from dlrm_hybrid.telemetry.events import Kind
from dlrm_hybrid.types import DataError

SERVED = (
    *("parallel=hybrid", "embedding=served", PATIENT),
    *("parallel.cuts=[bottom.2]", "train.batch_size=16", "train.epochs=3", "checkpoint.every=50"),
    "checkpoint.keep=9",
)
IN_PROCESS = "parallel.world=in_process"
CACHED = ("embedding.cache_rows=300", "embedding.cache_batches=5")


def layout(trainers: int, servers: int, staleness: int) -> tuple[str, ...]:
    return (
        *(f"parallel.trainers={trainers}", f"parallel.servers={int(trainers > 1)}"),
        *(f"parallel.table_servers={servers}", f"embedding.staleness={staleness}"),
    )


def test_one_trainer_learns_the_bits_of_fused_tables(train: Train) -> None:
    options = (*SERVED, IN_PROCESS, "train.steps=200")
    code, served = train("served", *options, *layout(1, 2, 0))
    assert code == 0
    fused = ("embedding=fused", "parallel.trainers=1", "parallel.servers=0")
    code, local = train("fused", *options, *fused)
    assert code == 0
    assert_same(served, local, 200)
    assert_moved(served, 50, 200)
    assert summary(served)["test"] == summary(local)["test"]


def test_a_server_may_own_nothing_of_a_batch(train: Train) -> None:
    """Two rows of a batch do not fall on all of sixteen servers, nor does the last test batch."""
    options = (*SERVED, IN_PROCESS, "train.batch_size=2", "train.steps=100")
    options = (*options, "evaluate.batch_size=37")
    code, one = train("one", *options, *layout(1, 1, 0))
    assert code == 0
    code, many = train("many", *options, *layout(1, 16, 0))
    assert code == 0
    assert_same(one, many, 100)
    assert_moved(many, 50, 100)
    assert summary(one)["test"] == summary(many)["test"]


@pytest.mark.parametrize(
    "optimizer", ["sgd", "rowwise_adagrad", pytest.param("adagrad", marks=pytest.mark.slow)]
)
def test_trainers_learn_what_they_learn_from_shared_tables(optimizer: str, train: Train) -> None:
    # With a small eps Adagrad makes large steps of the rounding of tiny gradients.
    options = (f"embedding.optimizer={optimizer}", "embedding.eps=0.001", "train.steps=100")
    options = (*SERVED, IN_PROCESS, *options)
    code, served = train("served", *options, *layout(2, 2, 0))
    assert code == 0
    shared = ("embedding=fused", "embedding.deduplicate=true", "parallel.trainers=2")
    code, fused = train("fused", *options, *shared)
    assert code == 0
    first, second = tensors(served, 100), tensors(fused, 100)
    assert first.keys() == second.keys()
    for name, tensor in first.items():
        assert np.allclose(tensor, second[name], atol=1e-5), name
    assert_moved(served, 50, 100)


@pytest.mark.parametrize(
    ("trainers", "servers", "staleness", "options"),
    [
        pytest.param(2, 1, 0, (), marks=pytest.mark.slow),
        (2, 2, 4, ("embedding.optimizer=rowwise_adagrad", "embedding.comm_precision=bfloat16")),
        (2, 2, 4, ("embedding.storage=mmap",)),
        (2, 2, 2, (*CACHED, "embedding.comm_precision=bfloat16")),
        pytest.param(1, 1, 0, CACHED, marks=pytest.mark.slow),
        pytest.param(3, 2, 16, ("embedding.optimizer=adagrad",), marks=pytest.mark.slow),
    ],
)
def test_processes_equal_the_in_process_world_bit_for_bit(
    trainers: int, servers: int, staleness: int, options: tuple[str, ...], train: Train
) -> None:
    world = (*SERVED, *layout(trainers, servers, staleness), *options)
    world = (*world, "train.steps=100", "train.evaluate_every=60")
    code, processes = train("processes", *world)
    assert code == 0
    assert_compiled_ahead(processes)
    code, in_process = train("in-process", *world, IN_PROCESS)
    assert code == 0
    assert_same_state(processes, in_process, 50)
    assert_same_state(processes, in_process, 100)
    assert_moved(processes, 50, 100)
    one, other = summary(processes), summary(in_process)
    assert one["test"] == other["test"]
    # The same frames; a few of those around the end of the warm-up fall on its other side.
    sent = [told["network"]["by_class"]["embedding"] for told in (one, other)]
    assert sent[0] == pytest.approx(sent[1], rel=0.02)
    assert 0 < sent[0]["bytes"] < sent[0]["dense_equivalent_bytes"]


@pytest.mark.parametrize("world", ["in_process", pytest.param("processes", marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    ("staleness", "cache"),
    [
        (0, ()),
        (4, CACHED),
        pytest.param(4, (), marks=pytest.mark.slow),
        pytest.param(0, CACHED, marks=pytest.mark.slow),
    ],
)
def test_a_run_that_resumes_ends_with_the_same_bits(
    staleness: int, cache: tuple[str, ...], world: str, train: Train
) -> None:
    options = (*SERVED, f"parallel.world={world}", *layout(2, 2, staleness), *cache)
    code, unbroken = train("unbroken", *options, "train.steps=100")
    assert code == 0
    source = f"checkpoint.resume={checkpoint(unbroken, 50)}"
    code, resumed = train("resumed", *options, "train.steps=100", source)
    assert code == 0
    assert_same_state(resumed, unbroken, 100)
    assert_moved(unbroken, 50, 100)


def test_rows_looked_up_ahead_are_in_every_checkpoint_but_that_of_step_0(
    train: Train, capsys: pytest.CaptureFixture[str]
) -> None:
    """A run that is stopped before its first step has looked up nothing yet."""
    options = (*SERVED, IN_PROCESS)
    code, folder = train("none-ahead", *options, *layout(2, 2, 0), "train.steps=50")
    assert code == 0
    saved = open_checkpoint(checkpoint(folder, 50))
    values = values_of([*options, *layout(2, 2, 4)])
    known = (validate(values), values, (0, 1))
    assert lookups_ahead(saved, {"step": 0, "config": values}, *known, 26) == {}
    with pytest.raises(DataError, match=r"no tensor lookups\.0\.0 in this checkpoint"):
        lookups_ahead(saved, {"step": 50, "config": values}, *known, 26)
    cached = values_of([*options, *layout(2, 2, 0), *CACHED])
    with pytest.raises(DataError, match="no rows that trainer 0 has kept"):
        lookups_ahead(saved, {"step": 50, "config": cached}, validate(cached), cached, (0, 1), 26)
    fused = (*options, "parallel.trainers=2", "parallel.servers=1", "embedding=fused")
    for now in (
        values,
        values_of([*options, *layout(2, 2, 0), "sync=async"]),
        values_of([*fused, "parallel.table_servers=0"]),
    ):
        facts = {"step": 50, "config": cached}
        assert lookups_ahead(saved, facts, validate(now), now, (0, 1), 26) == {}
        told = capsys.readouterr().out
        assert "caches begin empty, and the gradients they held are lost" in told


def test_a_checkpoint_goes_on_with_other_owners(train: Train) -> None:
    """Rows of two owners are those of three, and of tables in the trainers; scores stay."""
    options = (*SERVED, IN_PROCESS)
    code, served = train("served", *options, *layout(2, 2, 0), "train.steps=50")
    assert code == 0
    source = f"checkpoint.resume={checkpoint(served, 50)}"
    folders = []
    for name, owners in (
        ("two", layout(2, 2, 0)),
        ("three", layout(2, 3, 0)),
        ("fused", ("embedding=fused", "parallel.trainers=2", "embedding.deduplicate=true")),
    ):
        code, folder = train(name, *options, *owners, source, "train.steps=60")
        assert code == 0
        folders.append(folder)
    assert_same(folders[0], folders[1], 60)
    assert any(
        (one != tensors(served, 50)[name]).any() for name, one in tensors(folders[0], 60).items()
    )
    two, fused = tensors(folders[0], 60), tensors(folders[2], 60)
    assert max(np.abs(two[name] - fused[name]).max() for name in two) < 1e-5
    again = ("fused-first", "embedding=fused", "parallel.trainers=1", "parallel.servers=0")
    code, fused_first = train(again[0], *options, *again[1:], "train.steps=50")
    assert code == 0
    source = f"checkpoint.resume={checkpoint(fused_first, 50)}"
    code, folder = train("served-then", *options, *layout(1, 3, 0), source, "train.steps=60")
    assert code == 0
    code, whole = train("fused-whole", *options, *again[1:], source, "train.steps=60")
    assert code == 0
    assert_same(folder, whole, 60)


def test_a_checkpoint_is_scored_as_the_run_scored_it(train: Train, small_rows: list[str]) -> None:
    code, folder = train("served", *SERVED, IN_PROCESS, *layout(2, 2, 1), "train.steps=50")
    assert code == 0
    output = folder.parent / "scores.json"
    argv = ["dlrm_hybrid", "evaluate", f"evaluate.checkpoint={folder}", f"evaluate.output={output}"]
    assert run(argv) == 0
    assert json.loads(output.read_text())["log_loss"] == summary(folder)["test"]["loss"]


@pytest.mark.slow
def test_a_killed_table_server_restarts_the_run(train: Train, tmp_path: Path) -> None:
    options = (*SERVED, *layout(2, 2, 4), "train.steps=400", "telemetry.every=120")
    watcher = Watcher(tmp_path / "run", 7, lambda ranks: os.kill(ranks["tables-1"], signal.SIGKILL))
    watcher.start()
    code, folder = train("run", *options)
    watcher.join()
    assert watcher.acted, "the fault did not strike"
    assert (code, summary(folder)["status"]) == (0, "complete")
    record = events.read(folder / "events.jsonl")
    started = [event.step for event in record if event.kind is Kind.STARTED]
    assert len(started) == 2 and started[1] >= 50  # from a checkpoint
    code, unbroken = train("unbroken", *options, IN_PROCESS)
    assert code == 0
    assert_same_state(folder, unbroken, 400)
    assert_moved(folder, 50, 400)
    assert [one[0] for one in curve(folder)] == [one[0] for one in curve(unbroken)]
