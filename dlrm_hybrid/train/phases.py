"""The functions of a run, each counted in its phase."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import final

from dlrm_hybrid.checkpoint.commit import Saved
from dlrm_hybrid.data.loader import LoaderState
from dlrm_hybrid.telemetry.metrics import BinaryScores
from dlrm_hybrid.telemetry.rank_meter import RankMeter
from dlrm_hybrid.telemetry.traffic import Phase
from dlrm_hybrid.train.parts import CheckpointWriter, Learned, Parts, Progress


def metered(parts: Parts, meter: RankMeter) -> Parts:
    """The same parts; the meter hears of every step, evaluation and checkpoint."""

    def learn(step: int, at: LoaderState) -> tuple[Learned, LoaderState]:
        learned = parts.learn(step, at)
        meter.step_done()
        return learned

    def evaluate() -> BinaryScores | None:
        with meter.within(Phase.EVALUATE):
            return parts.evaluate()

    saver = _MeteredSaver(parts.saver, meter)
    return replace(parts, learn=learn, evaluate=evaluate, saver=saver)


@final
@dataclass(frozen=True, slots=True)
class _MeteredSaver:
    """A `CheckpointWriter`; what its threads do meanwhile belongs to no phase of their own."""

    inner: CheckpointWriter
    meter: RankMeter

    @property
    def pending(self) -> bool:
        return self.inner.pending

    def save(self, progress: Progress) -> None:
        with self.meter.within(Phase.CHECKPOINT):
            self.inner.save(progress)

    def poll(self) -> Saved | None:
        with self.meter.within(Phase.CHECKPOINT):
            return self.inner.poll()

    def finish(self) -> Saved | None:
        with self.meter.within(Phase.CHECKPOINT):
            return self.inner.finish()

    def amend(self, progress: Progress) -> None:
        with self.meter.within(Phase.CHECKPOINT):
            self.inner.amend(progress)
