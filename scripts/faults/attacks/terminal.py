"""Attacks by the program's environment: its terminal, its limits, its folders."""

from __future__ import annotations

import fcntl
import os
import resource
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

from .base import SMALL, Attack, Ended, NotHereError, expect, wait

TRAIN = ("train", *SMALL, "train.steps=20", "hydra.run.dir=run")
LOST = "output is dropped, the program continues"
OTHER_USER = 4321


def _run(
    folder: Path,
    stdout: int | None = None,
    environ: Mapping[str, str] | None = None,
    before: Callable[[], None] | None = None,
    prefix: tuple[str, ...] = (),
) -> Ended:
    """Train, with another stdout than a file, in another environment or within limits."""
    with (folder / "stdout").open("wb") as output, (folder / "stderr").open("wb") as errors:
        program = subprocess.Popen(
            [*prefix, sys.executable, "-m", "dlrm_hybrid", *TRAIN],
            cwd=folder,
            env={**os.environ, **(environ or {})},
            stdin=subprocess.DEVNULL,
            stdout=output if stdout is None else stdout,
            stderr=errors,
            start_new_session=True,
            preexec_fn=before,
        )
    return wait(program, folder)


def _trained(ended: Ended, folder: Path, is_lost: bool = True) -> str:
    expect(ended.code == 0, f"exit code {ended.code}: {ended.errors[-300:]}")
    expect((folder / "run" / "summary.json").exists(), "no summary")
    if is_lost:
        expect(LOST in ended.errors, f"stderr does not say so: {ended.errors}")
        log = folder / "run" / "log" / "terminal.log"
        expect(log.exists() and LOST in log.read_text(encoding="utf-8"), "the log does not say so")
    return ended.errors.strip() or "complete"


def _left(folder: Path) -> str:
    reader, writer = os.pipe()
    os.close(reader)
    try:
        return _trained(_run(folder, writer), folder)
    finally:
        os.close(writer)


def _stalled(folder: Path) -> str:
    reader, writer = os.pipe()
    fcntl.fcntl(writer, fcntl.F_SETPIPE_SZ, 4096)
    os.write(writer, bytes(4096))
    try:
        return _trained(_run(folder, writer), folder)
    finally:
        os.close(reader)
        os.close(writer)


def _full(folder: Path) -> str:
    with Path("/dev/full").open("wb") as full:
        return _trained(_run(folder, full.fileno()), folder)


def _closed(folder: Path) -> str:
    return _trained(_run(folder, before=lambda: os.close(1)), folder, is_lost=False)


def _encoding(folder: Path, environ: Mapping[str, str]) -> str:
    return _trained(_run(folder, environ=environ), folder, is_lost=False)


def _limited(folder: Path, which: int, limit: int, named: str) -> str:
    ended = _run(folder, before=lambda: resource.setrlimit(which, (limit, limit)))
    return _refused(ended, named)


def _few_processes(folder: Path) -> str:
    if os.geteuid() != 0 or shutil.which("setpriv") is None or shutil.which("prlimit") is None:
        raise NotHereError("needs root, setpriv and prlimit, to run as another user")
    # The right to read, so that a Python in root's home can be started.
    rights = "+dac_override,+dac_read_search"
    become = ("setpriv", f"--reuid={OTHER_USER}", f"--regid={OTHER_USER}", "--clear-groups")
    prefix = (*become, f"--inh-caps={rights}", f"--ambient-caps={rights}", "prlimit", "--nproc=3")
    return _refused(_run(folder, prefix=prefix), "RLIMIT_NPROC = 3 (ulimit -u)")


def _long_tmpdir(folder: Path) -> str:
    long = folder / ("x" * 100)
    long.mkdir()
    return _refused(_run(folder, environ={"TMPDIR": str(long)}), f"TMPDIR = {long}: has ")


def _refused(ended: Ended, named: str) -> str:
    expect(ended.code == 5, f"exit code {ended.code}: {ended.errors[-300:]}")
    expect(named in ended.errors, ended.errors[-300:])
    expect(named in ended.errors.splitlines()[-1], f"not the last line: {ended.errors[-300:]}")
    return ended.errors.strip()


ATTACKS = (
    Attack("stdout-left", "exit 0, stderr and log say so", _left),
    Attack("stdout-stalled", "exit 0, stderr and log say so", _stalled),
    Attack("stdout-full", "exit 0, stderr and log say so", _full),
    Attack("stdout-closed", "exit 0", _closed),
    *(
        Attack(f"stdout-{name}", "exit 0", partial(_encoding, environ=environ))
        for name, environ in (
            ("ascii", {"PYTHONIOENCODING": "ascii"}),
            ("latin-1", {"PYTHONIOENCODING": "latin-1"}),
            ("lc-all-c", {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}),
        )
    ),
    *(
        Attack(
            f"limit-{name}",
            f"exit 5, {named}",
            partial(_limited, which=which, limit=limit, named=named),
        )
        for name, which, limit, named in (
            ("files", resource.RLIMIT_NOFILE, 12, "RLIMIT_NOFILE = 12 (ulimit -n)"),
            ("memory-parent", resource.RLIMIT_AS, 100 << 20, "RLIMIT_AS = 102,400 KiB"),
            ("memory-ranks", resource.RLIMIT_AS, 600 << 20, "RLIMIT_AS = 614,400 KiB"),
        )
    ),
    Attack("limit-processes", "exit 5, RLIMIT_NPROC named", _few_processes),
    Attack("tmpdir-too-long", "exit 5, TMPDIR named", _long_tmpdir),
)
