"""Batch norm through the command line: whose statistics there are, and that all see the same."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import torch
from patience import HANG_SECONDS
from saved_tensors import saved_groups
from world_runs import Trained, checkpoint, summary

from dlrm_hybrid.checkpoint.reader import open_checkpoint
from dlrm_hybrid.comm.in_process import in_process_channels
from dlrm_hybrid.comm.mailbox import Mailbox
from dlrm_hybrid.comm.metered import MeteredChannel
from dlrm_hybrid.model.dlrm import StageModel
from dlrm_hybrid.model.layers.products import Precision
from dlrm_hybrid.model.spec import ModelSpec, Partition
from dlrm_hybrid.model.tensors import full_pieces
from dlrm_hybrid.parallel.messages import Messenger
from dlrm_hybrid.telemetry import events
from dlrm_hybrid.telemetry.events import Kind
from dlrm_hybrid.telemetry.spans import SpanClock
from dlrm_hybrid.telemetry.traffic import Counters, Traffic
from dlrm_hybrid.train.statistics import exchanged, mean, resume

WORLD = ("parallel=hybrid", "parallel.world=in_process")
NORM = ("model.batch_norm=true", "optimizer=adam", "optimizer.lr=0.01", "embedding.lr=0.1")
CUTS = "parallel.cuts=[bottom.2,top.2]"
SCORES = ("log_loss", "auc", "accuracy")


def statistics(folder: Path, step: int) -> dict[str, np.ndarray]:
    return saved_groups(checkpoint(folder, step))["statistics"]


def scores(folder: Path) -> list[tuple[int, list[float]]]:
    found = events.read(folder / "events.jsonl")
    return [
        (one.step, [one.values[name] for name in SCORES])
        for one in found
        if one.kind is Kind.EVALUATED
    ]


def test_other_trainers_begin_with_the_mean(trained: Trained) -> None:
    world = (*WORLD, *NORM, "train.steps=6")
    first = trained("first", *world, CUTS, "parallel.trainers=3")
    other = ("parallel.trainers=2", "parallel.cuts=[bottom.1]", f"checkpoint.resume={first}")
    second = trained("second", *world, *other)
    assert scores(second) == scores(first)  # no step is left, all it does is to score

    held = statistics(first, 6)
    pieces = full_pieces(
        {name: torch.zeros(one.shape) for name, one in held.items() if name.split(".")[1] != "2"}
    )
    saved = open_checkpoint(checkpoint(first, 6))
    resume(saved, pieces, trainers=2)
    for piece in pieces:
        name = piece.name.split(".", 2)[2]
        of_all = np.stack([held[f"statistics.{trainer}.{name}"] for trainer in range(3)])
        expected = of_all.astype(np.float64).mean(0).astype(np.float32)
        np.testing.assert_array_equal(piece.view.numpy(), expected)
    resume(saved, pieces, trainers=3)
    assert all(np.array_equal(piece.view.numpy(), held[piece.name]) for piece in pieces)


def test_statistics_travel_for_evaluations_alone(trained: Trained) -> None:
    world = ("parallel=hybrid", "parallel.cuts=[]", "train.steps=8", "train.evaluate_every=4")
    told = {
        norm: summary(trained(norm, *world, *NORM, f"model.batch_norm={norm}"))["network"]
        for norm in ("true", "false")
    }
    normed, plain = told["true"], told["false"]
    assert normed["by_phase"]["evaluate"]["bytes"] > plain["by_phase"]["evaluate"]["bytes"]
    for name, tally in normed["by_class"].items():  # of training
        assert tally["messages"] == plain["by_class"][name]["messages"]


def test_all_workers_of_a_stage_get_the_same_mean_and_what_they_send_is_counted() -> None:
    spec = ModelSpec(
        embedding_dim=4, bottom=(3, 9, 4), top=(8, 1), table_rows=(5,), batch_norm=True
    )
    (part,) = Partition.of(spec, ()).stages
    models = [StageModel(spec, part, Precision.FLOAT32, seed=0) for _ in range(3)]
    for trainer, model in enumerate(models):
        for number, one in enumerate(model.statistics().values()):
            one.uniform_(generator=torch.Generator().manual_seed(10 * trainer + number))
    expected = mean([model.statistics() for model in models])
    sent = [Counters() for _ in models]
    messengers = [
        Messenger(
            attempt=0,
            channel=(metered := MeteredChannel(channel, counters, SpanClock())),
            mailbox=Mailbox(metered, 0, 99),
            patience_seconds=HANG_SECONDS,
            clock=SpanClock(),
        )
        for channel, counters in zip(in_process_channels(3), sent, strict=True)
    ]
    with ThreadPoolExecutor(3) as pool:
        found = list(
            pool.map(lambda one, model: exchanged(one, (0, 1, 2), model, 7), messengers, models)
        )
    for one in found:
        assert one.keys() == expected.keys() == spec.statistics_shapes().keys()
        for name, tensor in one.items():
            assert torch.equal(tensor, expected[name])
            own = torch.stack([model.statistics()[name] for model in models])
            torch.testing.assert_close(tensor, own.mean(0))
    tallies = [one.sent.snapshot()[Traffic.CONTROL] for one in sent]
    assert [one.messages for one in tallies] == [2, 1, 1]  # in all 2 (T - 1)
    elements = 4 * 2 * (9 + 8)
    assert [one.dense_equivalent_bytes for one in tallies] == [2 * elements, elements, elements]
    assert all(one.num_bytes > one.dense_equivalent_bytes for one in tallies)
    alone = exchanged(messengers[0], (0,), models[0], 8)
    assert all(torch.equal(one, models[0].statistics()[name]) for name, one in alone.items())
    assert sent[0].sent.snapshot()[Traffic.CONTROL].messages == 2
