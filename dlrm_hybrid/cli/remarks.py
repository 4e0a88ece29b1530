"""What a person should know before a run begins, and may not have meant."""

from __future__ import annotations

import os

from dlrm_hybrid.config.schema import Config
from dlrm_hybrid.run.assembly import build

BUSY_SHARE = 0.25  # of the cores: from there on a thread has to wait for others at every product


def thread_remark(config: Config, cores: int, load: float) -> str | None:
    """Why `threads` will slow this run down; None if it will not.

    Args:
        config: of the run.
        cores: that this process may use.
        load: mean number of running threads on the machine in the last minute.
    """
    ranks = build.topology(config).size if build.many_processes(config) else 1
    wanted = ranks * config.threads
    if config.threads == 1 or (wanted <= cores and load < BUSY_SHARE * cores):
        return None
    each = f"{ranks} ranks of {config.threads} threads" if ranks > 1 else f"{wanted} threads"
    reason = f"on {cores} cores" if wanted > cores else f"while others use {load:.1f} of them"
    return (
        f"threads={config.threads}: {each} {reason} wait for each other at every matrix product, "
        "which has slowed training up to 19 times; threads=1 is safe"
    )


def remarks(config: Config) -> list[str]:
    """Everything to be said on this machine, now."""
    found = thread_remark(config, len(os.sched_getaffinity(0)), os.getloadavg()[0])
    return [] if found is None else [found]
