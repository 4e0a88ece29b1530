"""Standard output and error that never harm the work.

A thread writes what the program prints. Output that nobody reads (a stopped `less`) or that cannot
be written (`| head`, a full disk) is dropped, and the program goes on; the loss is reported where
that still works. Characters that the terminal lacks are replaced.
"""

from __future__ import annotations

import codecs
import io
import os
import select
import sys
import threading
from collections.abc import Generator
from contextlib import contextmanager, suppress
from pathlib import Path
from queue import SimpleQueue
from typing import Any, TextIO, final

MOST_PENDING_BYTES = 1 << 20
TERMINAL_LOG = "terminal.log"  # beside the logs of the ranks
PATIENCE_SECONDS = 5.0  # at the end of the program, for a reader that still reads
PLAIN_SIGNS = "dlrm_hybrid.plain_signs"
_PLAIN = {"×": "x", "÷": "/", "→": "->", "…": "...", "–": "-", "—": "-"}
_MARK = b"\n[some output was dropped here: nothing read it]\n"


@final
class Output(io.RawIOBase):
    """A stream to a file descriptor, written by a thread: `write` never waits and never fails."""

    def __init__(self, descriptor: int, name: str, report_to: Output | None) -> None:
        """Start the thread that writes.

        Args:
            descriptor: file, pipe or terminal. It is duplicated, as the number may be reused.
            report_to: gets a line when output is lost for the first time.
        """
        super().__init__()
        self.name = name
        self._report_to = report_to
        self._descriptor = os.dup(descriptor)
        self._queue: SimpleQueue[bytes | None] = SimpleQueue()
        self._lock = threading.Lock()
        self._pending_bytes = 0
        self._has_gap = False
        self._fault: str | None = None
        self._log: Path | None = None
        self._thread = threading.Thread(target=self._drain, name=name, daemon=True)
        self._thread.start()

    def writable(self) -> bool:
        """True: what cannot be written is dropped, with a note."""
        return True

    def isatty(self) -> bool:
        """Whether the descriptor is a terminal."""
        return os.isatty(self._descriptor)

    def fileno(self) -> int:
        """The duplicate of the descriptor."""
        return self._descriptor

    def write(self, data: Any, /) -> int:
        """Queue all of the data, or drop it if too much is waiting."""
        chunk = bytes(data)
        with self._lock:
            # A chunk above the limit still goes out where nothing else waits.
            pending_bytes = self._pending_bytes
            fits = pending_bytes == 0 or pending_bytes + len(chunk) <= MOST_PENDING_BYTES
            if fits:
                chunk = _MARK + chunk if self._has_gap else chunk
                self._pending_bytes += len(chunk)
                self._queue.put(chunk)
            self._has_gap = not fits
        if not fits:
            self._lose("nothing reads it")
        return len(data)

    def log_losses(self, path: Path) -> None:
        """Also append reports of lost output, past and future, to this file."""
        self._log = path
        if self._fault is not None:
            self._write_log(self._fault)

    def finish(self) -> None:
        """Wait until all is written, at most `PATIENCE_SECONDS`."""
        self._queue.put(None)
        self._thread.join(PATIENCE_SECONDS)
        if self._thread.is_alive():
            self._lose("nothing reads it")

    def _drain(self) -> None:
        broken = False
        while (chunk := self._queue.get()) is not None:
            try:
                if not broken:
                    _write(self._descriptor, chunk)
            except OSError as error:
                broken = True
                self._lose(error.strerror or str(error))
            with self._lock:
                self._pending_bytes -= len(chunk)

    def _lose(self, cause: str) -> None:
        if self._fault is None:
            self._fault = f"{self.name}: {cause}; output is dropped, the program continues"
            self._write_log(self._fault)
            if self._report_to is not None:
                self._report_to.write(f"{self._fault}\n".encode())

    def _write_log(self, line: str) -> None:
        with suppress(OSError):
            if self._log is not None:
                self._log.parent.mkdir(parents=True, exist_ok=True)
                with self._log.open("a", encoding="utf-8") as file:
                    file.write(f"{line}\n")


@contextmanager
def harmless_output() -> Generator[None, None, None]:
    """Inside the `with`, printing neither blocks, fails, nor ends this process."""
    _open_standard_descriptors()
    codecs.register_error(PLAIN_SIGNS, _in_plain_signs)
    try:
        errors = Output(2, "stderr", report_to=None)
        output = errors  # one thread for one file, so that lines stay in order
        if not os.path.sameopenfile(1, 2):
            output = Output(1, "stdout", report_to=errors)
    except RuntimeError:  # no thread can be started: the program will say so
        yield
        return
    before = sys.stdout, sys.stderr
    sys.stdout, sys.stderr = _text(output, sys.stdout), _text(errors, sys.stderr)
    try:
        yield
    finally:
        sys.stdout, sys.stderr = before
        output.finish()
        errors.finish()


def log_losses(path: Path) -> None:
    """Also report lost output of the program in this file."""
    for stream in (sys.stdout, sys.stderr):
        output = getattr(stream, "buffer", None)
        if isinstance(output, Output):
            output.log_losses(path)


def _open_standard_descriptors() -> None:
    """Open those that are closed as /dev/null: else the next opened file gets what is printed."""
    for number in (0, 1, 2):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # gets the lowest free number


def _text(output: Output, stream: TextIO | None) -> TextIO:
    encoding = "utf-8" if stream is None else stream.encoding
    return io.TextIOWrapper(output, encoding=encoding, errors=PLAIN_SIGNS, write_through=True)


def _in_plain_signs(error: UnicodeError) -> tuple[str, int]:
    assert isinstance(error, UnicodeEncodeError)
    signs = error.object[error.start : error.end]
    return "".join(_PLAIN.get(sign, "?") for sign in signs), error.end


def _write(descriptor: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        try:
            view = view[os.write(descriptor, view) :]
        except BlockingIOError:  # another program has made the terminal non-blocking
            poll = select.poll()
            poll.register(descriptor, select.POLLOUT)
            poll.poll()
