"""Missing packages and exhausted system limits, explained in a sentence for the user."""

from __future__ import annotations

import errno
import os
import resource
import tempfile
from importlib.util import find_spec
from pathlib import Path

from dlrm_hybrid.types import ResourceError

TRAINER = (
    *("fbgemm_gpu", "hydra", "isal", "matplotlib", "pandas", "psutil", "pyarrow", "pydantic"),
    *("rich", "safetensors", "tensorboard", "torchrec", "xxhash", "yaml", "zmq"),
)
"""Modules that the trainer and all commands need; the compressors work without them."""
INSTALL_TRAINER = "pip install ./packaging/fbgemm-gpu-cpu '.[train]' -c constraints.txt"
SHOWN = 3  # missing modules named in the message
MOST_OPEN_FILES = 65_536  # never needed more; some programs loop over all descriptors to the limit
# A unix socket's path has at most 107 bytes and a zero; multiprocessing puts one into
# /pymp-abcdefgh/listener-abcdefgh below the temporary folder.
MOST_TMPDIR_BYTES = 107 - 32
_FILES = ("Too many open files", "too many open files")
_MEMORY = (
    *("Cannot allocate memory", "can't allocate memory", "not enough memory", "bad_alloc"),
    *("failed to map segment", "Unable to allocate", "MemoryError", "Memory allocation"),
)
_PROCESSES = ("Resource temporarily unavailable", "can't start new thread", "pthread_create")


def raise_open_files() -> None:
    """Raise the limit on open files to what is allowed: many systems start at 1,024."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    limit = MOST_OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, MOST_OPEN_FILES)
    if soft != resource.RLIM_INFINITY and soft < limit:
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))


def check_temporary_folder() -> None:
    """Raise ResourceError if multiprocessing cannot put its sockets into the temporary folder."""
    try:
        folder = tempfile.gettempdir()
    except OSError as error:
        raise ResourceError(f"TMPDIR: {error.strerror}") from error
    num_bytes = len(os.fsencode(folder))
    if num_bytes > MOST_TMPDIR_BYTES:
        raise ResourceError(
            f"TMPDIR = {folder}: has {num_bytes} bytes; a socket below it needs at most "
            f"{MOST_TMPDIR_BYTES}, set it to a shorter folder"
        )


def lacks_trainer(what: str) -> str | None:
    """How to install the packages that `what` lacks of the trainer's, in a sentence, or None."""
    missing = [name for name in TRAINER if find_spec(name) is None]
    if not missing:
        return None
    more = f" and {len(missing) - SHOWN} more" if len(missing) > SHOWN else ""
    return (
        f"{what}: needs the extra dlrm-hybrid[train] ({', '.join(missing[:SHOWN])}{more} not "
        f"found); in a checkout: {INSTALL_TRAINER}"
    )


def reached(error: BaseException) -> str | None:
    """The system limit that caused an error, with its value; None if none did."""
    number = getattr(error, "errno", None)
    if number in (errno.EMFILE, errno.ENFILE):
        return reached_in(_FILES[0])
    if isinstance(error, MemoryError) or number == errno.ENOMEM:
        return reached_in(_MEMORY[0])
    return reached_in(str(error))


def reached_in(text: str) -> str | None:
    """The system limit that an error message points to, with its value; None if to none."""
    if any(words in text for words in _FILES):
        limit = _limit(resource.RLIMIT_NOFILE)
        return f"too many open files: RLIMIT_NOFILE = {limit} (ulimit -n) is too small"
    if any(words in text for words in _MEMORY):
        detail = ", ".join(_memory()) or "this machine has no more"
        return f"out of memory: {detail}; a smaller model or fewer ranks need less"
    if any(words in text for words in _PROCESSES):
        detail = ", ".join((*_processes(), *_memory())) or "the system gives no more"
        return f"no room for another process or thread: {detail}"
    return None


def _memory() -> list[str]:
    limits: list[str] = []
    limit = resource.getrlimit(resource.RLIMIT_AS)[0]
    if limit != resource.RLIM_INFINITY:
        limits.append(f"RLIMIT_AS = {limit // 1024:,} KiB (ulimit -v)")
    group = _of_group("memory.max").strip()
    if group.isdigit():
        limits.append(f"memory.max = {int(group) // 1024:,} KiB of its control group")
    return limits


def _processes() -> list[str]:
    limit = resource.getrlimit(resource.RLIMIT_NPROC)[0]
    limits = [] if limit == resource.RLIM_INFINITY else [f"RLIMIT_NPROC = {limit:,} (ulimit -u)"]
    group = _of_group("pids.max").strip()
    if group.isdigit():
        limits.append(f"pids.max = {group} of its control group")
    return limits


def _limit(which: int) -> str:
    limit = resource.getrlimit(which)[0]
    return "unlimited" if limit == resource.RLIM_INFINITY else f"{limit:,}"


def _of_group(name: str) -> str:
    """The content of a file of this process's control group (version 2); empty without one."""
    try:
        lines = Path("/proc/self/cgroup").read_text(encoding="ascii").splitlines()
        group = next(line[3:] for line in lines if line.startswith("0::"))
        return Path(f"/sys/fs/cgroup{group}/{name}").read_text(encoding="ascii")
    except (OSError, StopIteration, ValueError):
        return ""
