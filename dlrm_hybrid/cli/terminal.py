"""Output for the user: progress bars in a terminal, plain lines in a file or a pipe."""

from __future__ import annotations

import sys
import time
from collections import deque
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, ExitStack, contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn
from rich.segment import Segments

from dlrm_hybrid.report.table import Table
from dlrm_hybrid.run.display import Bar, Count
from dlrm_hybrid.types import printable

PLAIN_LINE_SECONDS = 5.0
QUIET_SECONDS = 2.0  # a late bar is shown only for work that takes longer
REFRESH_SECONDS = 0.25
MAX_WIDTH = 1000
ROOM_COLUMNS = 120
FULL_COLUMNS = 100
ETA_WINDOW_SECONDS = 20.0
ETA_AFTER_SECONDS = 1.0
UNITS = ("", "k", "M", "G", "T")
BYTES_PER_MB = 1e6


class Terminal:
    """Prints lines, tables and progress to standard output."""

    def __init__(
        self, console: Console | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        # Bound now, as a launched rank later redirects standard output to its log.
        self.console = console or Console(file=sys.stdout, highlight=False, soft_wrap=True)
        self.clock = clock
        self._open: Progress | None = None
        self._said: set[str] = set()

    def fits(self, columns: int) -> bool:
        """Whether a line may be so long: in a terminal as wide, a file or a pipe."""
        return not self.console.is_terminal or self.console.width >= columns

    def line(self, text: str) -> None:
        """Print a line, above a bar if there is one."""
        self.console.print(printable(text), markup=False)

    def line_once(self, text: str) -> None:
        """Print a line unless it was printed by `line_once` before."""
        if text not in self._said:
            self._said.add(text)
            self.line(text)

    def table(self, table: Table) -> None:
        """Print a table, as wide as its figures need."""
        # A table too wide for the terminal runs past its edge: truncated figures would be useless.
        unlimited = self.console.options.update(width=MAX_WIDTH)
        self.console.print(Segments(self.console.render(table.rich(), unlimited)))

    def bar(self, label: str, *, is_late: bool = False) -> AbstractContextManager[Bar]:
        """A bar with a text; see `Display.bar`."""
        if self.console.is_terminal:
            return _RichBar(self, label, is_late)
        return _PlainBar(self, label, is_late)

    @contextmanager
    def counter(
        self, label: str, unit: str, *, is_late: bool = False
    ) -> Generator[Count, None, None]:
        """A bar with a speed; see `Display.counter`."""
        with self.bar(label, is_late=is_late) as bar:
            # Work may begin long before its late bar, whose speed counts from the first report.
            yield _Counter(bar, self.clock, unit, None if is_late else (self.clock(), 0.0))

    @contextmanager
    def progress(self, moves: bool) -> Generator[Progress, None, None]:
        """The bars on the screen, drawn by a thread and left there if it `moves`.

        A nested bar takes the place of the outer one meanwhile.
        """
        if (outer := self._open) is not None:
            before = {task.id: task.visible for task in outer.tasks}
            for task in before:
                outer.update(task, visible=False)
            try:
                yield outer
            finally:
                for task in outer.task_ids:
                    if task not in before:
                        outer.remove_task(task)
                    elif before[task]:
                        outer.update(task, visible=True)
                outer.refresh()
            return
        with Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=10 if self.fits(ROOM_COLUMNS) else 6),
            TextColumn("{task.percentage:>3.0f}%  {task.fields[text]}"),
            TextColumn("ETA {task.fields[eta]}"),
            console=self.console,
            refresh_per_second=1 / REFRESH_SECONDS,
            auto_refresh=moves,
            transient=not moves,
        ) as opened:
            self._open = opened
            try:
                yield opened
            finally:
                self._open = None


class Eta:
    """Estimates the time to the end from the speed of the last seconds.

    Time before the first update, such as a start, a first step or an earlier attempt, does not
    count. Work that starts over, such as another stage, is measured from its start.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._total: float | None = None
        self._seen: deque[tuple[float, float]] = deque()

    def update(self, done: float, total: float | None) -> str:
        """The time left as `1:23:45` or `1:23`; `-:--` if it is not known."""
        if total != self._total or (self._seen and done < self._seen[-1][1]):
            self._seen.clear()
            self._total = total
        now = self._clock()
        self._seen.append((now, done))
        while len(self._seen) > 2 and now - self._seen[1][0] >= ETA_WINDOW_SECONDS:
            self._seen.popleft()
        seconds, progress = now - self._seen[0][0], done - self._seen[0][1]
        if total is not None and done >= total:
            return duration(0)
        if total is None or progress <= 0 or seconds < ETA_AFTER_SECONDS:
            return "-:--"
        return duration((total - done) * seconds / progress)


def quiet() -> Terminal:
    """A terminal that shows nothing."""
    return Terminal(Console(quiet=True))


class _RichBar:
    def __init__(self, terminal: Terminal, label: str, is_late: bool) -> None:
        self._terminal = terminal
        self._label = label
        self._is_late = is_late
        self._clock = terminal.clock
        self._begun = self._drawn = terminal.clock()
        self._eta = Eta(terminal.clock)
        self._stack = ExitStack()
        self._shown: tuple[Progress, TaskID] | None = None

    def __enter__(self) -> Bar:
        if not self._is_late:
            self._show()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def update(self, done: float, total: float | None, text: str) -> None:
        eta, now = self._eta.update(done, total), self._clock()
        if self._shown is not None and not self._shown[0].live.is_started:
            self._stack.close()  # the outer bar, in whose place it stood, has ended
            self._shown = None
        if self._shown is None and now - self._begun >= QUIET_SECONDS:
            self._show()
        if self._shown is None:
            return
        progress, task = self._shown
        progress.update(task, completed=done, total=total, text=text, eta=eta)
        if self._is_late and now - self._drawn >= REFRESH_SECONDS:
            progress.refresh()
            self._drawn = now

    def _show(self) -> None:
        progress = self._stack.enter_context(self._terminal.progress(moves=not self._is_late))
        task = progress.add_task(self._label, total=None, text="", eta="-:--")
        self._shown = progress, task


class _Counter:
    """Updates a bar with the speed since the stage, the file or a late bar's reports began."""

    def __init__(
        self, bar: Bar, clock: Callable[[], float], unit: str, begun: tuple[float, float] | None
    ) -> None:
        self._bar = bar
        self._clock = clock
        self._unit = unit
        self._begun = begun
        self._stage, self._done = "", 0.0
        self._speed = rate(0, 0, unit)

    def __call__(
        self, done: float, total: float | None, stage: str = "", unit: str | None = None
    ) -> None:
        now, unit = self._clock(), unit or self._unit
        if stage != self._stage:
            self._begun, self._speed = (now, done), rate(0, 0, unit)
        elif self._begun is None or done < self._done:  # another file, whose speed is unknown yet
            self._begun = now, done
        else:
            begun_seconds, before = self._begun
            self._speed = rate(done - before, now - begun_seconds, unit)
        self._stage, self._done = stage, done
        self._bar.update(done, total, f"{stage}: {self._speed}" if stage else self._speed)


class _PlainBar:
    """Prints a line every few seconds, and the last one unless the bar is late."""

    def __init__(self, terminal: Terminal, label: str, is_late: bool) -> None:
        self._terminal = terminal
        self._label = label
        self._is_late = is_late
        self._clock = terminal.clock
        self._shown = terminal.clock()
        self._eta = Eta(terminal.clock)
        self._pending = ""

    def __enter__(self) -> Bar:
        return self

    def __exit__(self, *_: object) -> None:
        if self._pending and not self._is_late:
            self._terminal.line(self._pending)

    def update(self, done: float, total: float | None, text: str) -> None:
        now = self._clock()
        share = done / total if total else 0.0
        eta = self._eta.update(done, total)
        self._pending = f"{self._label} {share:4.0%}  {text}" + (f"  ETA {eta}" if total else "")
        if now - self._shown >= PLAIN_LINE_SECONDS:
            self._terminal.line(self._pending)
            self._shown, self._pending = now, ""


def duration(seconds: float) -> str:
    """Format hours, minutes and seconds, as `1:23:45` or `1:23`."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def quantity(amount: float) -> str:
    """Format three digits and a decimal prefix, to be followed by a unit: `12.3 M`."""
    exponent = 0
    while abs(amount) >= 999.5 and exponent < len(UNITS) - 1:
        amount /= 1000
        exponent += 1
    digits = f"{amount:.0f}" if exponent == 0 or abs(amount) >= 99.95 else f"{amount:#.3g}"
    return f"{digits} {UNITS[exponent]}"


def rate(done: float, seconds: float, unit: str) -> str:
    """Format a speed, as `123,456 rows/s`; bytes in MB."""
    if unit == "bytes":
        done, unit = done / BYTES_PER_MB, "MB"
    return f"{done / seconds if seconds > 0 else 0.0:,.0f} {unit}/s"
