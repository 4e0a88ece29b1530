"""The training loop: batches in, events out, checkpoints meanwhile.

    for every step:
        meet the other processes; record the checkpoint that has become valid
        every `report_every`:     a point of the loss curve
        save and stop here if a signal asked for it     (SIGTERM, Ctrl-C)
        every `evaluate_every`:   scores on the validation part, or on the test part if there is
                                  none; one step after too many without a better one, the run ends
                                  or its learning rates are lowered
        if these scores are the best so far, every `checkpoint_every` steps, or `checkpoint_minutes`
        after the last one:       begin a checkpoint, once the last one is valid
        train on a batch, refuse a loss that is not finite
    at the end: meet, a point, a checkpoint; once it is valid, scores on all parts, added to it

One process of a run has it. Its engine trains all that is in this process, and gives the orders to
all others; `meet` adds their reports.
"""

from __future__ import annotations

import math
import time
from dataclasses import replace
from typing import final

from dlrm_hybrid.checkpoint.manifest import Score
from dlrm_hybrid.parallel.finite import check_loss
from dlrm_hybrid.parallel.step import StepMetrics
from dlrm_hybrid.telemetry.rank_meter import Interval, RankMeter
from dlrm_hybrid.telemetry.traffic import Phase
from dlrm_hybrid.train.engine import Engine
from dlrm_hybrid.train.patience import Course, monitored
from dlrm_hybrid.train.progress import Plan, Progress, is_due
from dlrm_hybrid.train.recorder import Recorder, reporting
from dlrm_hybrid.train.saver import CheckpointWriter
from dlrm_hybrid.train.signals import StopRequest, obey
from dlrm_hybrid.types import DivergedError, InterruptedRunError, PreemptedError, ScoredPart

NEVER = (-1, -1, -1)


@final
class Driver:
    """Drives the engine of one process from a run's progress to the end of its plan.

    Args:
        engine: trains in this process.
        plan: plan of the run.
        progress: progress of the run so far.
        saver: saves checkpoints.
        recorder: records and shows what happens.
        meter: meter of the process; counts every step, evaluation and checkpoint.
        stop: stop request of signals to this process.
    """

    def __init__(
        self,
        engine: Engine,
        plan: Plan,
        progress: Progress,
        *,
        saver: CheckpointWriter,
        recorder: Recorder,
        meter: RankMeter,
        stop: StopRequest,
    ) -> None:
        self.progress = progress
        self._engine, self._plan, self._saver = engine, plan, saver
        self._recorder, self._meter, self._stop = recorder, meter, stop
        self._ends_early = False
        self._saved = _moment(progress) if progress.step else NEVER
        self._save_at = self._next_save()

    def run(self) -> Progress:
        """Train to the end; returns the progress there.

        Raises:
            DivergedError: a loss is not finite, or a value that would be saved.
            PreemptedError: after SIGTERM, with a checkpoint saved.
            InterruptedRunError: after Ctrl-C, with a checkpoint saved.
        """
        try:
            self._to_the_end()
        except (PreemptedError, InterruptedRunError, DivergedError):
            self._recorder.stopped(self.progress)
            raise
        return self.progress

    def _to_the_end(self) -> None:
        """Run all steps and save the last checkpoint, also after a signal."""
        try:
            self._steps()
        except (PreemptedError, InterruptedRunError):
            self._recorder.stopping(self.progress)
            self._save()
            self._finish()
            raise
        self._finish()

    def _steps(self) -> None:
        """Run the remaining steps, with what is due between them."""
        plan = self._plan
        while True:
            self._drain()
            is_late = time.monotonic() >= self._save_at
            self.progress, decision = self._engine.meet(self.progress, plan, self._stop, is_late)
            step = self.progress.step
            if self._saver.pending and plan.meets(step):
                with self._meter.within(Phase.CHECKPOINT):
                    saved = self._saver.poll()
                if saved is not None:
                    self._recorder.saved(saved, 0.0)
            self._ends_early = decision.ends
            if decision.lowers:
                self._lower(step)
            at_end = step >= plan.steps or decision.ends
            if at_end or is_due(step, plan.report_every):
                self.progress = self._recorder.point(self.progress)
            else:
                self._recorder.tick(self.progress)
            obey(decision.severity)
            if at_end:  # a failure of the last evaluation must not cost the training
                self._save()
                self._finish()
            scored = [self._evaluate(part) for part in plan.evaluations(self.progress, at_end)]
            is_best = plan.saves_best(step) and any(scored)
            saves = is_due(step, plan.checkpoint_every) or decision.save or is_best
            if at_end or saves or step == self._saved[0]:
                self._save()
            if at_end:
                return
            self._step()

    def _evaluate(self, part: ScoredPart) -> bool:
        """Score the model on a part; scores on the plan's first part decide, others are recorded.

        Returns:
            Whether the scores are the best so far, on the part that decides.
        """
        start = time.perf_counter()
        with self._meter.within(Phase.EVALUATE):
            show = reporting(self._recorder.live, "evaluate", "rows")
            scores = self._engine.evaluate(part, self._stop, show)
        seconds = time.perf_counter() - start
        self._recorder.evaluated(self.progress, part, scores, seconds)
        if part != self._plan.parts[0]:
            self.progress = replace(self.progress, tested_step=self.progress.step)
            return False
        score = monitored(scores, part, self._plan.monitor)
        is_best = score is not None and score.is_best(self.progress.best)
        self.progress = replace(
            self.progress,
            evaluated_step=self.progress.step,
            score=score,
            best=score if is_best else self.progress.best,
            course=self._judged(score),
        )
        return is_best

    def _judged(self, score: Score | None) -> Course:
        """The course with this evaluation, unless the run ends: then it decides nothing."""
        course, patience = self.progress.course, self._plan.patience
        if patience is None or self._ends_early:
            return course
        return patience.after(course, score, self.progress.step)

    def _lower(self, step: int) -> None:
        self._engine.lower(step)
        self.progress = replace(self.progress, course=self.progress.course.lowered_at(step))

    def _save(self) -> None:
        """Begin a checkpoint of this step, or add scores to the one already there."""
        moment = _moment(self.progress)
        if moment == self._saved:
            return
        self._finish()
        with self._meter.within(Phase.CHECKPOINT):
            if self.progress.step == self._saved[0]:
                # Saved before its evaluation: at the end, or by a signal that ended the evaluation.
                self._saver.amend(self.progress)
            else:
                self._saver.save(self.progress)
        self._saved = moment
        self._save_at = self._next_save()

    def _finish(self) -> None:
        """Wait until the checkpoint under way is valid."""
        if self._saver.pending:
            start = time.perf_counter()
            with self._meter.within(Phase.CHECKPOINT):
                saved = self._saver.finish()
            if saved is not None:
                self._recorder.saved(saved, time.perf_counter() - start)

    def _next_save(self) -> float:
        minutes = self._plan.checkpoint_minutes
        return time.monotonic() + 60 * minutes if minutes else math.inf

    def _step(self) -> None:
        progress = self.progress
        metrics, loader = self._engine.make_step(progress.step, progress.loader)
        self._meter.step_done()
        self.progress = Progress(  # `replace` would take twice as long
            step=progress.step + 1,
            samples=progress.samples + self._plan.samples_per_step,
            loader=loader,
            interval=self._with(metrics),
            evaluated_step=progress.evaluated_step,
            tested_step=progress.tested_step,
            score=progress.score,
            best=progress.best,
            batches=progress.batches,
            emptied=progress.emptied,
            course=progress.course,
        )

    def _drain(self) -> None:
        """Finish the batches in flight, once the last one has been read."""
        step = self.progress.step
        if step < self._plan.steps or self.progress.emptied == step:
            return
        metrics = self._engine.drain()
        if metrics is not None:
            interval = self._with(metrics)
            self.progress = replace(self.progress, interval=interval, emptied=step)

    def _with(self, metrics: StepMetrics) -> Interval:
        """The sums since the last point, with the metrics of a step added."""
        step, interval = self.progress.step, self.progress.interval
        check_loss(step, metrics.loss_sum, self._engine.schedule)
        return replace(
            interval,
            rows=interval.rows + metrics.rows,
            loss_sum=interval.loss_sum + metrics.loss_sum,
            correct=interval.correct + metrics.correct,
        )


def _moment(progress: Progress) -> tuple[int, int, int]:
    """Identity of a checkpoint of this progress: its step, and the last evaluations."""
    return progress.step, progress.evaluated_step, progress.tested_step
