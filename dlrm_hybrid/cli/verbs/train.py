"""The verb `train`: shows a run's events as a bar and lines, then tables of its results."""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import mean
from typing import Any, final

from dlrm_hybrid.checkpoint.folder import BEST_FILE, CHECKPOINTS
from dlrm_hybrid.checkpoint.manifest import Score
from dlrm_hybrid.cli.terminal import FULL_COLUMNS, ROOM_COLUMNS, Terminal, quantity
from dlrm_hybrid.config.identity import with_value
from dlrm_hybrid.config.validate import faults_text, validate
from dlrm_hybrid.report.table import MISSING, Table, cell
from dlrm_hybrid.run.display import Bar, Count
from dlrm_hybrid.run.following import follow
from dlrm_hybrid.run.request import Request
from dlrm_hybrid.run.training import train
from dlrm_hybrid.telemetry.events import Event, Kind, part_of
from dlrm_hybrid.telemetry.spans import Span
from dlrm_hybrid.telemetry.summary import role_of, role_order
from dlrm_hybrid.types import ConfigError, ScoredPart

FEW_REPEATS = 5  # the best of fewer repeats is a rough figure
SAVES_FROM = 1.05  # a smaller ratio would read 1.0
WIDE = 100  # columns of a terminal with room for every span
NARROW_SPANS = (Span.COMPUTE, Span.EMBEDDING, Span.ENCODE, Span.DECODE, Span.WAIT)
SHORT = {Span.EMBEDDING: "embed"}

Values = Mapping[str, Any]


def run(request: Request) -> int:
    """Train as configured and return the exit code of the run."""
    terminal, exports = Terminal(), request.config.export.output
    if request.config.data.follow is not None:
        publish = None if exports is None else partial(_export, request, Path(exports), terminal)
        return follow(request, terminal, FileView(terminal), publish)
    if exports is not None:
        fault = f"export.output = {exports}: `train` exports only what it learns of data.follow"
        raise ConfigError(faults_text([fault]))
    return train(request, terminal, TerminalView(terminal))


def _export(request: Request, folder: Path, terminal: Terminal, run: Path) -> None:
    """Export the model of a file's run to a folder in this one, unless it is there."""
    from dlrm_hybrid.export.writing import export  # imports torch

    if (folder / run.name).exists():
        return
    values = with_value(request.values, "export.checkpoint", str(run))
    values = with_value(values, "export.output", str(folder / run.name))
    done = export(Request(validate(values), values, request.folder, ()), terminal)
    terminal.line(f"wrote {done.folder}")


@final
@dataclass(frozen=True, slots=True)
class TerminalView:
    """Shows one training run in a terminal; see `TrainingView`."""

    terminal: Terminal

    @contextmanager
    def live(self) -> Generator[Callable[[Event], None], None, None]:
        """Show events inside a `with`."""
        with LiveTraining(self.terminal) as live:
            yield live.show

    def result(self, path: Path, summary: Values, teacher: Values | None) -> None:
        """Show scores, time by role, bytes by class and speed."""
        steps, planned = summary["steps"], summary["steps_planned"]
        if planned is not None and steps < planned:
            self.terminal.line(
                f"ended after {steps:,} of {planned:,} steps: scores got no better (train.patience)"
            )
        if validation := summary.get("validation"):
            show_scores(self.terminal, "validation part", validation, None)
        if not validation or summary["test"]["loss"] is not None:
            show_scores(self.terminal, "test part", summary["test"], teacher)
        show_run(self.terminal, summary)
        if best := summary["best"]:
            score = Score(part=best["part"], monitor=best["monitor"], value=best["value"])
            folder = path.parent / CHECKPOINTS / BEST_FILE
            self.terminal.line(f"best: step {best['step']:,}, {score.text}: {folder}")
        self.terminal.line(f"summary {path}")


@final
@dataclass(frozen=True, slots=True)
class FileView:
    """Shows the runs of followed files: each as any run, its result in a line."""

    terminal: Terminal

    def live(self) -> AbstractContextManager[Callable[[Event], None]]:
        """Show events inside a `with`."""
        return TerminalView(self.terminal).live()

    def result(self, path: Path, summary: Values, teacher: Values | None) -> None:
        """Show the scores before the file was learned, and the speed."""
        scores, speed = summary["test"], summary["samples_per_second"]
        gauc = f", GAUC {scores['gauc']:.4f}" if "gauc" in scores else ""
        rate = "" if speed is None else f", {speed:,.0f} samples/s"
        self.terminal.line(
            f"{path.parent.name}: log-loss {scores['loss']:.4f}, AUC {cell(scores['auc'])}{gauc} "
            f"before, then {summary['samples']:,} samples learned{rate}"
        )


@final
class LiveWork:
    """Shows the progress of a rank's long task, such as an evaluation; used in a `with`."""

    def __init__(self, terminal: Terminal) -> None:
        self._terminal = terminal
        self._stack = ExitStack()
        self._task = ""
        self._count: Count | None = None

    def __enter__(self) -> LiveWork:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def show(self, event: Event) -> None:
        """Take an event; one of another kind than WORKING ends the task."""
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


@final
class LiveTraining:
    """Shows each event of a run as it comes; used in a `with`."""

    def __init__(self, terminal: Terminal) -> None:
        self._terminal = terminal
        self._stack = ExitStack()
        self._attempt = ExitStack()  # closed when the next attempt starts
        self._work = LiveWork(terminal)
        self._bar: Bar | None = None
        self._steps_total = 0
        self._before: tuple[float, int] | None = None
        self._speed = 0.0
        self._sent: tuple[float, float] | None = None

    def __enter__(self) -> LiveTraining:
        self._stack.enter_context(self._attempt)
        self._stack.enter_context(self._work)
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def show(self, event: Event) -> None:
        """Show what an event of a rank says."""
        self._work.show(event)
        values = event.values
        if event.kind is Kind.STARTED:
            self._start(event)
        elif event.kind is Kind.STOPPING:
            self._terminal.line(
                f"stopping: saving a checkpoint at step {event.step:,} "
                "(Ctrl-C again to quit without saving)"
            )
        elif event.kind in (Kind.PROGRESS, Kind.TICK):
            self._progress(event)
        elif event.kind is Kind.EVALUATED:
            loss = f"{part_of(event)} log-loss {values['log_loss']:.4f}"
            gauc = f", GAUC {values['gauc']:.4f}" if "gauc" in values else ""
            self._terminal.line(
                f"step {event.step:,}: {loss}, AUC {cell(values['auc'])}{gauc}, "
                f"accuracy {values['accuracy']:.2%} (base rate {values['base_rate']:.2%})"
                f"{_labels_text(values)}"
            )

    def _start(self, event: Event) -> None:
        values = event.values
        self._attempt.close()
        self._before, self._speed, self._sent = None, 0.0, None
        self._steps_total = values["steps_total"]
        self._bar = self._attempt.enter_context(self._terminal.bar("train"))
        rows = {part: values.get(f"{part}_rows") for part in ScoredPart}
        scored = ", ".join(f"{count:,} {part} rows" for part, count in rows.items() if count)
        self._terminal.line(
            f"{values['train_rows']:,} training rows, {scored}, "
            f"{values['steps_total']:,} steps of {values['samples_per_step']} samples"
            + (f", from step {event.step:,}" if event.step else "")
        )
        if left := values["train_rows"] % max(1, values["samples_per_step"]):
            self._terminal.line(f"{left:,} rows do not fill a batch and are left out of each epoch")
        speed, repeats = values.get("bfloat16_speed"), values.get("bfloat16_repeats")
        if speed is not None and speed < 1:
            is_rough = repeats and repeats < FEW_REPEATS
            few = f" (best of {repeats}: a rough figure)" if is_rough else ""
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

    def _progress(self, event: Event) -> None:
        samples = event.values["samples"]
        if self._before is not None and event.time_seconds > self._before[0]:
            seconds, rows = event.time_seconds - self._before[0], samples - self._before[1]
            # A moving mean, so that one slow moment does not make the figure jump.
            self._speed += (rows / seconds - self._speed) * (0.3 if self._speed else 1.0)
        self._before = (event.time_seconds, samples)
        if event.values["sent_bytes"]:
            sent, dense = event.values["sent_bytes"], event.values["dense_equivalent_bytes"]
            self._sent = (sent / event.values["sent_rows"], dense / sent)
        if self._bar is not None:
            self._bar.update(event.step, self._steps_total, self._text(event))

    def _text(self, event: Event) -> str:
        """The text beside the bar: fits 80 columns; 100 have every figure, 120 the units' names."""
        room, full = self._terminal.fits(ROOM_COLUMNS), self._terminal.fits(FULL_COLUMNS)
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


def _labels_text(values: Values) -> str:
    """The scores of each of several labels, in a line; empty for one label."""
    shown = [
        f"{name} {x['log_loss']:.4f}" + ("" if x["auc"] is None else f" AUC {x['auc']:.4f}")
        for name, x in values.get("labels", {}).items()
    ]
    return f"; {', '.join(shown)}" if shown else ""


def show_scores(terminal: Terminal, title: str, scores: Values, teacher: Values | None) -> None:
    """Show a table of scores: the model's and, for synthetic rows, the best possible ones.

    Of several labels each has a row, below that of their weighted sum.
    """
    columns = {
        **{"loss": "log-loss", "auc": "AUC", "gauc": "GAUC", "accuracy": "accuracy"},
        **{"normalized_entropy": "NE", "base_rate": "clicks", "calibration": "calibration"},
    }
    names = [name for name in columns if name != "gauc" or name in scores]
    several: Values = scores.get("labels", {})
    rows = [["model", *(cell(scores.get(name)) for name in names)]]
    if several:
        rows = [["weighted sum", cell(scores["loss"]), *[""] * (len(names) - 1)]]
    for label, figures in several.items():
        named = {"loss": figures.get("log_loss"), **figures}
        rows.append([label, *(cell(named.get(name)) for name in names)])
    if teacher is not None:
        rows.append(["Bayes optimum", *(cell(teacher.get(name)) for name in names)])
    terminal.table(Table((title, *(columns[name] for name in names)), rows))


def show_run(terminal: Terminal, summary: Values) -> None:
    """Show time by role, bytes by class and speed, as far as they were measured."""
    show_roles(terminal, list(summary["roles"].values()))
    if summary["sync"] is not None:
        show_staleness(terminal, summary["sync"])
    speed, cpu = summary["samples_per_second"], summary["cpu"]["utilization"]
    if speed is None:
        terminal.line("bytes and time are those of steps after warm-up; this run has none")
    elif summary["network"]["by_class"]:
        show_traffic(terminal, summary["network"])
    show_unknown_peers(terminal, summary["network"])
    steps = summary["step_milliseconds"]
    if steps["steps"]:
        figures = (f"{name} {steps[name]:,.1f}" for name in ("p50", "p95", "p99"))
        terminal.line(f"milliseconds a step: {', '.join(figures)}")
    if speed is not None:
        used = "" if cpu is None else f", CPU {cpu:.0%}"  # None: no step after the warm-up
        terminal.line(f"{summary['samples']:,} samples, {speed:,.0f} samples/s{used}")


def show_roles(terminal: Terminal, roles: Sequence[Values]) -> None:
    """Show a table of each role's time by span, CPU use and bytes sent.

    The workers of a stage are one role. Shares of time are means over its ranks, CPU is percent of
    a core per rank, bytes are of all ranks.
    """
    by_role: dict[str, list[Values]] = {}
    for rank in roles:
        if rank["cpu_utilization"] is not None:
            by_role.setdefault(role_of(rank["role"]), []).append(rank)
    wide = terminal.console.width >= WIDE
    shown = tuple(Span) if wide else NARROW_SPANS
    rows: list[list[str]] = []
    for role in sorted(by_role, key=role_order):
        ranks = by_role[role]
        shares = {span: mean(_share(rank, span) for rank in ranks) for span in Span}
        sent = [rank["bytes_sent"] for rank in ranks if rank["bytes_sent"] is not None]
        cells = [f"{shares[span]:.0%}" for span in shown]
        if not wide:
            cells.append(f"{sum(shares[span] for span in Span if span not in shown):.0%}")
        cells.append(f"{mean(rank['cpu_utilization'] for rank in ranks):.0%}")
        cells.append(f"{quantity(sum(sent))}B" if sent else MISSING)
        rows.append([role, *cells])
    names = [SHORT.get(span, span.value) for span in shown] + ([] if wide else ["other"])
    if rows:
        terminal.table(Table(("role", *names, "CPU", "sent"), rows))


def show_staleness(terminal: Terminal, sync: Values) -> None:
    """Show the staleness of pushes, if counted; by trainer, as the mean hides a slow one."""
    staleness = sync["staleness"]
    means = {trainer: figures["mean"] for trainer, figures in staleness["by_trainer"].items()}
    if means:
        slowest = max(means, key=lambda trainer: means[trainer])
        terminal.line(
            f"staleness of pushes: mean {staleness['mean']:.1f}, p95 {staleness['p95']:,}, "
            f"max {staleness['max']:,}; by trainer {min(means.values()):.1f} to "
            f"{means[slowest]:.1f} (trainer {slowest})"
        )


def show_traffic(terminal: Terminal, network: Values) -> None:
    """Show a table of the bytes sent while training, by class, beside their size as plain float32.

    If a class is not counted there is neither a sum nor bytes per sample.
    """
    tallies, per_sample = dict(network["by_class"]), network["bytes_per_sample"]
    if per_sample is not None:
        tallies["all"] = {
            "messages": sum(tally["messages"] for tally in tallies.values()),
            "bytes": network["bytes_total"],
            "dense_equivalent_bytes": network["dense_equivalent_bytes"],
        }
    rows = [
        [
            name.replace("_", " "),
            f"{t['messages']:,}",
            f"{quantity(t['bytes'])}B",
            f"{quantity(t['dense_equivalent_bytes'])}B",
            _times(t["dense_equivalent_bytes"], t["bytes"]),
            f"{t['bytes'] / network['bytes_total'] * per_sample:,.0f}" if per_sample else MISSING,
        ]
        for name, t in tallies.items()
    ]
    columns = ("sent in training", "messages", "sent", "dense", "dense ÷ sent", "B/sample")
    terminal.table(Table(columns, rows))


def show_unknown_peers(terminal: Terminal, network: Values) -> None:
    """Show a line if unknown peers have connected; the logs name them and the rank they reached."""
    messages, connections = network["foreign_messages"], network["refused_connections"]
    if messages or connections:
        terminal.line(
            f"rejected from outside the run: {messages:,} messages, {connections:,} connections"
        )


def _share(rank: Values, span: Span) -> float:
    spans = rank["seconds_by_span"]
    return spans[span] / (sum(spans.values()) or 1.0)


def _times(dense_bytes: int, sent_bytes: int) -> str:
    return f"{dense_bytes / sent_bytes:.1f}×" if dense_bytes and sent_bytes else MISSING
