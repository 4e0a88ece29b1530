"""Worlds with table servers: other owners, and what a checkpoint holds of lookups ahead."""

import numpy as np
from world_runs import Trained, assert_moved, assert_same, checkpoint, summary, tensors

from dlrm_hybrid.model.spec import ModelSpec

SERVED = (
    *("parallel=hybrid", "embedding=served"),
    *("parallel.cuts=[bottom.2]", "train.batch_size=16", "train.epochs=3", "checkpoint.every=50"),
    "checkpoint.keep=9",
)
IN_PROCESS = "parallel.world=in_process"
SPEC = ModelSpec(embedding_dim=16, bottom=(13, 16), top=(1,), table_rows=(30,) * 26)
CACHED = ("embedding.cache_rows=300", "embedding.cache_batches=5")


def layout(trainers: int, servers: int, staleness: int) -> tuple[str, ...]:
    return (
        *(f"parallel.trainers={trainers}", f"parallel.servers={int(trainers > 1)}"),
        *(f"parallel.table_servers={servers}", f"embedding.staleness={staleness}"),
    )


def test_a_server_may_own_nothing_of_a_batch(trained: Trained) -> None:
    """Two rows of a batch do not fall on all of sixteen servers, nor does the last test batch."""
    options = (*SERVED, IN_PROCESS, "train.batch_size=2", "train.steps=20", "checkpoint.every=10")
    options = (*options, "evaluate.batch_size=37", "optimizer.lr=0.5")
    one = trained("one", *options, *layout(1, 1, 0))
    many = trained("many", *options, *layout(1, 16, 0))
    assert_same(one, many, 20)
    assert_moved(many, 10, 20)
    assert summary(one)["test"] == summary(many)["test"]


def test_a_checkpoint_goes_on_with_other_owners(trained: Trained) -> None:
    """Rows of two owners are those of three, and of tables in the trainers; scores stay."""
    options = (*SERVED, IN_PROCESS)
    served = trained("served", *options, *layout(2, 2, 0), "train.steps=10")
    source = f"checkpoint.resume={checkpoint(served, 10)}"
    folders = []
    for name, owners in (
        ("two", layout(2, 2, 0)),
        ("three", layout(2, 3, 0)),
        ("fused", ("embedding=fused", "parallel.trainers=2", "embedding.deduplicate=true")),
    ):
        folder = trained(name, *options, *owners, source, "train.steps=16")
        folders.append(folder)
    assert_same(folders[0], folders[1], 16)
    assert any(
        (one != tensors(served, 10)[name]).any() for name, one in tensors(folders[0], 16).items()
    )
    two, fused = tensors(folders[0], 16), tensors(folders[2], 16)
    assert max(np.abs(two[name] - fused[name]).max() for name in two) < 1e-5
