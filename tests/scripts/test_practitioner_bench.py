"""The practitioner's baseline learns what one process learns, and sends what its formulas say."""

import json
import weakref
from pathlib import Path

import practitioner
import pytest
import torch
from emulation_hosts import needs_namespaces
from practitioner import WIRES, Practitioner, Wire
from reference_step import Trainer

from dlrm_hybrid.comm.process_group import GroupOptions, process_group
from dlrm_hybrid.comm.rendezvous import share_folder
from dlrm_hybrid.model.dlrm import Dlrm
from dlrm_hybrid.model.layers.products import Precision
from dlrm_hybrid.model.optimizer import Sgd
from dlrm_hybrid.model.rows.optimizer import EmbeddingOptimizer, EmbeddingOptions
from dlrm_hybrid.model.sharding import CommPrecision
from dlrm_hybrid.model.spec import ModelSpec
from dlrm_hybrid.run.rank.process import Report
from dlrm_hybrid.run.supervisor import Rank, run_ranks
from dlrm_hybrid.telemetry.spans import SpanClock
from dlrm_hybrid.train.signals import StopRequest

TRAINERS, ROWS, STEPS = 2, 8, 5
SPEC = ModelSpec(embedding_dim=4, bottom=(13, 8, 4), top=(8, 1), table_rows=tuple(range(3, 3 + 26)))


def be_trainer(argument: str, report: Report, stop: StopRequest) -> None:
    """Leave the weights of this rank's replica and tables in a file."""
    trainer, wire, folder = json.loads(argument)
    torch.set_num_threads(1)
    options = GroupOptions(
        rendezvous=share_folder(Path(folder, "meeting")),
        lost_peer=lambda seconds: None,
        address="127.0.0.1",
        deadline_seconds=60.0,
    )

    def count(sent_bytes: int, dense_bytes: int, received_bytes: int) -> None:
        """Nothing is counted here."""

    with process_group(range(TRAINERS), trainer, options, count, SpanClock()) as group:
        one = Practitioner(SPEC, WIRES[wire], group, ROWS)
        for batch in practitioner.batches(SPEC, ROWS, seed=trainer)[:STEPS]:
            one.step(*batch)
        learned = {name: weight.detach() for name, weight in one.layers.named_parameters()}
        learned |= {piece.name: piece.view.clone() for piece in one.embeddings.pieces}
        torch.save(learned, Path(folder, f"{trainer}.pt"))
        group.barrier().wait()
        ddp = weakref.ref(one.__dict__["_dense"])
        one.close()
        assert ddp() is None, "who holds the last reference to a group may never end"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("wire", "least", "most"),
    [("float32", 0.0, 1e-6), ("bfloat16 gradients", 1e-6, 5e-3), ("bfloat16", 1e-6, 5e-3)],
)
def test_trainers_learn_what_one_process_learns(
    tmp_path: Path, wire: str, least: float, most: float
) -> None:
    sgd = EmbeddingOptions(optimizer=EmbeddingOptimizer.SGD, eps=0.0)
    alone = Trainer(Dlrm(SPEC, sgd, Precision.FLOAT32, practitioner.SEED), Sgd())
    before = {name: weight.clone() for name, weight in alone.tensors().items()}
    drawn = [practitioner.batches(SPEC, ROWS, seed=trainer)[:STEPS] for trainer in range(TRAINERS)]
    for parts in zip(*drawn, strict=True):
        dense, ids, label = zip(*parts, strict=True)
        lr = practitioner.LR
        alone.step(torch.cat(dense), torch.cat(ids, 1), torch.cat(label), lr=lr, embedding_lr=lr)
    ranks = [
        Rank(
            index=trainer,
            name=f"trainer-{trainer}",
            argument=json.dumps([trainer, wire, str(tmp_path)]),
            log_folder=tmp_path,
        )
        for trainer in range(TRAINERS)
    ]
    outcome = run_ranks(ranks, f"{__name__}:be_trainer", lambda event: None)
    assert outcome.message == "", [path.read_text() for path in tmp_path.glob("*.log")]
    told = [torch.load(tmp_path / f"{trainer}.pt") for trainer in range(TRAINERS)]
    for name in SPEC.dense_shapes():
        assert torch.equal(told[0][name], told[1][name]), "replicas are equal"
    learned = told[0] | told[1]
    wanted = alone.tensors()
    assert set(learned) == set(wanted)
    away = {name: (learned[name] - one).abs().max().item() for name, one in wanted.items()}
    moved = {name: (wanted[name] - one).abs().max().item() for name, one in before.items()}
    assert min(moved.values()) > 1e-5
    assert least <= max(away.values()) <= most, away


@pytest.mark.slow
@needs_namespaces
@pytest.mark.parametrize(("link", "most"), [(practitioner.LOOPBACK, 1.05), ("1gbit", 1.1)])
def test_the_kernel_counts_a_ring_and_an_all_to_all(link: str, most: float) -> None:
    wire = WIRES["bfloat16"]
    found = practitioner.measure(link, trainers=3, steps=4, wire="bfloat16", batch_size=16)
    tables = practitioner.all_to_all_bytes(practitioner.PAPER_SPEC, 3, wire)
    ring = practitioner.ring_bytes(practitioner.PAPER_SPEC, 3, wire, 16)
    assert found.embedding_bytes == pytest.approx(tables)
    # Headers, acknowledgements, barriers; a shaped link cuts what is sent into single frames.
    assert 1.0 < found.bytes / (ring + tables) < most
    assert found.samples_per_second > 0 and found.cpu_microseconds > 0


def test_formulas_are_those_of_the_page() -> None:
    wire = Wire(CommPrecision.FLOAT32, CommPrecision.FLOAT32)
    rings = [
        practitioner.ring_bytes(practitioner.PAPER_SPEC, trainers, wire, 128)
        for trainers in (2, 4, 8, 16)
    ]
    assert rings == pytest.approx([15_898.5, 23_847.8, 27_822.4, 29_809.8], abs=0.1)
    halves = [practitioner.all_to_all_bytes(practitioner.PAPER_SPEC, 2, w) for w in WIRES.values()]
    assert halves == [1_716.0, 1_716.0, 884.0]


def test_slow_lines_get_fewer_steps() -> None:
    wire = WIRES["float32"]
    steps = [practitioner.steps_on(link, 2, wire, 128) for link in ("10mbit", "100mbit", "1gbit")]
    assert steps == [6, 66, practitioner.MOST_STEPS]
    assert practitioner.steps_on(practitioner.LOOPBACK, 2, wire, 128) == practitioner.MOST_STEPS
    assert practitioner.steps_on("1mbit", 16, wire, 2048) >= 1
