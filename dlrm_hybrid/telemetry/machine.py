"""Facts about the machine of a run or benchmark that explain its figures."""

from __future__ import annotations

import os
import platform
import resource
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cache
from importlib import metadata
from pathlib import Path

import psutil

PACKAGES = ("numpy", "numba", "torch", "torchrec", "fbgemm-gpu")


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """Processor, load and versions of a machine at one moment.

    Attributes:
        cores: logical cores this process may use.
        load_average: runnable processes, mean of the last 1, 5 and 15 minutes.
        versions: versions of Python and the packages that decide speed; None if not installed.
        git_sha: commit of the checkout, `+` appended if tracked files differ; None outside git.
    """

    when: str
    cpu: str
    cores: int
    memory_bytes: int
    system: str
    load_average: tuple[float, float, float]
    versions: Mapping[str, str | None]
    git_sha: str | None

    def facts(self) -> dict[str, str]:
        """Name and value of each fact, in reading order."""
        installed = (f"{name} {version}" for name, version in self.versions.items() if version)
        return {
            "when": self.when,
            "processor": f"{self.cpu}, {self.cores} cores, {self.memory_bytes / 2**30:.0f} GiB",
            "system": self.system,
            "load before (1, 5, 15 minutes)": " ".join(f"{load:.2f}" for load in self.load_average),
            "versions": ", ".join(installed),
            "commit": self.git_sha or "unknown",
        }


def describe() -> Machine:
    """Describe this machine now; call it before a benchmark adds its own load."""
    return Machine(
        when=datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        cpu=cpu_model(),
        cores=len(os.sched_getaffinity(0))
        if hasattr(os, "sched_getaffinity")
        else os.cpu_count() or 1,
        memory_bytes=psutil.virtual_memory().total,
        system=f"{platform.system()} {platform.release()}",
        load_average=psutil.getloadavg(),
        versions={
            "Python": platform.python_version(),
            **{name: version_of(name) for name in PACKAGES},
        },
        git_sha=_git_sha(Path(__file__).parent),
    )


def peak_rss_bytes() -> int:
    """Peak resident memory of this process in bytes.

    A forked process starts with the pages it shares with its parent, and an executed one with the
    peak of the program before.
    """
    return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


@cache
def cpu_model() -> str:
    """Model name of the first processor."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    models = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(models, platform.machine())


@cache
def version_of(package: str) -> str | None:
    """The version of a package; None if it is not installed."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


@cache  # what runs is what was there when the process began
def _git_sha(folder: Path) -> str | None:
    def git(*arguments: str) -> str:
        command = ["git", "-C", str(folder), *arguments]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()

    try:
        # A package installed below another project's repository is none of its files.
        git("ls-files", "--error-unmatch", Path(__file__).name)
        sha = git("rev-parse", "HEAD")
        changed = git("status", "--porcelain", "--untracked-files=no")
    except (OSError, subprocess.CalledProcessError):
        return None
    return f"{sha[:12]}+" if changed else sha[:12]
