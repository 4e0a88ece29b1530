"""Worlds whose ranks are processes, held against those of one process."""

import multiprocessing
import os
import re
import shutil
import signal
import stat
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from threading import Event, Thread
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from torch import Tensor
from world_rows import (
    BATCH,
    assert_same_tensors,
    global_batches,
    loader,
    small_spec,
    test_batches,
)

from dlrm_hybrid.data.shards import Shards
from dlrm_hybrid.types import ConfigError, DataError, DlrmError, RunFailedError
from dlrm_hybrid.world.batches import KEYS
from dlrm_hybrid.world.ranks import WorldRanks
from dlrm_hybrid.world.world import World

STAGES: dict[str, Any] = {"cuts": ["bottom.2"]}


def world_of(kind: str, shards: Shards, load: Any = None, **options: Any) -> World:
    make = World.processes if kind == "processes" else World.in_process
    given = {"trainers": 2, "cuts": [], "servers": 1, "batch_size": BATCH, **options}
    named = None if load is None else partial(load, str(shards.folder))
    return make(small_spec(shards), named, **given)


def ranks() -> list[psutil.Process]:
    """Processes that this one has started, but those that multiprocessing keeps."""
    found = psutil.Process().children(recursive=True)
    return [one for one in found if one.is_running() and _is_rank(one)]


def log_of(rank: psutil.Process) -> Path:
    return Path(f"/proc/{rank.pid}/fd/2").readlink()


def _is_rank(one: psutil.Process) -> bool:
    try:
        parent = one.parent()
        return parent is not None and parent.pid != psutil.Process().pid
    except psutil.NoSuchProcess:
        return False


def test_several_machines_are_refused(shards: Shards) -> None:
    with pytest.raises(ConfigError, match=r"parallel.machines = 2: .* on this machine alone"):
        world_of("processes", shards, config={"parallel.machines": 2})


def test_processes_are_objects_of_one_process(shards: Shards, tmp_path: Path) -> None:
    batches = global_batches(shards, 12)
    keys = {
        **{"gradient": "dct", "gradient.density": 0.1},
        **{"embedding": "served", "parallel.table_servers": 1},
    }
    load = partial(loader, str(shards.folder), 6)
    found: dict[str, Any] = {}
    for kind in ("in_process", "processes"):
        make = World.processes if kind == "processes" else World.in_process
        with make(
            small_spec(shards), load, trainers=2, cuts=["bottom.2"], batch_size=BATCH, config=keys
        ) as world:
            before = world.state_dict()
            steps = [*world.epoch(), *(world.step(batch) for batch in batches[6:8])]
            weighted = dict(zip(KEYS, batches[8], strict=True)) | {
                "weight": np.arange(2 * BATCH) % 3
            }
            steps += [world.step(), world.step(weighted), world.step()]
            scores = world.evaluate(test_batches(shards, 300))
            saved = world.save(tmp_path / kind)
            rest = [world.step(batch) for batch in batches[9:]]
            after = world.state_dict()
            assert_moved(before, after)
            sent = {
                traffic: count
                for traffic, count in (*world.bytes.items(), *_dense(world))
                if "control" not in traffic  # of these processes have others
            }
            world.load(saved)
            assert [world.step(batch) for batch in batches[9:]] == rest
            assert_same_tensors(world.state_dict(), after)
            found[kind] = (steps, scores, rest, sent), after
    assert found["in_process"][0] == found["processes"][0]
    assert_same_tensors(found["in_process"][1], found["processes"][1])
    assert ranks() == []


def _dense(world: World) -> list[tuple[str, int]]:
    return [(f"{traffic} dense", count) for traffic, count in world.dense_bytes.items()]


def assert_moved(before: dict[str, Tensor], after: dict[str, Tensor]) -> None:
    for name in ("bottom.1.weight", "top.1.weight", "embedding.3.weight"):
        assert (after[name] - before[name]).abs().max() > 1e-4, name


@pytest.mark.parametrize("kind", ["in_process", "processes"])
def test_a_batch_without_rows_is_nothing_to_score(kind: str, shards: Shards) -> None:
    one, other = global_batches(shards, 2)
    nothing = tuple(array[:0] for array in one)
    with world_of(kind, shards) as world:
        assert world.predict([nothing]).shape == (0,)
        expected = world.predict([one, other])
        assert world.predict([nothing, one, nothing, other, nothing]).tolist() == expected.tolist()
        assert world.evaluate([one, nothing]) == world.evaluate([one])
        with pytest.raises(DataError, match="no batch with a row to score"):
            world.evaluate([nothing])
        assert world.step(one).step == 1


def test_predictions_need_no_labels(shards: Shards) -> None:
    dense, ids, label = global_batches(shards, 1)[0]
    with world_of("in_process", shards) as world:
        expected = world.predict([(dense, ids, label)]).tolist()
        for batch in (
            (dense, ids),
            [torch.from_numpy(dense), torch.from_numpy(ids)],
            (dense, ids, None),
            {"dense": dense, "ids": ids},
        ):
            assert world.predict([batch]).tolist() == expected
            with pytest.raises(DataError, match="evaluation, batch 0"):
                world.evaluate([batch])
        for wrong in ((dense,), (dense[:3], ids), (dense, ids, label + 1), {"dense": dense}, 5):
            with pytest.raises(DataError, match="evaluation, batch 0"):
                world.predict([wrong])


def test_orders_go_through_a_folder_for_this_user_alone(shards: Shards) -> None:
    with world_of("processes", shards) as world:
        folder = world._session.folder
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
        assert [path for path in folder.rglob("*") if path.is_socket()]
    assert not folder.exists()


def test_a_killed_rank_ends_the_world_and_is_named_and_its_log_stays(shards: Shards) -> None:
    batch = global_batches(shards, 1)[0]
    for act in (lambda world: [world.step(batch) for _ in range(50)], World.state_dict):
        with world_of("processes", shards) as world:
            world.step(batch)
            killed = ranks()[0]
            name = log_of(killed).stem
            killed.kill()
            with pytest.raises(RunFailedError, match=f"{name} .*was killed by SIGKILL") as caught:
                act(world)
            with pytest.raises(DlrmError, match="cannot go on"):
                world.step(batch)
            assert "over: it was cut off by RunFailedError" in repr(world)
            assert ranks() == []
            assert_log_stays(caught.value, world)


@pytest.mark.slow
def test_a_stopped_rank_that_reads_no_order_ends_the_world_and_is_named(shards: Shards) -> None:
    """No peer waits for a message of it; the order, longer than a socket holds, is its own."""
    with world_of("processes", shards, config={"network.patience_seconds": 5}, **STAGES) as world:
        world.step(global_batches(shards, 1)[0])
        stopped = next(one for one in ranks() if log_of(one).stem == "worker-0.0")
        stopped.suspend()
        with pytest.raises(RunFailedError, match=r"worker-0\.0 .* has been stopped, by SIGSTOP"):
            world.evaluate(test_batches(shards, 2048))
        assert ranks() == []


def assert_log_stays(error: RunFailedError, world: World) -> None:
    """What a message names can be read when the world is closed."""
    world.close()
    found = re.search(r"see (\S+\.log)", str(error))
    assert found is not None, error
    log = Path(found[1])
    assert log.exists()
    shutil.rmtree(log.parent.parent)


def test_the_log_of_ranks_that_load_stays(shards: Shards, tmp_path: Path, monkeypatch: Any) -> None:
    world = world_of("processes", shards)
    saved, meet = world.save(tmp_path), WorldRanks._meet

    def meet_without_a_rank(self: WorldRanks, workers: int) -> int:
        while not self._forwarder.running:
            time.sleep(0.01)
        self._forwarder.running[0].send(signal.SIGKILL)
        return meet(self, workers)

    with monkeypatch.context() as patch, pytest.raises(RunFailedError, match="SIGKILL") as caught:
        patch.setattr(WorldRanks, "_meet", meet_without_a_rank)
        world.load(saved)
    assert world.step(global_batches(shards, 1)[0]).step == 1
    assert_log_stays(caught.value, world)
    assert ranks() == []


def test_what_cannot_be_loaded_leaves_the_world_as_it_was(shards: Shards, tmp_path: Path) -> None:
    batch = global_batches(shards, 1)[0]
    with world_of("processes", shards) as world:
        world.step(batch)
        saved = world.save(tmp_path)
        other = replace(small_spec(shards), table_rows=(5, *shards.table_rows[1:]))
        with (
            World.in_process(other, cuts=[], batch_size=BATCH) as small,
            pytest.raises(DataError, match=r"embedding.1 has [0-9,]+ rows, the model's 5"),
        ):
            small.load(saved)
        damaged = next(saved.glob("dense.*"))
        damaged.write_bytes(damaged.read_bytes()[:-1])
        with pytest.raises(RunFailedError, match="the manifest says"):
            world.load(saved)
        assert world.step(batch).step == 2
        assert repr(world).endswith("2 trainers, 1 stage, 1 server; step 2>")
    assert not world._session.folder.exists()
    assert ranks() == []


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_loader_may_have_processes_and_not_use_its_world(shards: Shards) -> None:
    worlds: list[World] = []
    helper = multiprocessing.get_context("fork").Process(target=signal.pause, daemon=True)

    def load(trainer: int, trainers: int) -> Iterator[tuple]:
        yield from loader(str(shards.folder), 1, trainer, trainers)
        if trainer:
            helper.start()  # as a DataLoader does, with all that the program has open
            worlds[0].predict([])

    with World.processes(small_spec(shards), load, cuts=[], batch_size=BATCH) as world:
        worlds.append(world)
        world.step()
        with pytest.raises(DataError, match="trainer 1, epoch 1, batch 1.*in the middle of a step"):
            world.step()
        assert world.predict([]).shape == (0,)
    try:
        assert helper.is_alive()  # nothing has waited for it
    finally:
        helper.kill()
    assert ranks() == []


def test_a_world_goes_on_after_ctrl_c(shards: Shards) -> None:
    batch, is_going_on = global_batches(shards, 1)[0], Event()

    def press() -> None:
        is_going_on.wait()
        os.kill(os.getpid(), signal.SIGINT)  # which step is cut off does not matter

    presser = Thread(target=press)
    with world_of("processes", shards) as world:
        presser.start()
        with pytest.raises(KeyboardInterrupt):
            while True:
                if world.step(batch).step == 3:
                    is_going_on.set()
        presser.join()
        before = world.steps
        assert before >= 3
        assert world.step(batch).step == before + 1
        assert world.evaluate([batch]).rows == 2 * BATCH
    assert ranks() == []


def test_threads_that_share_a_world_take_turns(shards: Shards) -> None:
    batch = global_batches(shards, 1)[0]
    with world_of("processes", shards) as world, world_of("in_process", shards) as other:
        expected = [other.step(batch) for _ in range(12)]
        with ThreadPoolExecutor(3) as threads:
            done = [threads.submit(world.step, batch) for _ in range(12)]
            found = [one.result() for one in done]
        assert sorted(found, key=lambda one: one.step) == expected
