"""A world whose ranks are processes of this machine."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Collection, Sequence
from dataclasses import asdict, replace
from itertools import count
from pathlib import Path
from typing import Any, final

import numpy as np
from torch import Tensor
from typing_extensions import override

from dlrm_hybrid.bags import Bags
from dlrm_hybrid.checkpoint.reader import open_checkpoint
from dlrm_hybrid.data.loader import Batch
from dlrm_hybrid.parallel.step import StepMetrics
from dlrm_hybrid.run.assembly import build
from dlrm_hybrid.run.rank.process import Rank
from dlrm_hybrid.run.request import TrainTask
from dlrm_hybrid.train.evaluation import without_rows
from dlrm_hybrid.types import DataError
from dlrm_hybrid.world.body import WEIGHTS, Body, Counts, Floats, added
from dlrm_hybrid.world.orders import Arrays, Message, arrays_of
from dlrm_hybrid.world.ranks import WorkersError, WorldRanks
from dlrm_hybrid.world.rows.batches import Loader
from dlrm_hybrid.world.rows.loaders import NamedLoader, require_guard
from dlrm_hybrid.world.settings import Settings


@final
class Processes(Body):
    """All ranks of a world; see `World.processes`.

    Args:
        settings: of the world.
        loader: of batches, or None.
        folder: for checkpoints, and logs of ranks.
        resume_from: a run folder or checkpoint to go on from, or None.
    """

    def __init__(
        self, settings: Settings, loader: Loader | None, folder: Path, resume_from: Path | None
    ) -> None:
        require_guard()
        named = None if loader is None else NamedLoader.of(loader)
        self._topology = build.topology(settings.config)
        self._tables = len(settings.spec.table_rows)
        self._meeting = Path(tempfile.mkdtemp(prefix="m", dir=folder))
        task = TrainTask(
            run_folder=str(folder),
            prepared="",
            resume_from=None if resume_from is None else str(resume_from),
            rank=0,
            attempt=0,
            rendezvous=str(self._meeting / "ranks"),
        )
        known = {
            "values": settings.values,
            "table_rows": settings.spec.table_rows,
            "orders": str(self._meeting / "o"),
            "loader": None if named is None else named.to_json(),
        }
        ranks = [
            Rank(
                index=index,
                name=name,
                argument=json.dumps({"task": asdict(replace(task, rank=index)), **known}),
                log_folder=folder / "log",
            )
            for index, name in enumerate(build.rank_names(settings.config))
        ]
        self._ranks = WorldRanks(ranks, self._topology.num_workers, self._meeting / "o")
        self._steps = self._ranks.steps
        self._predicted = count()

    @property
    @override
    def steps(self) -> int:
        return self._steps

    @override
    def fill(self) -> bool:
        try:
            answers = self._ranks.ask("fill")
        except WorkersError as fault:
            self._skip({rank // self._topology.stages for rank in fault.workers})
            raise
        of_trainers: dict[int, set[str | None]] = {}
        for rank, answer in answers.items():
            own = of_trainers.setdefault(rank // self._topology.stages, set())
            own.add(answer.values["checksum"])
        for trainer, checksums in of_trainers.items():
            if len(checksums) > 1:
                title = answers[self._topology.worker(trainer, 0)].values["title"]
                self._skip({trainer})
                raise DataError(
                    f"trainer {trainer}, {title}: its stages have different "
                    "batches. Each makes the loader for itself, which must give the same batches "
                    "every time: seed what shuffles them"
                )
        return all(None not in one for one in of_trainers.values())

    def _skip(self, trainers: Collection[int]) -> None:
        """Drop what stages of these trainers have read where others of the same could not."""
        self._ranks.ask("skip", {"trainers": sorted(trainers)})

    @override
    def end_epoch(self) -> list[int]:
        answers = self._ranks.ask("end_epoch")
        stages = self._topology.stages
        return [rank // stages for rank in sorted(answers)[::stages] if _value(answers[rank])]

    @override
    def learn(self, batches: Sequence[Batch] | None) -> StepMetrics:
        metrics = self._measured("learn", None if batches is None else self._parts(batches))
        self._steps += 1
        return metrics

    @override
    def drain(self) -> StepMetrics:
        return self._measured("drain", None)

    @override
    def begin_evaluation(self) -> None:
        self._ranks.ask("begin_evaluation")

    @override
    def predict(self, batches: Sequence[Batch]) -> list[Floats]:
        topology = self._topology
        nothing = [without_rows(batches[0])] * (topology.trainers - len(batches))
        arrays = self._parts([*batches, *nothing])
        answers = self._ranks.ask("predict", {"number": next(self._predicted)}, arrays)
        last = [topology.worker(one, topology.stages - 1) for one in range(len(batches))]
        return [answers[rank].arrays["logits"] for rank in last]

    @override
    def save(self) -> Path:
        answers = self._ranks.ask("save")
        return Path(next(value for one in answers.values() if (value := _value(one))))

    @override
    def tensors(self) -> dict[str, Tensor]:
        folder = self.save()
        checkpoint = open_checkpoint(folder)
        found = checkpoint.tensors(checkpoint.names(*WEIGHTS))
        shutil.rmtree(folder, ignore_errors=True)
        return found

    @override
    def counts(self) -> Counts:
        return added(_value(one) for one in self._ranks.ask("counts").values())

    @override
    def close(self) -> None:
        self._ranks.close()
        shutil.rmtree(self._meeting, ignore_errors=True)

    def _measured(self, order: str, arrays: dict[int, Arrays] | None) -> StepMetrics:
        found = [one.values for one in self._ranks.ask(order, arrays=arrays).values()]
        return StepMetrics(
            loss_sum=sum(one["loss_sum"] for one in found),
            correct=sum(one["correct"] for one in found),
            rows=sum(one["rows"] for one in found),
        )

    def _parts(self, batches: Sequence[Batch]) -> dict[int, Arrays]:
        """What each worker reads of the batch of its trainer, by rank."""
        found: dict[int, Arrays] = {}
        for trainer, batch in enumerate(batches):
            rows = len(batch.label_B)
            for stage in range(self._topology.stages):
                part = batch
                if stage:
                    part = replace(part, dense_BI=np.empty((rows, 0), np.float32))
                if stage != self._topology.interaction_stage:
                    part = replace(part, bags=Bags(np.empty((0, rows), np.int64)))
                found[self._topology.worker(trainer, stage)] = arrays_of(part)
        return found


def _value(answer: Message) -> Any:
    return answer.values["value"]
