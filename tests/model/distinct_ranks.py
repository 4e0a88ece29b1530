"""What trainers do in the tests of distinct ids; each runs in a process of its own."""

import json
from dataclasses import replace
from unittest import mock

import numpy as np
import torch
from embedding_ranks import SPEC, batch, gather, trainer_of
from torch import Tensor

from dlrm_hybrid.bags import Bags
from dlrm_hybrid.model.exchange import distinct as exchanges
from dlrm_hybrid.model.exchange import kept
from dlrm_hybrid.model.spec import ModelSpec
from dlrm_hybrid.types import DlrmError

FEW_TABLES = ModelSpec(embedding_dim=8, bottom=(13, 8), top=(4, 1), table_rows=(5, 40))


class Recorder:
    """Passes exchanges on and remembers the bytes that leave this trainer."""

    def __init__(self, mesh) -> None:
        self.sent: list[int] = []
        self.place, self.size = mesh.place, mesh.size
        self._mesh = mesh

    def begin(self, outgoing_T, incoming_T) -> int:
        sizes_T = [len(part) for part in outgoing_T]
        self.sent.append(sum(sizes_T) - sizes_T[self.place])
        return self._mesh.begin(outgoing_T, incoming_T)

    def finish(self, number: int) -> None:
        self._mesh.finish(number)


def counts_distinct(argument: str, report, stop) -> None:
    """What a lookup and its backward send, and how many distinct rows there are of each table."""
    with trainer_of(argument, report) as (trainer, sharded):
        recorder = Recorder(sharded._group._mesh)
        sharded._group._mesh = recorder
        rows_T = trainer.given["rows_T"]
        ids_FB, gradient_BFD = batch(0, sum(rows_T))
        mine = trainer.mine(rows_T)
        assert (trainer.sent_bytes, trainer.dense_bytes) == (0, 0)
        sharded(Bags(ids_FB[:, mine].contiguous())).backward(gradient_BFD[mine])
        holders = [sharded.shards[name][0].trainer for name in SPEC.table_names]
        trainer.tell(
            counted=trainer.sent_bytes,
            dense=trainer.dense_bytes,
            sent=recorder.sent,
            holders=holders,
        )


def keeps_rows(argument: str, report, stop) -> None:
    """Look up batches without gradients, with rows kept or not, before and after a step."""
    most_bytes = mock.patch.object(kept, "MOST_BYTES", json.loads(argument)["most_bytes"])
    with most_bytes, trainer_of(argument, report) as (trainer, sharded):
        rows_T = [30, 20, 10][: trainer.trainers]
        mine = trainer.mine(rows_T)

        def looked_up() -> tuple[list[Tensor], list[int]]:
            rows, sent = [], [trainer.sent_bytes]
            for number in (0, 1, 0, 1):
                ids_FB, _ = batch(number, sum(rows_T))
                with torch.no_grad():
                    rows.append(sharded(Bags(ids_FB[:, mine].contiguous())))
                sent.append(trainer.sent_bytes)
            return rows, np.diff(sent).tolist()

        before: list[Tensor] = []
        for step in range(2):
            rows, _ = looked_up()
            moved = step > 0 and not torch.equal(rows[0], before[0])
            sharded.keep_rows()
            again, sent = looked_up()
            same = all(map(torch.equal, rows, again))
            trainer.tell(same=same, moved=moved, sent=sent)
            before = rows
            ids_FB, gradient_BFD = batch(0, sum(rows_T))
            sharded.set_lr(0.5)
            sharded(Bags(ids_FB[:, mine].contiguous())).backward(gradient_BFD[mine])


def hears_no_ids(argument: str, report, stop) -> None:
    """Trainer 1 sends bytes that are no ids, then a batch of fewer rows than none."""
    with trainer_of(argument, report) as (trainer, sharded):
        ids_FB, _ = batch(0, 4)
        good = exchanges.encoded_ids
        if trainer.number == 1:
            exchanges.encoded_ids = lambda *given: np.full_like(good(*given), 0xFF)
        _tell_fault(trainer, sharded, ids_FB)
        exchanges.encoded_ids = good
        if trainer.number == 1:
            exchange = sharded._distinct
            told = exchange._exchange
            exchange._exchange = lambda messages_T, mine: told(messages_T, replace(mine, most=-1))
        _tell_fault(trainer, sharded, ids_FB)


def _tell_fault(trainer, sharded, ids_FB: Tensor) -> None:
    try:
        sharded(Bags(ids_FB))
    except DlrmError as error:
        trainer.tell(message=str(error))


def holds_nothing(argument: str, report, stop) -> None:
    """More trainers than tables: one asks, and is asked for nothing."""
    with trainer_of(argument, report, FEW_TABLES) as (trainer, sharded):
        weights = gather(trainer, sharded, 0)
        rows_T = [4] * trainer.trainers
        ids_FB, gradient_BFD = batch(0, sum(rows_T), FEW_TABLES)
        mine = trainer.mine(rows_T)
        sharded.set_lr(0.5)
        out_BFD = sharded(Bags(ids_FB[:, mine].contiguous()))
        out_BFD.backward(gradient_BFD[mine])
        holders = {shards[0].trainer for shards in sharded.shards.values()}
        after = gather(trainer, sharded, 0)
        difference = 0.0
        for table, name in enumerate(FEW_TABLES.table_names if weights else ()):
            expected = weights[f"{name}.weight"].clone()
            if trainer.number == 0:
                assert torch.equal(out_BFD[:, table].detach(), expected[ids_FB[table, mine]])
            expected.index_add_(0, ids_FB[table], gradient_BFD[:, table], alpha=-0.5)
            difference = max(difference, (after[f"{name}.weight"] - expected).abs().max().item())
        trainer.tell(holders=len(holders), difference=difference)
