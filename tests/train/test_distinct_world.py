"""Worlds where every distinct id of a batch is asked for once: embedding.deduplicate."""

import pytest
from patience import PATIENT
from world_runs import Train, assert_moved, assert_same, largest_difference, summary, tensors

WORLD = ("parallel=hybrid", "parallel.cuts=[]", PATIENT)
DISTINCT = "embedding.deduplicate=true"
IN_PROCESS = "parallel.world=in_process"


@pytest.mark.parametrize(
    ("trainers", "options"),
    [
        (2, ("embedding.comm_precision=bfloat16", "embedding.optimizer=adagrad")),
        *(
            pytest.param(*world, marks=pytest.mark.slow)
            for world in [
                (2, ("embedding.optimizer=rowwise_adagrad", "parallel.cuts=[bottom.2,top.2]")),
                (3, ("sync=bounded", "sync.staleness=2", "schedule.microbatches=4")),
                (3, ("embedding.comm_precision=float16", "embedding.optimizer=rowwise_adagrad")),
            ]
        ),
    ],
)
def test_processes_with_distinct_ids_equal_the_in_process_world(
    trainers: int, options: tuple[str, ...], train: Train
) -> None:
    layout = (
        *(*WORLD, DISTINCT, f"parallel.trainers={trainers}", "train.batch_size=16"),
        *("train.epochs=3", "train.steps=100", "train.evaluate_every=45", "checkpoint.every=50"),
        *("checkpoint.keep=9", *options),
    )
    code, processes = train("processes", *layout)
    assert code == 0
    code, in_process = train("in-process", *layout, IN_PROCESS)
    assert code == 0
    assert_same(processes, in_process, 100)
    assert_moved(processes, 50, 100)
    assert summary(processes)["test"] == summary(in_process)["test"]


@pytest.mark.parametrize("trainers", [2, 3])
def test_in_float32_only_the_order_of_sums_differs(trainers: int, train: Train) -> None:
    layout = (*WORLD, IN_PROCESS, f"parallel.trainers={trainers}", "train.steps=20")
    runs = {}
    for deduplicate in ("false", "true"):
        options = ("checkpoint.every=10", f"embedding.deduplicate={deduplicate}")
        code, runs[deduplicate] = train(deduplicate, *layout, *options)
        assert code == 0
        assert_moved(runs[deduplicate], 10, 20)
    one, other = (tensors(folder, 20) for folder in runs.values())
    for prefix in ("bottom", "top", "embedding"):
        assert largest_difference(one, other, prefix) <= 1e-6, prefix
    assert largest_difference(one, other, "embedding") > 0


def test_one_trainer_sends_nothing_whatever_the_options(train: Train) -> None:
    layout = (*WORLD, "parallel.trainers=1", "train.steps=20")
    assert train("plain", *layout, IN_PROCESS)[0] == 0
    narrow = ("embedding.comm_precision=bfloat16", DISTINCT)
    for name, world in (("in-process", (IN_PROCESS,)), ("processes", ())):
        code, folder = train(name, *layout, *narrow, *world)
        assert code == 0
        assert_same(folder, folder.with_name("plain"), 20)
        by_class = summary(folder)["network"]["by_class"]
        assert by_class.get("embedding", {"bytes": 0})["bytes"] == 0


def test_distinct_ids_send_less_and_count_as_much(train: Train) -> None:
    layout = (*WORLD, "train.steps=30")
    sent = {}
    for deduplicate in ("false", "true"):
        code, folder = train(deduplicate, *layout, f"embedding.deduplicate={deduplicate}")
        assert code == 0
        sent[deduplicate] = summary(folder)["network"]["by_class"]["embedding"]
    assert sent["true"]["bytes"] < 0.7 * sent["false"]["bytes"]
    assert sent["true"]["dense_equivalent_bytes"] == sent["false"]["dense_equivalent_bytes"]
