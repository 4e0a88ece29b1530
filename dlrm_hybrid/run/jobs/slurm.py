"""Jobs of a sweep as SLURM jobs: one `sbatch` each, and the state of earlier ones."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from dlrm_hybrid.config.overrides import override_text
from dlrm_hybrid.config.schema import Config
from dlrm_hybrid.config.validate import faults_text
from dlrm_hybrid.disk import RUN_FOLDER_KEY, read_object
from dlrm_hybrid.process import masked
from dlrm_hybrid.run.assembly import build
from dlrm_hybrid.run.folder import OUTPUT_FILE, write_whole
from dlrm_hybrid.run.request import Request
from dlrm_hybrid.types import ConfigError, ResourceError

KEY = "sweep.submit=slurm"
SUBMIT = "sbatch"
SECONDS = 120.0  # longest wait for SLURM
NOTICE_SECONDS = 60  # before the time limit: enough for a checkpoint
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029]")
FORGOTTEN = "Invalid job id"  # message of `squeue` about a job that ended some minutes ago


def script(request: Request) -> str:
    """The batch script of a job, which becomes the program itself, to get the job's signals.

    A job that SLURM restarts resumes from its last checkpoint, by `skip_completed`.

    Raises:
        ConfigError: a value has a control character: after a line break SLURM could read an option.
    """
    places = os.pathsep.join(place or str(Path.cwd()) for place in sys.path)
    program = [sys.executable, "-P", "-m", "dlrm_hybrid", "train", *request.overrides]
    folder = override_text(RUN_FOLDER_KEY, str(request.folder))
    words = ["env", f"PYTHONPATH={places}", *program, folder, "skip_completed=true"]
    faults = [
        f"{word}: has a control character, which {KEY} cannot pass on"
        for word in words
        if _CONTROL.search(word)
    ]
    if faults:
        raise ConfigError(faults_text(faults))
    line = shlex.join(words)
    return f"#!/bin/sh\nexec {line}\n"


def submit(request: Request, options: Sequence[str], record: Path) -> str:
    """Submit a job; returns SLURM's number of it.

    Args:
        request: the run.
        options: for `sbatch`; they override those derived from the run.
        record: file in which to keep the number.

    Raises:
        ConfigError: a value cannot be put into a job's script.
        ResourceError: `sbatch` is missing, or refuses the job; quotes its message.
    """
    text = script(request)
    request.folder.mkdir(parents=True, exist_ok=True)
    log = str(request.folder / OUTPUT_FILE).replace("%", "%%")
    derived = [
        "--parsable",
        f"--job-name={request.config.name}-{request.folder.name}",
        *(f"--output={log}", "--open-mode=append"),
        *("--nodes=1", "--ntasks=1", f"--cpus-per-task={_cores(request.config)}"),
        f"--signal=B:TERM@{NOTICE_SECONDS}",
    ]
    with masked():  # else a submitted job's number could be lost
        answer = _ask([SUBMIT, *derived, *options], text)
        if answer.returncode != 0:
            raise ResourceError(f"{KEY}: sbatch: {answer.stderr.strip() or answer.returncode}")
        number, _, cluster = answer.stdout.strip().partition(";")
        if not number.isdecimal():
            raise ResourceError(f"{KEY}: sbatch has answered {answer.stdout!r}, not a job's number")
        write_whole(record, json.dumps({"job": number, "cluster": cluster}))
    return number


def state(record: Path) -> tuple[str, str] | None:
    """Number and state of a job submitted before; None if SLURM no longer has it.

    Args:
        record: file that keeps its number.

    Raises:
        DataError: the file is damaged.
        ResourceError: `squeue` is missing or fails, so the job may be running.
    """
    if not record.exists():
        return None
    job = read_object(record.parent, record.name)
    number, cluster = str(job.get("job")), job.get("cluster")
    where = [f"--clusters={cluster}"] if cluster else []  # else the one of this machine
    answer = _ask(["squeue", "--noheader", "--format=%T", f"--jobs={number}", *where], "")
    if answer.returncode != 0 and FORGOTTEN not in answer.stderr:
        raise ResourceError(f"{KEY}: squeue: {answer.stderr.strip() or answer.returncode}")
    lines = [line for line in answer.stdout.splitlines() if not line.startswith("CLUSTER:")]
    word = "".join(lines).strip()
    return (number, word) if answer.returncode == 0 and word else None


def _ask(command: Sequence[str], text: str) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(
            command, input=text, capture_output=True, text=True, timeout=SECONDS, check=False
        )
    except FileNotFoundError:
        raise ResourceError(f"{KEY}: {command[0]} is not in the PATH of this machine") from None
    except subprocess.TimeoutExpired:
        fault = f"{KEY}: {command[0]} gives no answer in {SECONDS:g} s"
        hint = "; the job may have been submitted all the same: ask squeue"
        raise ResourceError(fault + hint * (command[0] == SUBMIT)) from None


def _cores(config: Config) -> int:
    """Number of cores: one per thread of each rank."""
    ranks = build.topology(config).size if build.many_processes(config) else 1
    return ranks * config.threads
