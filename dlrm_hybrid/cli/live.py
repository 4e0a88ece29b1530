"""Events of a training run as a bar and lines."""

from __future__ import annotations

from contextlib import ExitStack

from dlrm_hybrid.cli.terminal import Bar, Terminal
from dlrm_hybrid.telemetry.events import Event, Kind


class LiveTraining:
    """Shows each event as it comes; used inside a `with`."""

    def __init__(self, terminal: Terminal) -> None:
        self._terminal = terminal
        self._stack = ExitStack()
        self._bar: Bar | None = None
        self._steps_total = 0
        self._before: tuple[float, int] | None = None
        self._speed = 0.0

    def __enter__(self) -> LiveTraining:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def show(self, event: Event) -> None:
        """Take one event."""
        values = event.values
        if event.kind is Kind.STARTED:
            self._stack.close()  # the bar of an attempt before
            self._before, self._speed = None, 0.0
            self._steps_total = values["steps_total"]
            self._bar = self._stack.enter_context(self._terminal.bar("train"))
            self._terminal.line(
                f"{values['train_rows']:,} training rows, {values['test_rows']:,} test rows, "
                f"{values['steps_total']:,} steps of {values['samples_per_step']}"
                + (f", from step {event.step:,}" if event.step else "")
            )
        elif event.kind in (Kind.PROGRESS, Kind.TICK):
            self._progress(event)
        elif event.kind is Kind.EVALUATED:
            auc = "–" if values["auc"] is None else f"{values['auc']:.4f}"
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
        if self._bar is not None:
            text = (
                f"step {event.step:,}/{self._steps_total:,}  loss {event.values['loss']:.4f}  "
                f"accuracy {event.values['accuracy']:.2%}  {self._speed:,.0f} samples/s"
            )
            self._bar.update(event.step, self._steps_total, text)
