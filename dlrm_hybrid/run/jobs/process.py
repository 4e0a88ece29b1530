"""A run as a separate process: started, read, stopped, and never left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.connection import wait
from pathlib import Path
from typing import final

from dlrm_hybrid.config.overrides import override_text
from dlrm_hybrid.disk import RUN_FOLDER_KEY, writing
from dlrm_hybrid.process import masked, tie_to
from dlrm_hybrid.run.folder import OUTPUT_FILE
from dlrm_hybrid.types import ExitCode, ResourceError

TAIL_BYTES = 4096
STOPPED = {-signal.SIGTERM: ExitCode.PREEMPTED, -signal.SIGINT: ExitCode.INTERRUPTED}


@final
@dataclass(slots=True)
class JobProcess:
    """A training run: `python -m dlrm_hybrid train` in its own process group.

    The group keeps a Ctrl-C in the terminal from it: only its starter sends it signals, once. It
    ends with this process, and all its ranks with it, even after kill -9.

    Attributes:
        folder: folder of the run; `output.log` in it gets all its output.
        process: the run's supervisor.
        begin: size of earlier attempts' output in bytes.
        errors: last bytes of its standard error.
        is_heard: whether standard error is still open.
    """

    folder: Path
    process: subprocess.Popen[bytes]
    begin: int
    errors: bytearray = field(default_factory=bytearray)
    is_heard: bool = True

    @classmethod
    def start(cls, overrides: Sequence[str], folder: Path) -> JobProcess:
        """Start a run, from a thread that outlives it: the kernel ties the run to that thread.

        Args:
            overrides: overrides of the run, without its folder.
            folder: folder of the run; made if missing.

        Raises:
            ResourceError: the folder cannot be written, or no process can be started.
        """
        run_folder = override_text(RUN_FOLDER_KEY, str(folder))
        program = [sys.executable, "-P", "-m", "dlrm_hybrid", "train"]
        return cls.of([*program, *overrides, run_folder], folder)

    @classmethod
    def of(cls, command: Sequence[str], folder: Path) -> JobProcess:
        """Start any command as `start` does a run."""
        path = folder / OUTPUT_FILE
        # The job must import the package from the same place.
        places = os.pathsep.join(place or os.curdir for place in sys.path)
        with writing(path, RUN_FOLDER_KEY):
            folder.mkdir(parents=True, exist_ok=True)
            log = os.open(path, _LOG_FLAGS, 0o666)
        process: subprocess.Popen[bytes] | None = None
        try:
            # Signals are blocked until the program has its handlers, which lift the mask.
            with masked(), os.fdopen(log, "ab", buffering=0) as file:
                begin = os.fstat(log).st_size
                process = subprocess.Popen(
                    command,
                    bufsize=0,
                    stdin=subprocess.DEVNULL,
                    stdout=file,
                    stderr=subprocess.PIPE,
                    process_group=0,
                    preexec_fn=tie_to(os.getpid()),
                    env={**os.environ, "PYTHONPATH": places},
                )
        except OSError as error:
            raise ResourceError(f"cannot start a job: {error.strerror}") from error
        except BaseException:  # as a blocked Ctrl-C: nobody has the process yet
            if process is not None:
                process.kill()
                process.wait()
            raise
        assert process.stderr is not None
        os.set_blocking(process.stderr.fileno(), False)
        return cls(folder, process, begin)

    @property
    def pipe(self) -> int:
        """Descriptor of its standard error."""
        assert self.process.stderr is not None
        return self.process.stderr.fileno()

    @property
    def message(self) -> str:
        """The message of its end, as far as known."""
        text = self.errors.decode(errors="replace").strip()
        code = self.process.returncode
        if code is not None and code < 0 and code not in STOPPED:
            text = f"{text}\nwas killed by {signal.Signals(-code).name}".strip()
        return text

    def hear(self) -> None:
        """Read its standard error, and append that to `output.log`."""
        stream = self.process.stderr
        assert stream is not None
        output = bytearray()
        while self.is_heard:
            chunk = stream.read(TAIL_BYTES)
            if chunk is None:  # nothing for now
                break
            self.is_heard = bool(chunk)
            output += chunk
        if output:
            self.errors = (self.errors + output)[-TAIL_BYTES:]
            with suppress(OSError), (self.folder / OUTPUT_FILE).open("ab", buffering=0) as file:
                file.write(output)

    def last_line(self) -> str:
        """The last line it printed, without tables."""
        try:
            with (self.folder / OUTPUT_FILE).open("rb") as file:
                file.seek(max(self.begin, os.fstat(file.fileno()).st_size - TAIL_BYTES))
                lines = file.read().decode(errors="replace").splitlines()
        except OSError:
            return ""
        texts = (line.strip() for line in reversed(lines))
        return next((text for text in texts if text and not _OF_TABLES <= text[0] <= _LAST), "")

    def ended(self) -> int | None:
        """Its exit code once it has ended, one of `ExitCode`; FAILED if it was killed."""
        code = self.process.poll()
        if code is None:
            return None
        self.hear()
        return STOPPED.get(code, ExitCode.FAILED) if code < 0 else code

    def send(self, number: int) -> None:
        """Send its supervisor a signal, unless it has ended."""
        with suppress(ProcessLookupError):
            self.process.send_signal(number)

    def kill(self) -> None:
        """Kill it at once, with all its ranks; its checkpoints are intact."""
        self.process.kill()
        self.process.wait()
        self.close()

    def close(self) -> None:
        """Stop listening to a run that has ended."""
        assert self.process.stderr is not None
        self.process.stderr.close()


def listen(jobs: Iterable[JobProcess], seconds: float) -> None:
    """Wait for `seconds`, or until one of these jobs has printed something or ended."""
    pipes = [job.pipe for job in jobs if job.is_heard]
    if pipes:
        wait(pipes, seconds)
    else:
        time.sleep(seconds)


_OF_TABLES, _LAST = "\u2500", "\u257f"  # first and last of the characters that frame tables
_LOG_FLAGS = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW
