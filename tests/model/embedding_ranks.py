"""What the trainers of the sharded embeddings' tests do; each runs in a process of its own."""

import fcntl
import json
import os
import socket
import struct
import sys
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import asdict, replace
from functools import partial
from importlib import import_module
from pathlib import Path

import torch
from member_groups import members_group
from torch import Tensor
from torch import distributed as dist

from dlrm_hybrid.bags import Bags
from dlrm_hybrid.checkpoint.folder import find
from dlrm_hybrid.checkpoint.reader import open_checkpoint
from dlrm_hybrid.checkpoint.writer import ShardWriter
from dlrm_hybrid.comm.group import CountedGroup
from dlrm_hybrid.compress.embedding.ends import RowFormats
from dlrm_hybrid.compress.embedding.memory import LevelOptions
from dlrm_hybrid.model.embeddings import Embeddings
from dlrm_hybrid.model.exchange.floats import row_formats
from dlrm_hybrid.model.sharded_embeddings import ShardedEmbeddings
from dlrm_hybrid.model.spec import ModelSpec
from dlrm_hybrid.model.tables import Fused
from dlrm_hybrid.model.tensors import draw_embeddings, full_pieces
from dlrm_hybrid.run.supervisor import Rank, run_ranks
from dlrm_hybrid.telemetry.events import Event, Kind
from dlrm_hybrid.types import PeerLostError

SPEC = ModelSpec(
    embedding_dim=8, bottom=(13, 8), top=(4, 1), table_rows=(3, 50, 1, 17, 200, 31, 64)
)
SEED = 4
SIOCSIFFLAGS, IFF_UP = 0x8914, 1  # linux/sockios.h, linux/if.h
STEPS = 20


class Trainer:
    """One trainer's argument, its embeddings and what it has counted."""

    def __init__(self, given: dict, report) -> None:
        self.given = given
        self.number = given["members"].index(given["rank"])
        self.trainers = len(given["members"])
        self.sent_bytes = 0
        self.dense_bytes = 0
        self.group: CountedGroup | None = None
        self._report = report
        dim = given.get("dim", SPEC.embedding_dim)
        dims = tuple(given.get("dims", ()))
        rows = tuple(given.get("table_rows", SPEC.table_rows))
        own = {"table_dims": dims, "table_rows": rows}
        self.spec = replace(SPEC, embedding_dim=dim, bottom=(13, dim), **own)

    def count(self, sent_bytes: int, dense_bytes: int, received_bytes: int) -> None:
        self.sent_bytes += sent_bytes
        self.dense_bytes += dense_bytes

    def tell(self, **values: object) -> None:
        self._report(Event(Kind.TICK, 0, 0.0, {"trainer": self.number, **values}))

    def mine(self, rows_T: list[int]) -> slice:
        start = sum(rows_T[: self.number])
        return slice(start, start + rows_T[self.number])


@contextmanager
def trainer_of(
    argument: str, report, spec: ModelSpec | None = None
) -> Generator[tuple[Trainer, ShardedEmbeddings], None, None]:
    torch.set_num_threads(1)
    given = json.loads(argument)
    trainer = Trainer(given, report)
    with members_group(argument, trainer.count) as group:
        trainer.group = group
        spec = trainer.spec if spec is None else spec
        sharded = ShardedEmbeddings(spec, embedding_of(given), formats_of(given), group)
        sharded.initialise(SEED)
        yield trainer, sharded


def formats_of(given: dict) -> RowFormats:
    levels = LevelOptions(**given["levels"]) if "levels" in given else None
    return row_formats(given.get("precision", "float32"), SPEC.table_rows, levels)


def gather(trainer: Trainer, sharded: ShardedEmbeddings, root: int) -> dict[str, Tensor]:
    """Whole weights and optimizer states by name at one trainer, nothing elsewhere."""
    assert trainer.group is not None
    mine = torch.cat([torch.empty(0), *(piece.view.reshape(-1) for piece in sharded.pieces)])
    places = [
        [piece.name, piece.shape, piece.begin, list(piece.view.shape)] for piece in sharded.pieces
    ]
    file = Path(trainer.given["folder"]) / f"places-{trainer.number}.json"
    file.write_text(json.dumps(places))
    all_T = [1] * trainer.trainers
    sizes = trainer.group.exchange(torch.tensor([len(mine)] * trainer.trainers), all_T, all_T)
    taken_T = [int(size) if trainer.number == root else 0 for size in sizes]
    given_T = [len(mine) if number == root else 0 for number in range(trainer.trainers)]
    values = trainer.group.exchange(mine, given_T, taken_T)
    if trainer.number != root:
        return {}
    whole: dict[str, Tensor] = {}
    for number in range(trainer.trainers):
        file = Path(trainer.given["folder"]) / f"places-{number}.json"
        for name, shape, begin, extent in json.loads(file.read_text()):
            tensor = whole.setdefault(name, torch.full(shape, torch.nan))
            place = tuple(slice(b, b + e) for b, e in zip(begin, extent, strict=True))
            size = tensor[place].numel()
            tensor[place] = values[:size].view(extent)
            values = values[size:]
    assert not any(tensor.isnan().any() for tensor in whole.values())
    return whole


def embedding_of(given: dict) -> Fused:
    return Fused(
        optimizer=given["optimizer"],
        weight_decay=given.get("weight_decay", 0.0),
        sharding=given["kind"],
        comm_precision=given.get("precision", "float32"),
        deduplicate=given.get("deduplicate", False),
    )


def batch(step: int, rows: int, spec: ModelSpec = SPEC) -> tuple[Tensor, Tensor]:
    """Ids and gradients of one batch over all trainers; most ids come several times."""
    generator = torch.Generator().manual_seed(step)
    ids_FB = torch.stack(
        [torch.randint(0, limit, (rows,), generator=generator) for limit in spec.table_rows]
    )
    drawn = torch.randn(rows, sum(spec.widths.dims), generator=generator)
    return ids_FB, spec.widths.padded(drawn)


def unsharded(trainer: Trainer) -> Embeddings:
    embeddings = Embeddings(trainer.spec, embedding_of(trainer.given))
    draw_embeddings(embeddings.weights(), SEED)
    return embeddings


def tensors(embeddings: Embeddings) -> dict[str, Tensor]:
    return {**embeddings.weights(), **embeddings.optimizer_state()}


def lr_of(step: int) -> float:
    return 0.1 / (1 + step % 7)


def learn_unsharded(
    trainer: Trainer, embeddings: Embeddings, step: int, scale: float = 1.0
) -> Tensor:
    ids_FB, gradient_BFD = batch(step, trainer.trainers * rows_of(step), trainer.spec)
    embeddings.set_lr(lr_of(step) / scale)
    out_BFD = embeddings(Bags(ids_FB))
    out_BFD.backward(gradient_BFD * scale / trainer.trainers)
    return out_BFD


def learn_sharded(
    trainer: Trainer, sharded: ShardedEmbeddings, step: int, scale: float = 1.0
) -> Tensor:
    rows_T = [rows_of(step)] * trainer.trainers
    ids_FB, gradient_BFD = batch(step, sum(rows_T), trainer.spec)
    mine = trainer.mine(rows_T)
    sharded.set_lr(lr_of(step) / scale)
    out_BFD = sharded(Bags(ids_FB[:, mine].contiguous()), rows_T)
    out_BFD.backward(gradient_BFD[mine] * scale / trainer.trainers)
    return out_BFD


def rows_of(step: int) -> int:
    return 6 + step % 3


def several(argument: str, report, stop) -> None:
    """Go through worlds one after the other; each that is told of names its world."""
    given = json.loads(argument)
    for name, world in given["worlds"].items():
        module, _, entry = given["entries"][name].rpartition(":")
        told = partial(_of_world, report, name)
        own = json.dumps({"rank": given["rank"], **world})
        getattr(import_module(module or __name__), entry)(own, told, stop)


def _of_world(report, name: str, event: Event) -> None:
    report(replace(event, values={**event.values, "world": name}))


def equals_one_table(argument: str, report, stop) -> None:
    """Train sharded and unsharded side by side; tell how far apart they are and have moved."""
    with trainer_of(argument, report) as (trainer, sharded):
        oracle = unsharded(trainer)
        first = {name: tensor.clone() for name, tensor in tensors(oracle).items()}
        scale = trainer.given.get("scale", 1.0)  # of gradients; rates make up for it
        forward = 0.0
        for step in range(STEPS):
            out_BFD = learn_sharded(trainer, sharded, step, scale)
            mine = trainer.mine([rows_of(step)] * trainer.trainers)
            expected_BFD = learn_unsharded(trainer, oracle, step, scale)[mine]
            forward = max(forward, (out_BFD - expected_BFD).abs().max().item())
        root = trainer.trainers - 1
        gathered = gather(trainer, sharded, root)
        expected = tensors(oracle)
        values = {}
        if trainer.number == root:
            assert set(gathered) == set(expected)
            values = {
                name: (
                    (gathered[name] - expected[name]).norm().item(),
                    (expected[name] - first[name]).norm().item(),
                )
                for name in expected
            }
        shards = {
            name: [(shard.trainer, shard.rows, shard.columns) for shard in shards]
            for name, shards in sharded.shards.items()
        }
        trainer.tell(forward=forward, values=values, shards=shards)


def looks_up_uneven_batches(argument: str, report, stop) -> None:
    """Batches of different sizes, some empty, some only here; nothing learns."""
    with trainer_of(argument, report) as (trainer, sharded):
        oracle = unsharded(trainer)
        sizes = ([5, 0, 3], [0, 0, 4], [2, 2, 2], [0, 0, 0], [1, 7, 0])
        for step, rows_T in enumerate(sizes):
            rows_T = rows_T[: trainer.trainers]
            ids_FB, _ = batch(step, sum(rows_T))
            mine = trainer.mine(rows_T)
            with torch.no_grad():
                asked_BFD = sharded(Bags(ids_FB[:, mine].contiguous()))
                told_BFD = sharded(Bags(ids_FB[:, mine].contiguous()), rows_T)
                expected_BFD = oracle(Bags(ids_FB))[mine] if sum(rows_T) else asked_BFD
            assert asked_BFD.shape == (rows_T[trainer.number], 7, 8)
            assert torch.equal(asked_BFD, expected_BFD)
            assert torch.equal(told_BFD, expected_BFD)
        trainer.tell(batches=len(sizes))


def refuses_a_bad_id(argument: str, report, stop) -> None:
    """Only the trainer that gives the id sends nothing, and says so."""
    with trainer_of(argument, report) as (trainer, sharded):
        for bad_id in (-1, 17, 2**32):
            ids_FB, _ = batch(0, 4)
            ids_FB[3, 2] = bad_id
            try:
                sharded(Bags(ids_FB))
            except RuntimeError as error:
                trainer.tell(message=str(error))


def loses_a_trainer(argument: str, report, stop) -> None:
    """The last trainer ends without a word before the lookup or before backward."""
    with trainer_of(argument, report) as (trainer, sharded):
        last = trainer.number == trainer.trainers - 1
        ids_FB, gradient_BFD = batch(0, 4)
        if last and trainer.given["before"] == "lookup":
            os._exit(0)
        try:
            out_BFD = sharded(Bags(ids_FB))
            if last:
                os._exit(0)
            out_BFD.backward(gradient_BFD)
        except PeerLostError as error:
            trainer.tell(lost=error.rank)


def leaves_a_checkpoint(argument: str, report, stop) -> None:
    """Learn, write what this trainer holds, and say so."""
    with trainer_of(argument, report) as (trainer, sharded):
        for step in range(5):
            learn_sharded(trainer, sharded, step)
        root = Path(trainer.given["checkpoints"])
        writer = ShardWriter(root=root, rank=f"worker-{trainer.number}", attempt=0)
        writer.begin(5, sharded.pieces)
        shard = writer.take(60.0)
        assert shard is not None
        trainer.tell(shard=asdict(shard))


def resumes_from_a_checkpoint(argument: str, report, stop) -> None:
    """Load, compare with unsharded tables that have loaded the same, learn on, compare."""
    with trainer_of(argument, report) as (trainer, sharded):
        checkpoint = open_checkpoint(find(Path(trainer.given["checkpoints"])))
        checkpoint.fill(sharded.pieces)
        oracle = unsharded(trainer)
        checkpoint.fill(full_pieces(tensors(oracle)))
        saved = {name: tensor.clone() for name, tensor in tensors(oracle).items()}
        for name, tensor in gather(trainer, sharded, 0).items():
            assert torch.equal(tensor, saved[name])
        for step in range(5, 10):
            learn_sharded(trainer, sharded, step)
            learn_unsharded(trainer, oracle, step)
        differences = [
            (tensor - tensors(oracle)[name]).abs().max().item()
            for name, tensor in gather(trainer, sharded, 0).items()
        ]
        moved = [
            (tensor - saved[name]).abs().max().item() for name, tensor in tensors(oracle).items()
        ]
        trainer.tell(difference=max(differences, default=0.0), moved=min(moved))


def counts(argument: str, report, stop) -> None:
    """What one lookup and one backward send."""
    with trainer_of(argument, report) as (trainer, sharded):
        rows_T = trainer.given["rows_T"]
        ids_FB, gradient_BFD = batch(0, sum(rows_T))
        mine = trainer.mine(rows_T)
        told = []
        assert (trainer.sent_bytes, trainer.dense_bytes) == (0, 0)
        out_BFD = sharded(Bags(ids_FB[:, mine].contiguous()), rows_T)
        told.append((trainer.sent_bytes, trainer.dense_bytes))
        out_BFD.backward(gradient_BFD[mine])
        told.append((trainer.sent_bytes, trainer.dense_bytes))
        features = [0] * trainer.trainers  # in columns
        for shards in sharded.shards.values():
            for shard in shards:
                features[shard.trainer] += shard.columns[1] - shard.columns[0]
        lookups = [
            sum(shard.trainer == t for shards in sharded.shards.values() for shard in shards)
            for t in range(trainer.trainers)
        ]
        trainer.tell(told=told, columns_T=features, lookups_T=lookups)


def counts_beside_the_interface(argument: str, report, stop) -> None:
    """Bytes counted here, and those of the loopback interface, over the same steps."""
    spec = ModelSpec(embedding_dim=16, bottom=(13, 16), top=(4, 1), table_rows=(100,) * 26)
    with trainer_of(argument, report, spec) as (trainer, sharded):
        rows_T = [128] * trainer.trainers
        ids_FB, gradient_BFD = batch(0, sum(rows_T), spec)
        mine = trainer.mine(rows_T)

        def step() -> None:
            sharded(Bags(ids_FB[:, mine].contiguous()), rows_T).backward(gradient_BFD[mine])

        for _ in range(3):
            step()
        dist.barrier()
        counted, seen = trainer.sent_bytes, _loopback_bytes()
        for _ in range(50):
            step()
        dist.barrier()
        trainer.tell(counted=trainer.sent_bytes - counted, seen=_loopback_bytes() - seen)


def _loopback_bytes() -> int:
    for line in Path("/proc/self/net/dev").read_text().splitlines():
        name, _, numbers = line.partition(":")
        if name.strip() == "lo":
            return int(numbers.split()[8])
    raise LookupError("no loopback interface")


def main() -> None:
    """Run an entry with two trainers in this process's network namespace; print what they tell."""
    folder, kind, precision = sys.argv[1:]
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        fcntl.ioctl(any_socket, SIOCSIFFLAGS, struct.pack("16sh14x", b"lo", IFF_UP))
    ranks = [
        Rank(
            index=rank,
            name=f"worker-{rank}",
            argument=json.dumps(
                {
                    "rank": rank,
                    "members": [0, 1],
                    "folder": folder,
                    "kind": kind,
                    "precision": precision,
                    "optimizer": "sgd",
                }
            ),
            log_folder=Path(folder),
        )
        for rank in (0, 1)
    ]
    told: list[dict] = []
    outcome = run_ranks(
        ranks,
        "embedding_ranks:counts_beside_the_interface",
        lambda event: told.append(dict(event.values)),
    )
    assert outcome.message == "", outcome.message
    sys.stdout.write(json.dumps(told))


if __name__ == "__main__":
    main()
