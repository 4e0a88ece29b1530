"""The verb `watch`: a page about a run that is made again while the run goes on."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

import psutil

from dlrm_hybrid.cli.terminal import Terminal
from dlrm_hybrid.config.validate import faults_text
from dlrm_hybrid.disk import read_text
from dlrm_hybrid.report.live import RUNNING, Watched, live_document
from dlrm_hybrid.report.page import html
from dlrm_hybrid.report.runs import is_run, read_run, shown
from dlrm_hybrid.run.folder import LOCK_FILE, output_file, write_whole
from dlrm_hybrid.run.request import Request
from dlrm_hybrid.telemetry.events import EVENTS_FILE
from dlrm_hybrid.types import ConfigError, DataError, ExitCode

RUN_KEY, OUTPUT_KEY = "watch.run", "watch.output"
PAGE = "watch.html"  # in the run folder
QUIET_SECONDS = 600.0  # without an event, after which a run on another machine is taken for ended
MOST_LOCK_BYTES = 1024
SHARE = 0.04  # of a core at most for making pages: the run needs it
CLOCK_SECONDS = 1.0  # by which the kernel's times of a file and of a process may differ


def run(request: Request) -> int:
    """Show the run at `watch.run` until it ends."""
    options, terminal = request.config.watch, Terminal()
    if options.run is None:
        raise ConfigError(faults_text([f"{RUN_KEY} = null: name a run folder"]))
    folder = Path(options.run)
    output = output_file(options.output or str(folder / PAGE), OUTPUT_KEY)
    _await(folder, options.seconds, terminal)
    status = watch(folder, output, options.seconds, lambda text: terminal.line(text))
    terminal.line(f"{status}; {output} stays as it is")
    return ExitCode.DONE


def _await(folder: Path, seconds: float, terminal: Terminal) -> None:
    """Wait until a run begins in a folder.

    Raises:
        ConfigError: none can begin: the folder above is missing, it is a file, or contains runs.
    """
    if not folder.is_dir() and not folder.absolute().parent.is_dir():
        raise ConfigError(faults_text([f"{RUN_KEY} = {folder}: no such folder, nor the one above"]))
    while not is_run(folder):
        if folder.exists() and not folder.is_dir():
            raise ConfigError(faults_text([f"{RUN_KEY} = {folder}: is no folder"]))
        inside = sorted(folder.iterdir()) if folder.is_dir() else []
        if inner := next(filter(is_run, inside), None):  # such as the first job of a sweep
            fault = f"{RUN_KEY} = {folder}: is no run, but has some; name one, such as {inner}"
            raise ConfigError(faults_text([fault]))
        terminal.line_once(f"waiting for a run to begin in {folder}")
        time.sleep(min(1.0, seconds))


def watch(folder: Path, output: Path, seconds: float, say: Callable[[str], None]) -> str:
    """Make the page every few seconds as long as the run goes on.

    The last page, also after an interruption, does not reload itself.

    Returns:
        the status of the run at the end.

    Raises:
        DataError: a file in the folder is damaged.
        ResourceError: the page cannot be written.
    """
    written: tuple[object, ...] | None = None
    changed = time.monotonic()
    try:
        # Ask before reading the record: if the run ends meanwhile, the last page shows it.
        while _is_running(folder, time.monotonic() - changed):
            stamp, begun = _stamp(folder), time.process_time()
            if stamp != written:
                write_whole(output, _page(_watched(folder, True), seconds), OUTPUT_KEY)
                if written is None:
                    say(f"watching {folder}: open {output.absolute()}")
                written, changed = stamp, time.monotonic()
            time.sleep(max(seconds, (time.process_time() - begun) / SHARE))
    finally:
        ended = _watched(folder, _is_running(folder, time.monotonic() - changed))
        write_whole(output, _page(ended), OUTPUT_KEY)
    return ended.status if ended.status != RUNNING else "the run goes on"


def _watched(folder: Path, is_running: bool) -> Watched:
    now = datetime.now(UTC).timestamp()  # compared with the times of events
    return Watched(run=read_run(folder), is_running=is_running, now=now)


def _page(watched: Watched, seconds: float | None = None) -> str:
    return shown([watched.run], lambda _: html(live_document(watched), seconds))


def _stamp(folder: Path) -> tuple[object, ...]:
    """A value that changes when the run records an event."""
    try:
        stat = (folder / EVENTS_FILE).stat()
    except FileNotFoundError:
        return ()
    return stat.st_ino, stat.st_size, stat.st_mtime_ns


def _is_running(folder: Path, quiet_seconds: float) -> bool:
    """Whether a process works on the run, judged without taking its lock.

    On another machine only `quiet_seconds`, the time without an event, can tell.
    """
    try:
        words = read_text(folder, LOCK_FILE, MOST_LOCK_BYTES).split()
        written = (folder / LOCK_FILE).stat().st_mtime
    except (DataError, OSError):
        return False
    if len(words) != 4 or not words[1].isdecimal():  # process 4711 on node-3
        return False
    if words[3] != socket.gethostname():
        return quiet_seconds < QUIET_SECONDS
    try:
        process = psutil.Process(int(words[1]))
        if process.status() == psutil.STATUS_ZOMBIE:  # has ended
            return False
        # A killed process's number may have been reused.
        return process.create_time() <= written + CLOCK_SECONDS
    except psutil.Error:
        return False
