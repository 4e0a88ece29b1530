"""Optimizers of tables that FBGEMM does not have, in worlds of processes and in one process."""

import pytest
from world_runs import Train, assert_moved, assert_same

WORLD = (
    *("parallel=hybrid", "parallel.cuts=[]", "network.patience_seconds=30"),
    *("parallel.trainers=2", "parallel.servers=1"),
)
SERVED = ("embedding=served", "parallel.table_servers=2")
DECAY = "embedding.weight_decay=0.001"


@pytest.mark.parametrize(
    "options",
    [
        ("embedding.optimizer=adam", DECAY),
        ("embedding.optimizer=rowwise_adam", "embedding.deduplicate=true"),
        pytest.param(
            (*SERVED, "embedding.optimizer=rowwise_adam", "embedding.storage=mmap"),
            marks=pytest.mark.slow,
        ),
        (
            *(*SERVED, "embedding.optimizer=adam", DECAY, "embedding.staleness=2"),
            *("embedding.cache_rows=300", "embedding.cache_batches=4"),
        ),
    ],
)
def test_processes_equal_the_in_process_world(options: tuple[str, ...], train: Train) -> None:
    world = (*WORLD, *options, "train.steps=20", "checkpoint.every=10")
    code, processes = train("processes", *world)
    assert code == 0
    code, in_process = train("in-process", *world, "parallel.world=in_process")
    assert code == 0
    assert_same(processes, in_process, 20)
    assert_moved(processes, 10, 20)
