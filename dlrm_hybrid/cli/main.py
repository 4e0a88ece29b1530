"""From the command line to a verb, and from what it raises to an exit code.

Nothing here, nor what it imports at once, imports torch: help and faults are told in a moment.
"""

from __future__ import annotations

import difflib
import os
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

from dlrm_hybrid import __version__
from dlrm_hybrid.cli.launcher import Launch, find_launch, prepare_environment
from dlrm_hybrid.cli.request import Request
from dlrm_hybrid.disk import refusals
from dlrm_hybrid.limits import raise_open_files
from dlrm_hybrid.types import (
    ConfigError,
    DlrmError,
    ExitCode,
    InterruptedRunError,
    PreemptedError,
    StoppedLateError,
)

if TYPE_CHECKING:
    from dlrm_hybrid.cli.sweep import Sweep

VERBS = {
    "prepare": "raw Criteo rows → shards, checked and encoded",
    "train": "train a model (-m: one for each point of a sweep)",
    "evaluate": "score a checkpoint on the test part",
    "report": "compare runs: tables and pictures in one HTML file",
    "bench": "measure this machine: bench.what=step | prepare | kernels | compressors",
    "doctor": "say whether this machine is able, and what is wrong (or doctor.action=keys)",
}

RANKED = ("train", "evaluate")
RANK_MODULE = "dlrm_hybrid.cli.rank_world"  # imports that of ranks without a world as well

USAGE = f"""dlrm_hybrid {__version__}: trains DLRM and counts every byte on the network

usage: python -m dlrm_hybrid VERB [group=choice] [key=value] ...

{chr(10).join(f"  {verb:<9} {text}" for verb, text in VERBS.items())}

  python -m dlrm_hybrid train                                     made-up rows, one epoch
  python -m dlrm_hybrid prepare data=criteo_kaggle data.raw=train.txt
  python -m dlrm_hybrid train data=criteo_kaggle train.seed=1
  python -m dlrm_hybrid train -m optimizer.lr=0.05,0.1            a sweep
  python -m dlrm_hybrid report report.runs=runs/sweep/…           what came of it
  python -m dlrm_hybrid train --cfg job                           the whole configuration
  python -m dlrm_hybrid train --help                              groups, choices and keys
"""


def run(argv: Sequence[str]) -> int:
    """Run the verb that `argv[1]` names; returns the exit code."""
    if len(argv) < 2 or argv[1] in ("-h", "--help", "help"):
        print(USAGE, end="")
        return ExitCode.DONE if len(argv) > 1 else ExitCode.CONFIGURATION
    verb, arguments = argv[1], list(argv[2:])
    stop = _Stop()
    stop.install()
    raise_open_files()
    try:
        if verb not in VERBS:
            raise ConfigError(_unknown_verb(verb))
        with refusals():
            return _run_verb(verb, arguments, stop)
    except BaseException as error:
        return _tell(stop.reason(error))


def _run_verb(verb: str, arguments: list[str], stop: _Stop) -> int:
    from dlrm_hybrid.config import compose  # Hydra takes a tenth of a second

    launch = find_launch(os.environ) if verb == "train" else None
    if launch is not None and launch.size > 1:
        prepare_environment(os.environ)
        return import_module("dlrm_hybrid.cli.launched").run(launch, arguments)
    if not compose.asks_only(arguments):
        compose.check(arguments)
    if verb != "train":
        if compose.is_sweep(arguments):
            raise ConfigError(f"-m: only `train` can be swept, not `{verb}`")
        arguments = ["hydra.run.dir=.", *arguments]  # makes no run folder
    sys.argv = [sys.argv[0], *arguments]
    jobs = _Jobs(verb, _sweep(arguments), launch, stop)
    try:
        compose.launch(jobs.run)
    finally:
        if jobs.sweep is not None:
            jobs.sweep.close()
    return jobs.exit_code


def _sweep(arguments: Sequence[str]) -> Sweep | None:
    from dlrm_hybrid.cli.sweep import Sweep
    from dlrm_hybrid.config import compose

    return Sweep(tuple(compose.swept_keys(arguments))) if compose.is_sweep(arguments) else None


@dataclass(slots=True)
class _Jobs:
    """The jobs Hydra starts: one, or those of a sweep one after the other."""

    verb: str
    sweep: Sweep | None
    launch: Launch | None
    stop: _Stop
    codes: list[int] = field(default_factory=list[int])

    @property
    def exit_code(self) -> int:
        """The first that is not DONE."""
        return next((code for code in self.codes if code != ExitCode.DONE), ExitCode.DONE)

    def run(self, values: Mapping[str, Any], folder: Path, overrides: Sequence[str]) -> None:
        """One job; a failed one does not stop a sweep, a signal does."""
        title, stopped = "", False
        if self.sweep is not None:
            try:
                title = self.sweep.begin(folder, overrides)
            except DlrmError as error:
                sys.exit(_tell(error))  # Hydra would go on with the next job
        try:
            with refusals():
                code = self._run(values, folder, overrides)
        except StoppedLateError as error:
            code, stopped = error.exit_code, True
        except BaseException as error:
            code = _tell(self.stop.reason(error), title)
        self.codes.append(code)
        if self.sweep is not None:
            self.sweep.add(values, folder, overrides, code)
            if stopped or code in (ExitCode.INTERRUPTED, ExitCode.PREEMPTED):
                sys.exit(code or ExitCode.PREEMPTED)

    def _run(self, values: Mapping[str, Any], folder: Path, overrides: Sequence[str]) -> int:
        from dlrm_hybrid.config.validate import validate
        from dlrm_hybrid.train.supervisor import warm_up

        config = validate(values)
        os.environ.setdefault("OMP_NUM_THREADS", str(config.threads))
        request = Request(config, values, folder, tuple(overrides))
        if self.sweep is not None and self.sweep.skips(request):
            return ExitCode.DONE
        if self.verb in RANKED:
            # Its imports take seconds, and this process has some of its own to make.
            warm_up([RANK_MODULE])
        if self.launch is not None:
            import_module("dlrm_hybrid.cli.launch_rules").check_world(config, self.launch)
        return _function(self.verb)(request)


class _Terminated(BaseException):
    """SIGTERM has come. No Exception: Hydra would take it for a fault of the configuration."""


@dataclass(slots=True)
class _Stop:
    """A signal while no ranks run: there is nothing to save. The supervisor takes the others."""

    number: int | None = None

    def install(self) -> None:
        """Take over SIGTERM, and SIGINT unless the shell has let this process ignore it."""
        signal.signal(signal.SIGTERM, self._on_signal)
        if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
            signal.signal(signal.SIGINT, self._on_signal)

    def reason(self, error: BaseException) -> DlrmError:
        """Why the program ends; a library may have made another error of the signal.

        Raises:
            BaseException: the error itself, a fault of the program or an exit code.
        """
        if isinstance(error, SystemExit):
            raise error
        if self.number == signal.SIGTERM:
            return PreemptedError("stopped by SIGTERM before training")
        if self.number is not None or isinstance(error, KeyboardInterrupt):
            return InterruptedRunError("stopped by Ctrl-C")
        if isinstance(error, DlrmError):
            return error
        raise error

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self.number = number
        raise KeyboardInterrupt if number == signal.SIGINT else _Terminated


def _function(verb: str) -> Callable[[Request], int]:
    return import_module(f"dlrm_hybrid.cli.{verb}").run


def _tell(error: DlrmError, title: str = "") -> int:
    print(f"{title}: {error}" if title else f"{error}", file=sys.stderr)
    return error.exit_code


def _unknown_verb(verb: str) -> str:
    near = difflib.get_close_matches(verb, VERBS, n=1)
    hint = f"; did you mean {near[0]}?" if near else ""
    return f"{verb}: no such verb{hint} There are {', '.join(VERBS)}."
