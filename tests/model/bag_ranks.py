"""What trainers do in the tests of shared tables with bags; each runs in a process of its own."""

from unittest import mock

import numpy as np
import torch
from bag_draws import counted, drawn_bags, pooled_by_torch
from embedding_ranks import SEED, SPEC, Trainer, batch, gather, lr_of, trainer_of
from torch import Tensor

from dlrm_hybrid.bags import Bags, joined, part
from dlrm_hybrid.model.embeddings import tensor_bags
from dlrm_hybrid.model.exchange import ids as exchanges
from dlrm_hybrid.types import DlrmError

STEPS, LR = 12, 0.1


def rows_of(step: int, trainers: int) -> list[int]:
    """Of every trainer's batch; they differ, and now and then one has none."""
    return [(9 + 5 * step + 7 * trainer) % 13 for trainer in range(trainers)]


def bytes_of(trainer: Trainer) -> tuple[int, int]:
    sent = trainer.sent_bytes, trainer.dense_bytes
    trainer.sent_bytes = trainer.dense_bytes = 0
    return sent


def learns_the_bits_of_ids(argument: str, report, stop) -> None:
    """Plain ids, then the same with offsets, from the same rows; tell whether all is the same."""
    with trainer_of(argument, report) as (trainer, sharded):

        def learned(bags_of) -> tuple[list[Tensor], list[Tensor]]:
            sharded.initialise(SEED)
            for piece in sharded.pieces:
                if not piece.name.endswith(".weight"):
                    piece.view.zero_()
            found = []
            for step in range(STEPS):
                rows_T = rows_of(step, trainer.trainers)
                ids_FB, gradient_BFD = batch(step, sum(rows_T))
                mine = trainer.mine(rows_T)
                sharded.set_lr(lr_of(step))
                out_BFD = sharded(bags_of(ids_FB[:, mine].contiguous()))
                out_BFD.backward(gradient_BFD[mine])
                found.append(out_BFD.detach())
            return found, [piece.view.clone() for piece in sharded.pieces]

        one, other = learned(Bags), learned(counted)
        pairs = zip([*one[0], *one[1]], [*other[0], *other[1]], strict=True)
        sharded.initialise(SEED)
        weights = [piece for piece in sharded.pieces if piece.name.endswith(".weight")]
        learned_first = zip(weights, one[1], strict=False)
        trainer.tell(
            same=all(torch.equal(*pair) for pair in pairs),
            moved=not any(
                torch.equal(piece.view, tensor) for piece, tensor in learned_first if len(tensor)
            ),
        )


def learns_what_torch_learns(argument: str, report, stop) -> None:
    """Batches of bags that differ in their rows; tell how far apart and how far moved."""
    with trainer_of(argument, report) as (trainer, sharded):
        names = [f"{name}.weight" for name in SPEC.table_names]
        gathered = gather(trainer, sharded, 0)
        first = {name: gathered[name] for name in names if gathered}
        weights = {name: one.clone().requires_grad_() for name, one in first.items()}
        optimizer = None
        if weights and trainer.given["optimizer"] == "sgd":
            optimizer = torch.optim.SGD(weights.values(), lr=LR)
        elif weights and trainer.given["optimizer"] == "adam":
            optimizer = torch.optim.SparseAdam(weights.values(), lr=LR)
        elif weights:
            optimizer = torch.optim.Adagrad(weights.values(), lr=LR, eps=1e-8)
        forward = 0.0
        for step in range(STEPS):
            rows_T = rows_of(step, trainer.trainers)
            weighted = trainer.given.get("weighted", False)
            bags_T = [
                drawn_bags([step, t], SPEC.table_rows, rows, weighted)
                for t, rows in enumerate(rows_T)
            ]
            of_all = joined(bags_T)
            mine = trainer.mine(rows_T)
            assert np.array_equal(part(of_all, mine).values, bags_T[trainer.number].values)
            _, gradient_BFD = batch(step, sum(rows_T))
            gradient_BFD /= 16
            sharded.set_lr(LR)
            out_BFD = sharded(tensor_bags(bags_T[trainer.number]))
            out_BFD.backward(gradient_BFD[mine])
            if optimizer is not None:
                is_sparse = trainer.given["optimizer"] == "adam"
                expected_BFD = pooled_by_torch(weights, tensor_bags(of_all), is_sparse)
                difference_BFD = (out_BFD - expected_BFD[mine]).abs()
                forward = max([forward, *difference_BFD.flatten().tolist()])
                optimizer.zero_grad()
                expected_BFD.backward(gradient_BFD)
                optimizer.step()
        gathered = gather(trainer, sharded, 0)
        trainer.tell(
            forward=forward,
            apart={n: (gathered[n] - one).abs().max().item() for n, one in weights.items()},
            moved={n: (gathered[n] - one).abs().max().item() for n, one in first.items()},
        )


def counts(argument: str, report, stop) -> None:
    """What one lookup of bags and its backward send, and who holds what."""
    with trainer_of(argument, report) as (trainer, sharded):
        rows_T = trainer.given["rows_T"]
        weighted = trainer.given.get("weighted", False)
        bags = drawn_bags([7, trainer.number], SPEC.table_rows, rows_T[trainer.number], weighted)
        bytes_of(trainer)
        out_BFD = sharded(tensor_bags(bags), rows_T)
        forward = bytes_of(trainer)
        out_BFD.backward(torch.ones_like(out_BFD))
        holders = [[one.trainer for one in sharded.shards[name]] for name in SPEC.table_names]
        trainer.tell(forward=forward, backward=bytes_of(trainer), holders=holders)


def hears_no_lengths(argument: str, report, stop) -> None:
    """Trainer 1 sends lengths below 0."""
    with trainer_of(argument, report) as (trainer, sharded):
        good, bags = exchanges.lengths_of, tensor_bags(drawn_bags(0, SPEC.table_rows, 4))
        told = (lambda bags: -good(bags) - 1) if trainer.number == 1 else good
        with mock.patch.object(exchanges, "lengths_of", told):
            try:
                sharded(bags, [4, 4])
            except DlrmError as error:
                trainer.tell(message=str(error))
