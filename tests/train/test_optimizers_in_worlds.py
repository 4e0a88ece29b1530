"""Optimizers of layers and of tables: what worlds keep of their state, and where rows begin."""

import pytest
from world_runs import Train, Trained, assert_same, tensors

WORLD = (
    *("parallel=hybrid", "parallel.cuts=[]"),
    *("parallel.trainers=2", "parallel.servers=1"),
)
IN_PROCESS = "parallel.world=in_process"
SERVED = ("embedding=served", "parallel.table_servers=2")
ADAM = ("optimizer=adam", "optimizer.lr=0.01", "embedding.lr=0.1")
CUTS = "parallel.cuts=[bottom.2,top.2]"
CACHED = ("embedding.cache_rows=300", "embedding.cache_batches=4")


LAYOUTS = {
    "shared": (IN_PROCESS,),
    "served": (IN_PROCESS, *SERVED),
    "cached": (IN_PROCESS, *SERVED, "embedding.staleness=2", *CACHED),
    "in files": (IN_PROCESS, *SERVED, "embedding.storage=mmap"),
    "by rows": ("embedding.sharding=row_wise",),
    "by columns": ("embedding.sharding=column_wise",),
}


@pytest.mark.parametrize(
    "init",
    [
        "uniform_rows",
        *(pytest.param(one, marks=pytest.mark.slow) for one in ("uniform_width", "0.01")),
    ],
)
def test_tables_begin_with_the_same_bits_in_every_layout(
    init: str, train: Train, trained: Trained
) -> None:
    shape = ("model.embedding_dim=8", "model.bottom=[null,16,8]")
    given = (f"embedding.init={init}", "train.steps=1", "optimizer.lr=1e-30", *shape)
    alone = trained("alone", *given)
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


def test_moments_move_with_the_weights_to_other_servers_and_to_none(trained: Trained) -> None:
    world = (*WORLD, IN_PROCESS, *ADAM)
    trained("unbroken", *world, CUTS, "parallel.servers=3", "train.steps=14")
    first = trained("first", *world, CUTS, "parallel.servers=3", "train.steps=6")
    other = ("parallel.servers=1", "parallel.cuts=[bottom.1]", f"checkpoint.resume={first}")
    second = trained("second", *world, *other, "train.steps=14")
    assert_same(second.with_name("unbroken"), second, 14)
    none = ("parallel.servers=0", "parallel.cuts=[top.1]", f"checkpoint.resume={first}")
    third = trained("third", *world, *none, "train.steps=10")
    again = (CUTS, "parallel.servers=2", f"checkpoint.resume={third}", "train.steps=14")
    assert_same(second, trained("fourth", *world, *again), 14)
