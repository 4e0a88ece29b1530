"""What decides how numbers are rounded beside the configuration: processor, libraries, threads.

The same weights, rows and steps give the same bits only where all of it is the same.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from importlib.metadata import version

import torch

from dlrm_hybrid.telemetry.machine import cpu_model

# What MKL and oneDNN choose by themselves cannot be read; the processor stands for it.
VARIABLES = ("MKL_ENABLE_INSTRUCTIONS", "MKL_CBWR", "ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA")
PACKAGES = ("torch", "fbgemm-gpu", "numba")


def arithmetic() -> dict[str, str]:
    """Of this process, by name; a variable that is not set is missing."""
    return {
        "threads": str(torch.get_num_threads()),
        "ATen": torch.backends.cpu.get_cpu_capability(),
        "processor": cpu_model(),
        **{package: version(package) for package in PACKAGES},
        **{name: os.environ[name] for name in VARIABLES if name in os.environ},
    }


def changes(before: Mapping[str, str], now: Mapping[str, str]) -> list[str]:
    """What is no more as it was, each as `name before → now`; none where nothing was recorded."""
    if not before:
        return []
    return [
        f"{name} {before.get(name, 'not set')} → {now.get(name, 'not set')}"
        for name in {**before, **now}
        if before.get(name) != now.get(name)
    ]
