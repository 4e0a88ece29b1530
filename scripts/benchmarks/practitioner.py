"""What torch and TorchRec give without servers and thresholds, beside worlds on the same machines.

    python scripts/benchmarks/practitioner.py bytes
    python scripts/benchmarks/practitioner.py speed RUNS --links loopback 10mbit 100mbit 1gbit

Each trainer is a process with all dense layers, in torch's DistributedDataParallel on gloo, and a
part of the tables, sharded table-wise by TorchRec. Gradients are reduced in float32, in bfloat16
by torch's `bf16_compress_hook`, or as factors of a low rank by its `powerSGD_hook`; pooled rows and
their gradients are exchanged all-to-all in float32 or bfloat16.

`bytes` counts what the kernel counts in a network of its own, beside the formula of a ring. `speed`
trains by turns on links of given rates, each trainer on a machine of its own, and beside it worlds
of as many trainers on as many machines, with `--servers` beside them; of worlds with stages every
rank has a machine. What is complete in RUNS is not run again. Needs what `network=emulated`
needs.

Shapes: B rows of a trainer, I integer features, F tables, D embedding dimension, T trainers.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
from datetime import timedelta
from itertools import product
from math import prod
from pathlib import Path
from statistics import median
from typing import Any, cast

import torch
import torch.distributed as dist
from harness import Page, Row, publish, samples_of, slug, spread, train_once
from hosts import LOOPBACK, told_on
from plain_dlrm import PAPER_SPEC, draw_rows
from torch import Tensor
from torch.distributed import GradBucket  # pyright: ignore[reportPrivateImportUsage]
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import (
    PowerSGDState,
    powerSGD_hook,
)
from torch.nn.functional import binary_cross_entropy_with_logits
from torch.nn.parallel import DistributedDataParallel
from typing_extensions import override

from dlrm_hybrid.bags import Bags
from dlrm_hybrid.bounds import WirePrecision
from dlrm_hybrid.comm.group import CountedGroup, Exchange, GroupOptions, process_group
from dlrm_hybrid.comm.mesh import Buffer
from dlrm_hybrid.comm.netem.plan import bits_per_second
from dlrm_hybrid.comm.rendezvous import share_folder
from dlrm_hybrid.config.compose import values_of
from dlrm_hybrid.config.validate import validate
from dlrm_hybrid.model.dlrm import StageModel
from dlrm_hybrid.model.exchange.floats import row_formats
from dlrm_hybrid.model.layers.products import Precision
from dlrm_hybrid.model.spec import ModelSpec, Partition
from dlrm_hybrid.model.tables import Fused
from dlrm_hybrid.plan.machines import pooled_bytes, ring_bytes
from dlrm_hybrid.report.runs import Run
from dlrm_hybrid.run.assembly.build import topology
from dlrm_hybrid.run.rank.process import Report
from dlrm_hybrid.telemetry.events import Event, Kind
from dlrm_hybrid.telemetry.interface import read_counters
from dlrm_hybrid.telemetry.rank_meter import WARMUP_STEPS
from dlrm_hybrid.telemetry.spans import SpanClock
from dlrm_hybrid.train.signals import StopRequest

LR, SEED, BATCHES = 0.1, 0, 50  # batches are drawn before, and used again and again
ENTRY = "practitioner:be_rank"
DEADLINE_SECONDS = 300.0
MOST_STEPS, LINE_SECONDS = 150, 12.0
OPPONENT = "bfloat16"  # a key of WIRES: the fastest of those that send all gradients
WITH_STAGES = ("dct_hybrid", "dct_levels", "baseline")
WORLDS = ("dp_levels", "dp_bfloat16", "dct_hybrid")
WORLD = (
    *("train.evaluate_every=0", "checkpoint.every=0", "checkpoint.minutes=0"),
    f"train.steps={WARMUP_STEPS + MOST_STEPS}",
)


@dataclass(frozen=True, slots=True)
class Wire:
    """How numbers travel: gradients of dense layers, and pooled rows both ways.

    Attributes:
        gradients: type of the gradients, or of the factors in their place.
        rows: type of pooled rows and their gradients.
        rank: of PowerSGD's factors; 0 for whole gradients.
    """

    gradients: WirePrecision
    rows: WirePrecision
    rank: int = 0


WIRES = {
    "float32": Wire("float32", "float32"),
    "bfloat16 gradients": Wire("bfloat16", "float32"),
    "bfloat16": Wire("bfloat16", "bfloat16"),
    "PowerSGD": Wire("float32", "bfloat16", rank=2),
}


@dataclass(frozen=True, slots=True)
class Measured:
    """What all trainers needed for the measured steps.

    Attributes:
        samples_per_second: of all trainers.
        cpu_microseconds: of all trainers, per sample.
        bytes: per sample, that left all interfaces, with headers and acknowledgements.
        embedding_bytes: per sample, of ids, pooled rows and their gradients as senders count them.
    """

    samples_per_second: float
    cpu_microseconds: float
    bytes: float
    embedding_bytes: float


class GlooExchange(Exchange):
    """gloo's all-to-all, in place of this program's own connections.

    Args:
        options: where members meet, and the address of this one.
        place: number of this member.
        size: number of members.
    """

    def __init__(self, options: GroupOptions, place: int, size: int) -> None:
        self.place, self.size = place, size
        gloo: Any = dist.ProcessGroupGloo
        gloo_options = gloo._Options()
        gloo_options._timeout = timedelta(seconds=options.deadline_seconds)
        gloo_options._devices = [gloo.create_device(hostname=options.address)]
        self._gloo = gloo(options.rendezvous.store("tables"), place, size, gloo_options)
        self._begun: dict[int, tuple[dist.Work, Tensor, Sequence[Buffer]]] = {}
        self._number = 0

    @override
    def begin(self, outgoing_T: Sequence[Buffer], incoming_T: Sequence[Buffer]) -> int:
        sizes = [[*map(len, parts_T)] for parts_T in (incoming_T, outgoing_T)]
        outgoing = torch.frombuffer(bytearray().join(outgoing_T) or bytearray(1), dtype=torch.uint8)
        received = torch.empty(sum(sizes[0]), dtype=torch.uint8)
        outgoing = outgoing[: sum(sizes[1])]
        work = self._gloo.alltoall_base(received, outgoing, *sizes, dist.AllToAllOptions())
        self._number += 1
        self._begun[self._number] = (work, received, incoming_T)
        return self._number

    @override
    def finish(self, number: int) -> None:
        work, received, incoming_T = self._begun.pop(number)
        work.wait()
        for part, bytes_T in zip(
            torch.split(received, [*map(len, incoming_T)]), incoming_T, strict=True
        ):
            memoryview(bytes_T)[:] = part.numpy().data


class Practitioner:
    """One trainer's replica of the dense layers and its share of the tables.

    Args:
        spec: the model.
        wire: how numbers travel.
        group: of the trainers, for the tables.
        batch_size: rows of each trainer in a step.
    """

    def __init__(self, spec: ModelSpec, wire: Wire, group: CountedGroup, batch_size: int) -> None:
        from dlrm_hybrid.model.sharded_embeddings import ShardedEmbeddings  # seconds to import

        (whole,) = Partition.of(spec, ()).stages
        self.layers = StageModel(spec, whole, Precision.FLOAT32, SEED)
        gloo = cast(dist.ProcessGroup, dist.new_group(backend="gloo"))
        # PowerSGD reduces in callbacks: of two buckets gloo would mix up what belongs together.
        one_bucket = 1024 if wire.rank else None
        self._dense = DistributedDataParallel(
            self.layers, process_group=gloo, bucket_cap_mb=one_bucket
        )
        if wire.gradients == "bfloat16":
            self._dense.register_comm_hook(gloo, in_bfloat16)
        if wire.rank:
            state = PowerSGDState(gloo, wire.rank, start_powerSGD_iter=WARMUP_STEPS // 2)
            self._dense.register_comm_hook(state, powerSGD_hook)
        self._optimizer = torch.optim.SGD(self._dense.parameters(), lr=LR)
        self.embeddings = ShardedEmbeddings(
            spec, Fused(comm_precision=wire.rows), row_formats(wire.rows, spec.table_rows), group
        )
        self.embeddings.initialise(SEED)
        # Losses are means over a trainer's rows, and tables add what all trainers send.
        self.embeddings.set_lr(LR / group.size())
        self._rows_T = [batch_size] * group.size()

    def step(self, dense_BI: Tensor, ids_FB: Tensor, label_B: Tensor) -> float:
        """Learn from this trainer's rows; its loss before the update."""
        pooled_BFD = self.embeddings(Bags(ids_FB), self._rows_T)
        logit_B: Tensor = self._dense(dense_BI, pooled_BFD).squeeze(1)
        loss = binary_cross_entropy_with_logits(logit_B, label_B)
        self._optimizer.zero_grad()
        loss.backward()
        self._optimizer.step()
        return loss.item()

    def close(self) -> None:
        """Let go of DDP before its group ends, which it would else do itself."""
        # Holding Python's lock it would join a thread that may wait for that lock.
        del self._dense
        gc.collect()


def in_bfloat16(group: dist.ProcessGroup, bucket: GradBucket) -> torch.futures.Future[Tensor]:
    """torch's hook by another name: by its own DDP refuses it on a CPU, where gloo can do it."""
    return bf16_compress_hook(group, bucket)


# DDP compares them, and a text is no type.
in_bfloat16.__annotations__.update({"bucket": GradBucket, "return": torch.futures.Future[Tensor]})


def batches(spec: ModelSpec, batch_size: int, seed: int) -> list[tuple[Tensor, Tensor, Tensor]]:
    """Synthetic rows as dense_BI, ids_FB and label_B."""
    rows = draw_rows(spec.table_rows, BATCHES * batch_size, seed)
    dense = torch.log1p(torch.from_numpy(rows.counts_RI).float())
    ids, label = torch.from_numpy(rows.ids_RF).long(), torch.from_numpy(rows.label_R).float()
    parts = [slice(one, one + batch_size) for one in range(0, len(label), batch_size)]
    return [(dense[part], ids[part].t().contiguous(), label[part]) for part in parts]


def be_rank(argument: str, report: Report, _: StopRequest) -> None:
    """Train, and report what it took."""
    trainer, folder, interface, address, trainers, batch_size, steps, wire = json.loads(argument)
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = interface
    os.environ["TORCH_CPP_LOG_LEVEL"] = "ERROR"  # hosts have no names
    counted = [0]

    def count(sent_bytes: int, dense_bytes: int, received_bytes: int) -> None:
        counted[0] += sent_bytes

    options = GroupOptions(
        rendezvous=share_folder(Path(folder) / "meeting"),
        lost_peer=lambda seconds: None,
        address=address,
        deadline_seconds=DEADLINE_SECONDS,
    )
    exchange = GlooExchange(options, trainer, trainers)
    with (
        process_group(range(trainers), trainer, options, count, SpanClock(), exchange) as group,
        closing(Practitioner(PAPER_SPEC, WIRES[wire], group, batch_size)) as practitioner,
    ):
        drawn = batches(PAPER_SPEC, batch_size, seed=trainer)
        for step in range(WARMUP_STEPS):
            practitioner.step(*drawn[step % BATCHES])
        group.barrier().wait()
        counted[0], sent_before = 0, read_counters(interface)[1]
        start, cpu_before = time.perf_counter(), time.process_time()
        for step in range(steps):
            practitioner.step(*drawn[step % BATCHES])
        values = {"cpu": time.process_time() - cpu_before, "embedding": counted[0]}
        group.barrier().wait()
        values["seconds"] = time.perf_counter() - start
        values["sent"] = read_counters(interface)[1] - sent_before
        report(Event(Kind.TICK, 0, 0.0, values))
        group.barrier().wait()  # nobody's end is an error of others


def measure(link: str, trainers: int, steps: int, wire: str, batch_size: int) -> Measured:
    """Train on links of a rate, or all on one host's loopback; SystemExit says why a rank fails."""
    told = told_on(link, trainers, ENTRY, trainers, batch_size, steps, wire)
    samples = steps * batch_size * trainers
    sent = [one["sent"] for one in told]
    return Measured(
        samples_per_second=samples / max(one["seconds"] for one in told),
        cpu_microseconds=1e6 * sum(one["cpu"] for one in told) / samples,
        bytes=(max(sent) if link == LOOPBACK else sum(sent)) / samples,
        embedding_bytes=sum(one["embedding"] for one in told) / samples,
    )


def formula(trainers: int, wire: Wire, batch_size: int) -> tuple[float, float]:
    """Bytes per sample of gradients in a ring, and of what tables exchange."""
    reduced = sum(_reduced(shape, wire.rank) for shape in PAPER_SPEC.dense_shapes().values())
    ring = ring_bytes(reduced, trainers, _width(wire.gradients))
    return ring / batch_size, pooled_bytes(PAPER_SPEC, trainers, _width(wire.rows))


def _reduced(shape: tuple[int, ...], rank: int) -> int:
    """Elements of a gradient that are reduced: its own, or those of factors of less than half."""
    factors = rank * sum(shape)
    return factors if rank and len(shape) > 1 and 2 * factors < prod(shape) else prod(shape)


def _width(precision: WirePrecision) -> int:
    return cast(torch.dtype, getattr(torch, precision)).itemsize


def bytes_rows(trainers: Sequence[int], steps: int, batch_size: int) -> list[Row]:
    """What is measured on a loopback beside the formula, for each number of trainers and wire."""
    rows: list[Row] = []
    for number in trainers:
        for name, wire in WIRES.items():
            found = measure(LOOPBACK, number, steps, name, batch_size)
            ring, tables = formula(number, wire, batch_size)
            rows.append(
                {
                    "trainers": str(number),
                    "numbers": name,
                    "gradients, ring": f"{ring:,.0f}",
                    "tables, counted": f"{found.embedding_bytes:,.0f}",
                    "all": f"{ring + tables:,.0f}",
                    "measured": f"{found.bytes:,.0f}",
                    "more": f"{100 * (found.bytes / (ring + tables) - 1):+.1f}%",
                }
            )
    return rows


def speed_rows(link: str, batch_size: int, options: argparse.Namespace) -> list[Row]:
    """What is reached at a rate, turn by turn, and how many times that of `OPPONENT` it is."""
    turns: dict[str, list[Measured]] = {}
    trainers, servers, worlds = options.trainers, options.servers, options.worlds
    for turn in range(options.repeats):
        for name in dict.fromkeys((OPPONENT, *options.wires)):
            file = options.runs / link / f"{slug(name)}-{trainers}-{batch_size}-{turn}.json"
            found = _kept(file, link, trainers, name, batch_size)
            turns.setdefault(name, []).append(found)
        for world in worlds:
            overrides = world_of(world, link, trainers, servers, batch_size)
            number = validate(values_of(overrides)).parallel.servers
            folder = options.runs / link / f"{world}-{trainers}-{number}-{batch_size}-{turn}"
            turns.setdefault(world, []).append(_of(train_once(folder, *overrides)))
    theirs = [one.samples_per_second for one in turns[OPPONENT]]
    return [
        {
            f"{link}, batch {batch_size}": name if name in worlds else f"DDP, {name}",
            "machines": None if link == LOOPBACK else machines(name, trainers),
            "samples/s": spread([one.samples_per_second for one in measured], 0),
            f"÷ DDP, {OPPONENT}": spread(
                [one.samples_per_second / of for one, of in zip(measured, theirs, strict=True)], 2
            ),
            "CPU, µs/sample": spread([one.cpu_microseconds for one in measured], 0),
            "bytes/sample": f"{median(one.bytes for one in measured):,.0f}",
        }
        for name, measured in turns.items()
    ]


def world_of(
    experiment: str, link: str, trainers: int, servers: int | None, batch_size: int
) -> tuple[str, ...]:
    """The overrides of a world on links of a rate; servers of one without stages."""
    size = (f"parallel.trainers={trainers}", f"train.batch_size={batch_size}")
    one = (
        f"+experiment={experiment}",
        *WORLD,
        *size,
        f"data.rows={rows_for(trainers, batch_size)}",
    )
    if machines(experiment, trainers) == trainers:
        placed = (f"parallel.servers={servers}",) if servers is not None else ()
        one += placed if link == LOOPBACK else (f"parallel.machines={trainers}", *placed)
    return one if link == LOOPBACK else (*one, "network=emulated", f"network.rate={link}")


def rows_for(trainers: int, batch_size: int) -> int:
    """As many as all steps need, and those of the test."""
    return max(300_000, int(1.2 * trainers * batch_size * (WARMUP_STEPS + MOST_STEPS)))


def machines(name: str, trainers: int) -> int:
    """One for each trainer, with the servers beside; but with stages one for each rank."""
    if name not in WITH_STAGES:
        return trainers
    return topology(
        validate(values_of([f"+experiment={name}", f"parallel.trainers={trainers}"]))
    ).size


def _of(run: Run) -> Measured:
    network, samples = run.summary["network"], samples_of(run)
    return Measured(
        samples_per_second=run.summary["samples_per_second"],
        cpu_microseconds=1e6 * run.summary["cpu"]["seconds"] / samples,
        # On a loopback that all share nothing tells whose bytes they are: frames without headers.
        bytes=(network["interface_bytes"] or network["bytes_total"]) / samples,
        embedding_bytes=network["by_class"]["embedding"]["bytes"] / samples,
    )


def _kept(file: Path, link: str, trainers: int, wire: str, batch_size: int) -> Measured:
    """What was measured before, or is now."""
    if not file.exists():
        steps = steps_on(link, trainers, WIRES[wire], batch_size)
        found = measure(link, trainers, steps, wire, batch_size)
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(asdict(found)), encoding="utf-8")
    return Measured(**json.loads(file.read_text(encoding="utf-8")))


def steps_on(link: str, trainers: int, wire: Wire, batch_size: int) -> int:
    """Up to MOST_STEPS, fewer where a line would take more than LINE_SECONDS for them."""
    if link == LOOPBACK:
        return MOST_STEPS
    sent_bits = 8 * batch_size * sum(formula(trainers, wire, batch_size))
    return max(1, min(MOST_STEPS, int(LINE_SECONDS * bits_per_second(link) / sent_bits)))


def main() -> None:
    """Measure what the first word says, print the page."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    what = parser.add_subparsers(dest="what", required=True)
    of_bytes = what.add_parser("bytes", help="what the kernel counts beside the formula")
    of_bytes.add_argument("--trainers", type=int, nargs="+", default=[2, 4, 8, 16])
    of_bytes.add_argument("--steps", type=int, default=20, help="that are counted; default 20")
    of_bytes.add_argument("--batch-size", type=int, default=128, help="of each trainer")
    of_speed = what.add_parser("speed", help="samples per second of worlds beside DDP")
    of_speed.add_argument("runs", type=Path, help="folder of the runs")
    of_speed.add_argument("--links", nargs="+", default=[LOOPBACK, "10mbit", "100mbit", "1gbit"])
    of_speed.add_argument("--trainers", type=int, default=2)
    text = "of worlds without stages; default: as parallel.machines chooses, 1 on loopback"
    of_speed.add_argument("--servers", type=int, help=text)
    of_speed.add_argument("--worlds", nargs="+", default=WORLDS, help="experiments")
    of_speed.add_argument(
        "--wires", nargs="+", default=[*WIRES], choices=WIRES, help=f"of DDP, beside {OPPONENT}"
    )
    of_speed.add_argument("--batch-sizes", type=int, nargs="+", default=[128, 2048])
    of_speed.add_argument("--repeats", type=int, default=3, help="turns; default 3")
    options = parser.parse_args()

    def measure() -> Page:
        if options.what == "bytes":
            rows = bytes_rows(options.trainers, options.steps, options.batch_size)
            return {"A practitioner's baseline": rows}
        return {
            f"{link}, batch {size}": speed_rows(link, size, options)
            for size, link in product(options.batch_sizes, options.links)
        }

    publish(measure)


if __name__ == "__main__":
    main()
