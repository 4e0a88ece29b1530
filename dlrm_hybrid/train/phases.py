"""The functions of a run, each counted in its phase."""

from __future__ import annotations

from dataclasses import replace

from dlrm_hybrid.data.loader import LoaderState
from dlrm_hybrid.telemetry.metrics import BinaryScores
from dlrm_hybrid.telemetry.rank_meter import RankMeter
from dlrm_hybrid.telemetry.traffic import Phase
from dlrm_hybrid.train.checkpoint import Saved
from dlrm_hybrid.train.parts import Learned, Parts, Progress


def metered(parts: Parts, meter: RankMeter) -> Parts:
    """The same parts; the meter hears of every step, evaluation and checkpoint."""

    def learn(step: int, at: LoaderState) -> tuple[Learned, LoaderState]:
        learned = parts.learn(step, at)
        meter.step_done()
        return learned

    def evaluate() -> BinaryScores | None:
        with meter.within(Phase.EVALUATE):
            return parts.evaluate()

    def save(progress: Progress) -> Saved | None:
        with meter.within(Phase.CHECKPOINT):
            return parts.save(progress)

    return replace(parts, learn=learn, evaluate=evaluate, save=save)
