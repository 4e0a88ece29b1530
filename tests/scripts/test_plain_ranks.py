"""The plain DLRM on gloo ranks learns what one process with the whole batch learns."""

import multiprocessing
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from plain_dlrm import PlainDlrm, PlainTraining

from dlrm_hybrid.model.spec import ModelSpec

SCRIPTS = Path(__file__).parents[2] / "scripts"
RANKS, ROWS, STEPS = 2, 8, 5
SPEC = ModelSpec(embedding_dim=4, bottom=(13, 8, 4), top=(8, 1), table_rows=tuple(range(3, 3 + 26)))


def learned(model: PlainDlrm) -> list[torch.Tensor]:
    return [weight.detach().clone() for weight in model.parameters()]


def train_as_rank(rank: int, folder: str) -> None:
    """Leave the weights of this rank's replica and tables in a file."""
    sys.path.insert(0, str(SCRIPTS))
    from plain_ranks import PlainRank, global_batches

    dist.init_process_group("gloo", f"file://{folder}/store", rank=rank, world_size=RANKS)
    model = PlainDlrm(SPEC, seed=0)
    train = PlainRank(model, rank, RANKS)
    for batch in global_batches(SPEC.table_rows, RANKS * ROWS)[:STEPS]:
        train.step(batch)
    torch.save(learned(model), Path(folder, f"{rank}.pt"))
    dist.barrier()
    dist.destroy_process_group()


@pytest.mark.slow
def test_ranks_learn_what_one_process_learns(tmp_path: Path) -> None:
    sys.path.insert(0, str(SCRIPTS))
    from plain_ranks import LR, TABLES, global_batches

    alone = PlainDlrm(SPEC, seed=0)
    before = learned(alone)
    training = PlainTraining(alone, LR)
    for batch in global_batches(SPEC.table_rows, RANKS * ROWS)[:STEPS]:
        training.step(batch)
    with multiprocessing.get_context("spawn").Pool(RANKS) as pool:
        pool.starmap(train_as_rank, [(rank, str(tmp_path)) for rank in range(RANKS)], chunksize=1)
    dense = len(before) - TABLES
    for rank in range(RANKS):
        got = torch.load(tmp_path / f"{rank}.pt")
        own = range(rank * TABLES // RANKS, (rank + 1) * TABLES // RANKS)
        for place in (*range(dense), *(dense + table for table in own)):
            torch.testing.assert_close(got[place], learned(alone)[place], rtol=0, atol=1e-6)
    moved = [(one - other).abs().max() for one, other in zip(before, learned(alone), strict=True)]
    assert min(moved) > 1e-5
    assert max(moved) > 1e-3
