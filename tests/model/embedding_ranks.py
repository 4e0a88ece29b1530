"""What the trainers of the sharded embeddings' tests do; each runs in a process of its own."""

import json
from pathlib import Path

import torch
from torch import Tensor

from dlrm_hybrid.comm.process_group import GroupOptions, process_group
from dlrm_hybrid.model.embeddings import EmbeddingOptimizer, EmbeddingOptions, Embeddings
from dlrm_hybrid.model.initialise import draw_embeddings
from dlrm_hybrid.model.sharded_embeddings import ShardedEmbeddings
from dlrm_hybrid.model.sharding_options import CommPrecision, ShardingKind, ShardingOptions
from dlrm_hybrid.model.spec import ModelSpec
from dlrm_hybrid.telemetry.events import Event, Kind

SPEC = ModelSpec(
    embedding_dim=8, bottom=(13, 8), top=(4, 1), table_rows=(3, 50, 1, 17, 200, 31, 64)
)
SEED = 4
STEPS = 50


def options(optimizer: str) -> EmbeddingOptions:
    return EmbeddingOptions(optimizer=EmbeddingOptimizer(optimizer), eps=1e-8)


def batch(step: int, rows: int) -> tuple[Tensor, Tensor]:
    """Ids and gradients of one batch over all trainers; most ids come several times."""
    generator = torch.Generator().manual_seed(step)
    ids_FB = torch.stack(
        [torch.randint(0, limit, (rows,), generator=generator) for limit in SPEC.table_rows]
    )
    gradient_BFD = torch.randn(rows, len(SPEC.table_rows), SPEC.embedding_dim, generator=generator)
    return ids_FB, gradient_BFD


def unsharded(optimizer: str) -> Embeddings:
    embeddings = Embeddings(SPEC, options(optimizer))
    draw_embeddings(embeddings.weights(), SEED)
    return embeddings


def tensors(embeddings: Embeddings) -> dict[str, Tensor]:
    return {**embeddings.weights(), **embeddings.optimizer_state()}


def lr_of(step: int) -> float:
    return 0.1 / (1 + step % 7)


def equals_one_table(argument: str, report, stop) -> None:
    """Train sharded and unsharded side by side; tell how far apart they are and have moved."""
    torch.set_num_threads(1)
    given = json.loads(argument)
    trainers, trainer = len(given["members"]), given["members"].index(given["rank"])
    group_options = GroupOptions(
        folder=Path(given["folder"]), attempt=0, address="127.0.0.1", deadline_seconds=20.0
    )
    with process_group(
        given["members"], given["rank"], group_options, lambda sent, dense: None
    ) as group:
        sharded = ShardedEmbeddings(
            SPEC,
            options(given["optimizer"]),
            ShardingOptions(
                kind=ShardingKind(given["kind"]),
                comm_precision=CommPrecision(given.get("precision", "float32")),
            ),
            group,
        )
        sharded.initialise(SEED)
        oracle = unsharded(given["optimizer"])
        first = {name: tensor.clone() for name, tensor in tensors(oracle).items()}
        forward = 0.0
        for step in range(given.get("steps", STEPS)):
            rows = 6 + step % 3
            ids_FB, gradient_BFD = batch(step, trainers * rows)
            mine = slice(trainer * rows, (trainer + 1) * rows)
            for embeddings in (sharded, oracle):
                embeddings.set_lr(lr_of(step))
            out_BFD = sharded(ids_FB[:, mine].contiguous(), [rows] * trainers)
            whole_BFD = oracle(ids_FB)
            forward = max(forward, (out_BFD - whole_BFD[mine]).abs().max().item())
            out_BFD.backward(gradient_BFD[mine] / trainers)
            whole_BFD.backward(gradient_BFD / trainers)
        gathered = dict(sharded.gather(root=trainers - 1))
        values = {}
        if trainer == trainers - 1:
            expected = tensors(oracle)
            assert list(gathered) == list(expected)
            values = {
                name: (
                    (gathered[name] - expected[name]).abs().max().item(),
                    (expected[name] - first[name]).abs().max().item(),
                )
                for name in expected
            }
        else:
            assert set(gathered.values()) == {None}
        shards = {
            name: [(shard.trainer, shard.rows, shard.columns) for shard in shards]
            for name, shards in sharded.shards.items()
        }
    report(
        Event(
            Kind.TICK,
            0,
            0.0,
            {"trainer": trainer, "forward": forward, "values": values, "shards": shards},
        )
    )
