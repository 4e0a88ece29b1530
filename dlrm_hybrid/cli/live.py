"""Events of a training run as a bar and lines."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import final

from dlrm_hybrid.cli.figures import quantity
from dlrm_hybrid.cli.terminal import Bar, Terminal
from dlrm_hybrid.telemetry.events import Event, Kind
from dlrm_hybrid.telemetry.markdown import MISSING

FEW_REPEATS = 5  # the best of so few may be a bad one
SAVES_FROM = 1.05  # below, the ratio would read 1.0


@final
class LiveWork:
    """Shows how far something is that a rank works at for a while; used inside a `with`."""

    def __init__(self, terminal: Terminal) -> None:
        self._terminal = terminal
        self._stack = ExitStack()
        self._task = ""
        self._count: Callable[[float, float | None], None] | None = None

    def __enter__(self) -> LiveWork:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def show(self, event: Event) -> None:
        """Take one event; one of another kind than WORKING says that the work is over."""
        values = event.values
        if event.kind is not Kind.WORKING or values["task"] != self._task:
            self._stack.close()
            self._task, self._count = "", None
        if event.kind is not Kind.WORKING:
            return
        if self._count is None:
            self._task = values["task"]
            self._count = self._stack.enter_context(
                self._terminal.counter(self._task, values["unit"], is_late=True)
            )
        self._count(values["done"], values["total"])


class LiveTraining:
    """Shows each event as it comes; used inside a `with`."""

    def __init__(self, terminal: Terminal) -> None:
        self._terminal = terminal
        self._stack = ExitStack()
        self._work = LiveWork(terminal)
        self._bar: Bar | None = None
        self._steps_total = 0
        self._before: tuple[float, int] | None = None
        self._speed = 0.0
        self._sent: tuple[float, float] | None = None

    def __enter__(self) -> LiveTraining:
        return self

    def __exit__(self, *_: object) -> None:
        with self._work:
            pass
        self._stack.close()

    def show(self, event: Event) -> None:
        """Take one event."""
        self._work.show(event)
        values = event.values
        if event.kind is Kind.STARTED:
            self._stack.close()  # the bar of an attempt before
            self._before, self._speed, self._sent = None, 0.0, None
            self._steps_total = values["steps_total"]
            self._bar = self._stack.enter_context(self._terminal.bar("train"))
            self._terminal.line(
                f"{values['train_rows']:,} training rows, {values['test_rows']:,} test rows, "
                f"{values['steps_total']:,} steps of {values['samples_per_step']} samples"
                + (f", from step {event.step:,}" if event.step else "")
            )
            speed, repeats = values.get("bfloat16_speed"), values.get("bfloat16_repeats")
            if speed is not None and speed < 1:
                few = (
                    f" (best of {repeats}: a rough figure)"
                    if repeats and repeats < FEW_REPEATS
                    else ""
                )
                self._terminal.line(
                    f"precision=bfloat16: its matrix products run at {speed:.2f} times the speed "
                    f"of float32 here{few}; precision=float32 is faster"
                )
            if changed := values.get("changed_arithmetic"):
                self._terminal.line(
                    f"no longer bit-identical to an uninterrupted run: {', '.join(changed)}"
                )
            if event.step >= values["steps_total"]:
                self._terminal.line("all steps are already trained; only evaluating")
        elif event.kind is Kind.STOPPING:
            self._terminal.line(
                f"stopping: saving a checkpoint at step {event.step:,} "
                "(Ctrl-C again to quit without saving)"
            )
        elif event.kind in (Kind.PROGRESS, Kind.TICK):
            self._progress(event)
        elif event.kind is Kind.EVALUATED:
            auc = MISSING if values["auc"] is None else f"{values['auc']:.4f}"
            self._terminal.line(
                f"step {event.step:,}: test log-loss {values['log_loss']:.4f}, AUC {auc}, "
                f"accuracy {values['accuracy']:.2%} (base rate {values['base_rate']:.2%})"
            )

    def _progress(self, event: Event) -> None:
        samples = event.values["samples"]
        if self._before is not None and event.time_seconds > self._before[0]:
            seconds, rows = event.time_seconds - self._before[0], samples - self._before[1]
            # A moving mean: one slow moment does not make the figure jump.
            self._speed += (rows / seconds - self._speed) * (0.3 if self._speed else 1.0)
        self._before = (event.time_seconds, samples)
        if event.values["sent_bytes"]:
            sent, dense = event.values["sent_bytes"], event.values["dense_equivalent_bytes"]
            self._sent = (sent / event.values["sent_rows"], dense / sent)
        if self._bar is not None:
            self._bar.update(event.step, self._steps_total, self._text(event))

    def _text(self, event: Event) -> str:
        """Fits beside a bar in 80 columns; in 100 every figure is there, in 120 with its unit."""
        room, full = self._terminal.has_room, self._terminal.is_full
        of_total = f"/{self._steps_total:,}" if full else ""
        parts = [f"{'step ' if room else ''}{event.step:,}{of_total}"]
        parts.append(f"loss {event.values['loss']:.4f}")
        if full:
            parts.append(f"{'accuracy' if room else 'acc'} {event.values['accuracy']:.2%}")
        parts.append(f"{self._speed:,.0f}{' samples' if room else ''}/s")
        if self._sent is not None and self._speed:
            bytes_per_sample, ratio = self._sent
            rate = f"{quantity(bytes_per_sample * self._speed)}B/s"
            saved = f" {ratio:.1f}×{' less' if room else ''}"
            parts.append(rate + (saved if ratio >= SAVES_FROM else ""))
        return "  ".join(parts)
