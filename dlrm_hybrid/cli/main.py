"""Runs the verb that the command line names, and turns its errors into exit codes.

Neither this module nor its imports import torch, so that help and faults are printed at once.
"""

from __future__ import annotations

import difflib
import os
import signal
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from keyword import iskeyword
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

from dlrm_hybrid import __version__
from dlrm_hybrid.cli import completion
from dlrm_hybrid.cli.arguments import COMPLETION, HELP, VERSION, parse
from dlrm_hybrid.cli.help import READS, TAKE_A_RUN, VERBS, help_text, unread, usage
from dlrm_hybrid.disk import refusals
from dlrm_hybrid.limits import raise_open_files
from dlrm_hybrid.run.launch.environment import Launch, find_launch, prepare_environment
from dlrm_hybrid.run.request import Arguments, Request
from dlrm_hybrid.types import (
    ConfigError,
    DlrmError,
    ExitCode,
    InterruptedRunError,
    PreemptedError,
    StoppedLateError,
    printable,
)

if TYPE_CHECKING:
    from dlrm_hybrid.cli.sweep import Sweep
    from dlrm_hybrid.config import compose

RANKED = ("train", "evaluate")
RANK_MODULE = "dlrm_hybrid.run.rank.main"


def run(argv: Sequence[str]) -> int:
    """Run the verb that `argv[1]` names and return the exit code."""
    if len(argv) < 2 or argv[1] in (*HELP, "help"):
        print(usage(), end="")
        return ExitCode.DONE if len(argv) > 1 else ExitCode.CONFIGURATION
    if VERSION in argv[1:]:
        print(f"dlrm_hybrid {__version__}")
        return ExitCode.DONE
    verb, arguments = argv[1], argv[2:]
    stop = _Stop(verb)
    stop.install()
    raise_open_files()
    try:
        if verb in COMPLETION:
            print(completion.answer(arguments), end="")
            return ExitCode.DONE
        if verb not in VERBS:
            raise ConfigError(_unknown_verb(verb))
        with refusals():
            return _run_verb(verb, parse(verb, arguments), stop)
    except BaseException as error:
        return _tell(stop.reason(error))


def _run_verb(verb: str, args: Arguments, stop: _Stop) -> int:
    from dlrm_hybrid.config import compose  # Hydra takes a tenth of a second

    launch = find_launch(os.environ) if verb == "train" else None
    if launch is None or launch.rank == 0:
        _refuse_unread(verb, args)
        if args.wants_help:
            print(_help(verb, args), end="")
    if args.wants_help:
        return ExitCode.DONE
    if launch is not None and launch.size > 1:
        prepare_environment(os.environ)
        return _run_launched(launch, args)
    if args.is_sweep:
        if verb != "train":
            args.faults.append(f"-m: only `train` can be swept, not `{verb}`")
        points = compose.sweep_of(args.overrides, args.faults)
        return _run_sweep(points, _Jobs(verb, launch, stop))
    job = compose.job_of(
        args.overrides,
        args.faults,
        has_model="model" in READS[verb],
        trains=verb == "train",
    )
    if args.cfg is not None:
        print(compose.shown(args.overrides, args.cfg, args.package, args.resolve), end="")
        return ExitCode.DONE
    return _Jobs(verb, launch, stop).run(job)


def _run_launched(launch: Launch, args: Arguments) -> int:
    """Run as one of the ranks that a launcher has started; only rank 0 shows preparations."""
    from dlrm_hybrid.cli.terminal import Terminal, quiet
    from dlrm_hybrid.cli.verbs.train import TerminalView
    from dlrm_hybrid.run.launch.member import run as run_launched  # imports torch

    terminal = Terminal()
    display = terminal if launch.rank == 0 else quiet()
    return run_launched(launch, args, display, TerminalView(terminal))


def _refuse_unread(verb: str, args: Arguments) -> None:
    """Report keys that the verb does not read: as faults, or as a remark if it accepts a run's."""
    unread_keys = unread(verb, args.overrides)
    if verb not in TAKE_A_RUN:
        args.faults += unread_keys.values()
        return
    if verb == "evaluate":  # it compares what `train` reads with its checkpoint
        compared = unread("train", args.overrides)
        compared |= {text: "" for text in args.overrides if text.lstrip("+~").startswith("hydra.")}
        unread_keys = [text for text in unread_keys if text in compared]
    if unread_keys:
        print(printable(f"not read by `{verb}`: {' '.join(unread_keys)}"), file=sys.stderr)


def _help(verb: str, args: Arguments) -> str:
    """The help for the choices made; faults in the arguments are listed, not raised."""
    from dlrm_hybrid.config import compose
    from dlrm_hybrid.config.validate import one_line

    choice = compose.choice_of(
        args.overrides, is_sweep=args.is_sweep, has_model="model" in READS[verb]
    )
    ignored, faults = (
        list(dict.fromkeys(map(one_line, lines)))
        for lines in ((*args.faults, *choice.ignored), choice.faults)
    )
    return help_text(verb, choice.values, ignored, faults)


def _run_sweep(points: compose.Sweep, jobs: _Jobs) -> int:
    from dlrm_hybrid.cli.sweep import Sweep, run_beside, submit_each

    jobs.sweep = Sweep(points.folder, points.keys, len(points.points))
    first_failed = ExitCode.DONE
    try:
        if points.submit is not None:
            return submit_each(jobs.sweep, points)
        if points.jobs > 1:
            return run_beside(jobs.sweep, points)
        for number in range(len(points.points)):
            code = jobs.run(points.job(number))
            if jobs.stopped:
                return jobs.stopped
            first_failed = first_failed or code
    finally:
        jobs.sweep.close()
    return first_failed


@dataclass(slots=True)
class _Jobs:
    """Runs one job, or those of a sweep one after the other.

    Attributes:
        verb: the command.
        launch: place of this process among those that a launcher has started.
        stop: what signals do while no ranks run.
        sweep: the sweep that the jobs are of.
        stopped: exit code of a sweep that a signal has stopped, else 0.
    """

    verb: str
    launch: Launch | None
    stop: _Stop
    sweep: Sweep | None = None
    stopped: int = ExitCode.DONE

    def run(self, job: compose.Job) -> int:
        """Run a job and return its exit code; a failed one does not stop a sweep, a signal does."""
        title = "" if self.sweep is None else self.sweep.begin(job)
        try:
            with refusals():
                code = self._run(job)
        except StoppedLateError as error:
            code, self.stopped = error.exit_code, ExitCode.of_signal(error.number)
        except BaseException as error:
            code = _tell(self.stop.reason(error), title)
        if self.sweep is not None:
            self.sweep.add(job, code)
        if code in (ExitCode.INTERRUPTED, ExitCode.PREEMPTED):
            self.stopped = code
        return code

    def _run(self, job: compose.Job) -> int:
        from dlrm_hybrid.config.validate import validate
        from dlrm_hybrid.kernels import first_kernels
        from dlrm_hybrid.run.supervisor import ensure_forkserver

        config = validate(job.values)
        for line in job.dropped:
            print(printable(line), file=sys.stderr)
        os.environ.setdefault("OMP_NUM_THREADS", str(config.threads))
        folder = job.folder if self.verb == "train" else Path.cwd()
        request = Request(config, job.values, folder, job.overrides)
        if self.sweep is not None and self.sweep.skips(request):
            return ExitCode.DONE
        if self.verb in RANKED:
            # The ranks' imports take seconds: make them beside those of this process.
            kernels = first_kernels(config.embedding.levels, config.activation.sends_levels)
            ensure_forkserver([RANK_MODULE], kernels if self.verb == "train" else ())
        if self.launch is not None or (self.verb == "train" and config.parallel.machines):
            rules = import_module("dlrm_hybrid.run.launch.rules")
            rules.check_world(config, self.launch, job.overrides)
        module = f"{self.verb}_" if iskeyword(self.verb) else self.verb
        return import_module(f"dlrm_hybrid.cli.verbs.{module}").run(request)


class _Terminated(BaseException):
    """SIGTERM was received; no Exception, which OmegaConf would take for a configuration fault."""


@dataclass(slots=True)
class _Stop:
    """Handles signals while no ranks run, so nothing is to be saved; later the supervisor does."""

    verb: str
    number: int | None = None

    def install(self) -> None:
        """Handle SIGTERM, and SIGINT unless the shell has made this process ignore it."""
        signal.signal(signal.SIGTERM, self._on_signal)
        if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
            signal.signal(signal.SIGINT, self._on_signal)

    def reason(self, error: BaseException) -> DlrmError:
        """The error to report; a library may have turned a signal into another error.

        Raises:
            BaseException: `error` itself, if it is a bug of the program or a SystemExit.
        """
        if isinstance(error, SystemExit):
            raise error
        if self.number == signal.SIGTERM:
            before = " before training" if self.verb == "train" else ""
            return PreemptedError(f"stopped by SIGTERM{before}")
        if self.number is not None or isinstance(error, KeyboardInterrupt):
            return InterruptedRunError("stopped by Ctrl-C")
        if isinstance(error, DlrmError):
            return error
        raise error

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self.number = number
        raise KeyboardInterrupt if number == signal.SIGINT else _Terminated


def _tell(error: DlrmError, title: str = "") -> int:
    print(f"{title}: {error}" if title else f"{error}", file=sys.stderr)
    return error.exit_code


def _unknown_verb(verb: str) -> str:
    near = difflib.get_close_matches(verb, VERBS, n=1)
    hint = f"; did you mean {near[0]}?" if near else "."
    name = verb.encode(errors="backslashreplace").decode()
    return f"{name}: unknown command{hint} Commands: {', '.join(VERBS)}"
