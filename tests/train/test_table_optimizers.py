"""Optimizers of tables that FBGEMM does not have, in worlds of processes and in one process."""

import numpy as np
import pytest
from patience import PATIENT
from world_runs import Train, assert_moved, assert_same, assert_same_state, checkpoint, tensors

WORLD = (
    *("parallel=hybrid", "parallel.cuts=[]", PATIENT),
    *("parallel.trainers=2", "parallel.servers=1"),
)
IN_PROCESS = "parallel.world=in_process"
SERVED = ("embedding=served", "parallel.table_servers=2")
DECAY = "embedding.weight_decay=0.001"
CACHED = ("embedding.cache_rows=300", "embedding.cache_batches=4")


@pytest.mark.parametrize(
    "options",
    [
        ("embedding.optimizer=adam", DECAY),
        ("embedding.optimizer=rowwise_adam", "embedding.deduplicate=true"),
        pytest.param(
            (*SERVED, "embedding.optimizer=rowwise_adam", "embedding.storage=mmap"),
            marks=pytest.mark.slow,
        ),
        (*SERVED, "embedding.optimizer=adam", DECAY, "embedding.staleness=2", *CACHED),
    ],
)
def test_processes_equal_the_in_process_world_and_a_broken_run_an_unbroken_one(
    options: tuple[str, ...], train: Train
) -> None:
    world = (*WORLD, *options, "train.steps=20", "checkpoint.every=10")
    code, processes = train("processes", *world)
    assert code == 0
    code, in_process = train("in-process", *world, IN_PROCESS)
    assert code == 0
    assert_same(processes, in_process, 20)
    assert_moved(processes, 10, 20)
    resume = f"checkpoint.resume={checkpoint(processes, 10)}"
    code, resumed = train("resumed", *world, IN_PROCESS, resume)
    assert code == 0
    assert_same_state(resumed, in_process, 20)
    counted = [value for name, value in tensors(resumed, 20).items() if name.endswith(".step")]
    assert len(counted) >= 26 and {int(one[0]) for one in counted[:26]} == {20}


LAYOUTS = {
    "shared": (IN_PROCESS,),
    "served": (IN_PROCESS, *SERVED),
    "cached": (IN_PROCESS, *SERVED, "embedding.staleness=2", *CACHED),
    "in files": (IN_PROCESS, *SERVED, "embedding.storage=mmap"),
    "by rows": ("embedding.sharding=row_wise",),
    "by columns": ("embedding.sharding=column_wise",),
}


@pytest.mark.parametrize("init", ["uniform_rows", "uniform_width", "0.01"])
def test_tables_begin_with_the_same_bits_in_every_layout(init: str, train: Train) -> None:
    shape = ("model.embedding_dim=8", "model.bottom=[null,16,8]")
    given = (f"embedding.init={init}", "train.steps=1", "optimizer.lr=1e-30", *shape)
    code, alone = train("alone", *given)
    assert code == 0
    wanted = {name: one for name, one in tensors(alone, 1).items() if name.startswith("embedding")}
    assert len(wanted) == 26
    for name, layout in LAYOUTS.items():
        if init != "0.01" and "sharding" in layout[0]:
            continue  # they copy from what `shared` draws, whatever the law
        code, folder = train(name.replace(" ", "-"), *given, *WORLD, *layout)
        assert code == 0, name
        found = tensors(folder, 1)
        for table, tensor in wanted.items():
            assert tensor.tobytes() == found[table].tobytes(), (name, table)


@pytest.mark.parametrize(
    "optimizer", ["adam", pytest.param("rowwise_adam", marks=pytest.mark.slow)]
)
def test_trainers_learn_what_they_learn_from_shared_tables(optimizer: str, train: Train) -> None:
    # With a small eps Adam makes large steps of the rounding of tiny gradients.
    options = (f"embedding.optimizer={optimizer}", "embedding.eps=0.001", "embedding.lr=0.05")
    options = (*WORLD, IN_PROCESS, *options, "train.steps=20", "checkpoint.every=10")
    code, served = train("served", *options, *SERVED)
    assert code == 0
    code, shared = train("shared", *options, "embedding.deduplicate=true")
    assert code == 0
    first, second = tensors(served, 20), tensors(shared, 20)
    assert first.keys() == second.keys()
    for name, tensor in first.items():
        assert np.allclose(tensor, second[name], atol=1e-5), name
    assert_moved(served, 10, 20)


@pytest.mark.parametrize(
    "options",
    [
        ("embedding.optimizer=adam", *CACHED),
        pytest.param(
            ("embedding.optimizer=rowwise_adam", "optimizer=adam"), marks=pytest.mark.slow
        ),
    ],
)
def test_trainers_that_wait_for_nobody_resume_with_the_same_bits(
    options: tuple[str, ...], train: Train
) -> None:
    world = (*WORLD, IN_PROCESS, *SERVED, "sync=async", *options)
    world = (*world, "train.steps=20", "checkpoint.every=10")
    code, unbroken = train("unbroken", *world)
    assert code == 0
    code, resumed = train("resumed", *world, f"checkpoint.resume={checkpoint(unbroken, 10)}")
    assert code == 0
    assert_same_state(resumed, unbroken, 20)
    assert_moved(unbroken, 10, 20)
    steps = tensors(unbroken, 20)["embedding.3.step"]
    assert steps.tolist() == [40]  # each push of each trainer is an update of its own
