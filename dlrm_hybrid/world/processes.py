"""The backend of a world whose ranks are processes of this machine."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from functools import reduce
from itertools import count
from pathlib import Path
from typing import Any, final

import numpy as np
from torch import Tensor
from typing_extensions import override

from dlrm_hybrid.arrays import Float32s
from dlrm_hybrid.bags import Bags
from dlrm_hybrid.data.loader import Batch
from dlrm_hybrid.model.tensors import whole
from dlrm_hybrid.outside import path_of
from dlrm_hybrid.parallel.messages import piece_of, tensors_of, values_of
from dlrm_hybrid.parallel.step import StepMetrics
from dlrm_hybrid.run.assembly import build
from dlrm_hybrid.run.rank.process import Rank
from dlrm_hybrid.run.request import TrainTask
from dlrm_hybrid.train.engine import ignore
from dlrm_hybrid.wire.frame import Frame
from dlrm_hybrid.world.backend import Backend, Counts, OwnOrder, added
from dlrm_hybrid.world.batches import tensors_of_batch
from dlrm_hybrid.world.ranks import Tensors, WorldRanks
from dlrm_hybrid.world.settings import Settings


@final
class Processes(Backend):
    """All ranks of a world; see `World.processes`.

    Args:
        settings: settings of the world.
        folder: folder for checkpoints, and logs of ranks.
        resume_from: a run folder or checkpoint to go on from, or None.
    """

    def __init__(self, settings: Settings, folder: Path, resume_from: Path | None) -> None:
        self._topology = build.topology(settings.config)
        self._meeting = Path(tempfile.mkdtemp(prefix="m", dir=folder))
        task = TrainTask(
            run_folder=str(folder),
            resume_from=resume_from and str(resume_from),
            rendezvous=str(self._meeting / "ranks"),
        )
        common = {
            "values": settings.values,
            "of_rows": settings.spec.of_rows,
            "orders": str(self._meeting / "o"),
        }
        ranks = [
            Rank(
                index=index,
                name=name,
                argument=json.dumps({"task": asdict(replace(task, rank=index)), **common}),
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
    def learn(self, batches: Sequence[Batch], meanwhile: Callable[[], None]) -> StepMetrics:
        metrics = self._measured("learn", self._parts(batches), meanwhile)
        self._steps += 1
        return metrics

    @override
    def drain(self) -> StepMetrics:
        return self._measured("drain")

    @override
    def begin_evaluation(self) -> None:
        self._ranks.ask("begin_evaluation")

    @override
    def predict(self, batches: Sequence[Batch]) -> list[Float32s]:
        topology = self._topology
        nothing = [batches[0].part(slice(0))] * (topology.trainers - len(batches))
        tensors = self._parts([*batches, *nothing])
        answers = self._ranks.ask("predict", {"number": next(self._predicted)}, tensors)
        last = [topology.worker(trainer, topology.stages - 1) for trainer in range(len(batches))]
        return [tensors_of(answers[rank])["logits"].numpy() for rank in last]

    @override
    def save(self) -> Path:
        answers = self._ranks.ask("save")
        return Path(next(value for answer in answers.values() if (value := _value(answer))))

    @override
    def tensors(self) -> dict[str, Tensor]:
        return whole(map(piece_of, self._ranks.parts("state")))

    @override
    def ask(self, order: OwnOrder, values: Mapping[str, Any]) -> list[Any]:
        request = {"order": path_of(order), "values": values}
        return [_value(answer) for answer in self._ranks.ask("ask", request).values()]

    @override
    def counts(self) -> Counts:
        return added(_value(answer) for answer in self._ranks.ask("counts").values())

    @override
    def close(self) -> None:
        self._ranks.close()
        shutil.rmtree(self._meeting, ignore_errors=True)

    def _measured(
        self,
        order: str,
        tensors: dict[int, Tensors] | None = None,
        meanwhile: Callable[[], None] = ignore,
    ) -> StepMetrics:
        answers = self._ranks.ask(order, tensors=tensors, meanwhile=meanwhile)
        several = (StepMetrics(**values_of(answer)["metrics"]) for answer in answers.values())
        return reduce(StepMetrics.plus, several)

    def _parts(self, batches: Sequence[Batch]) -> dict[int, Tensors]:
        """The parts that each worker reads of its trainer's batch, by rank."""
        parts: dict[int, Tensors] = {}
        for trainer, batch in enumerate(batches):
            rows = len(batch.label_B)
            for stage in range(self._topology.stages):
                part = batch
                if stage:
                    part = replace(part, dense_BI=np.empty((rows, 0), np.float32))
                if stage != self._topology.interaction_stage:
                    part = replace(part, bags=Bags(np.empty((0, rows), np.int64)))
                parts[self._topology.worker(trainer, stage)] = tensors_of_batch(part)
        return parts


def _value(answer: Frame) -> Any:
    return values_of(answer)["value"]
