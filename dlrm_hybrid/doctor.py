"""Checks of a machine for training: each tries what training will do."""

from __future__ import annotations

import os
import platform
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from enum import StrEnum
from importlib import metadata
from pathlib import Path

import psutil

from dlrm_hybrid.comm.netem.network import EmulatedNetwork, open_network
from dlrm_hybrid.comm.netem.plan import Method, NetworkPlan
from dlrm_hybrid.data.shards import open_shards, verify
from dlrm_hybrid.limits import INSTALL_TRAINER
from dlrm_hybrid.types import DataError, ResourceError

GIB = 2**30
MB = 1e6
VERSIONS = {"torch": "2.13.0", "torchrec": "1.8.0", "fbgemm-gpu": "1.8.0"}
# pip removes an old fbgemm-gpu last, with files of the new one.
INSTALL = f"in a checkout, make install, or pip uninstall fbgemm-gpu and {INSTALL_TRAINER}"
LEAST_GIB = 1  # of memory, and of disk
KAGGLE_MEMORY_GIB, KAGGLE_DISK_GIB = 4, 26
PAPER_LAYERS = ((13, 512), (512, 256), (256, 64), (64, 16), (367, 512), (512, 256), (256, 1))
PAPER_BATCH = 128
VECTOR_FLAGS = ("avx2", "avx512f", "avx512_bf16", "amx_bf16", "asimd", "sve")
EMULATED = NetworkPlan(hosts=2, rate_bits_per_second=10**8, latency_seconds=None)
DELAYED = replace(EMULATED, latency_seconds=0.001)


class Level(StrEnum):
    """Severity of a finding: `FAIL` means that training cannot run."""

    OK = "ok"
    NOTE = "note"
    FAIL = "FAIL"


Finding = tuple[Level, str]
"""Severity and detail of a check; unless it is OK, the detail says what to do."""


def run_checks(folder: Path, rows: Callable[[], Finding]) -> Iterator[tuple[str, Level, str]]:
    """Run all checks, cheapest first; yield name, severity and detail of each.

    Args:
        folder: where runs and data would be.
        rows: calls `check_rows`.
    """
    probes: dict[str, Callable[[], Finding]] = {
        "python": _python,
        "packages": _packages,
        "cores": _cores,
        "vector instructions": _vectors,
        "memory": _memory,
        "disk": lambda: _disk(folder),
        "prepared rows": rows,
        "torch": _torch,
        "fbgemm": _fbgemm,
        "bfloat16": _bfloat16,
        "kernels": _kernels,
        "network emulation": lambda: _emulated(EMULATED, _echo_text),
        "network latency": lambda: _emulated(DELAYED, _delay_text),
    }
    for name, probe in probes.items():
        try:
            yield name, *probe()
        except Exception as error:  # whatever is broken is a finding, not the end of the report
            yield name, Level.FAIL, f"{type(error).__name__}: {error}"


def _python() -> Finding:
    return Level.OK, f"{platform.python_version()}, {platform.system()} {platform.machine()}"


def _packages() -> Finding:
    versions = {name: metadata.version(name) for name in VERSIONS}
    wrong = [
        f"{name} is {version}, {VERSIONS[name]} is needed"
        for name, version in versions.items()
        if version.partition("+")[0] != VERSIONS[name]
    ]
    if "+cpu" in versions["torch"] and "+cpu" not in versions["fbgemm-gpu"]:
        wrong.append(f"fbgemm-gpu {versions['fbgemm-gpu']} is built for CUDA, torch is not")
    if wrong:
        return Level.FAIL, f"{'; '.join(wrong)}: {INSTALL}"
    return Level.OK, ", ".join(f"{name} {version}" for name, version in versions.items())


def _cores() -> Finding:
    cores, load = len(os.sched_getaffinity(0)), os.getloadavg()[0]
    text = f"{cores}, load {load:.1f}"
    if load > cores:
        advice = "keep threads=1: oversubscription has slowed training up to 19-fold"
        return Level.NOTE, f"{text}: busy, wall times are unreliable; {advice}"
    return Level.OK, text


def _vectors() -> Finding:
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    flags = " ".join(line for line in lines if line.startswith(("flags", "Features"))).split()
    names = [flag for flag in VECTOR_FLAGS if flag in flags]
    if not names:
        return Level.NOTE, "none known: training will be slow"
    return Level.OK, ", ".join(names)


def _memory() -> Finding:
    free = psutil.virtual_memory().available
    return _room(f"{free / GIB:.1f} GiB available", free, KAGGLE_MEMORY_GIB)


def _disk(folder: Path) -> Finding:
    if not os.access(folder, os.W_OK):
        return Level.FAIL, f"{folder} is not writable"
    free = shutil.disk_usage(folder).free
    return _room(f"{free / GIB:.0f} GiB free in {folder}", free, KAGGLE_DISK_GIB)


def _room(text: str, free_bytes: int, kaggle_gib: int) -> Finding:
    if free_bytes < LEAST_GIB * GIB:
        return Level.FAIL, f"{text}, {LEAST_GIB} GiB needed"
    if free_bytes < kaggle_gib * GIB:
        return Level.NOTE, f"{text}; all of Criteo Kaggle needs about {kaggle_gib} GiB"
    return Level.OK, text


def check_rows(folder: Path, progress: Callable[[int, int], None]) -> Finding:
    """Read all prepared rows and compare their checksums.

    Args:
        folder: the configured folder of prepared rows.
        progress: called with the number of rows read so far and of all.
    """
    if not folder.exists():
        return Level.OK, f"none in {folder} yet"
    try:
        shards = open_shards(folder, None)
        verify(shards, lambda done: progress(done, shards.manifest.rows))
    except DataError as error:
        return Level.FAIL, str(error)
    return Level.OK, f"{shards.manifest.rows:,} in {folder}, all checksums match"


def _torch() -> Finding:
    import torch

    if not torch.version.cuda:
        return Level.OK, f"{torch.__version__}, CPU build: device=cpu only"
    build = f"{torch.__version__}, CUDA {torch.version.cuda}"
    names = [torch.cuda.get_device_name(device) for device in range(torch.cuda.device_count())]
    if not names:
        return Level.NOTE, f"{build}, but it sees no GPU: device=cpu only"
    return Level.OK, f"{build}, {', '.join(names)}: device=cuda works"


def _fbgemm() -> Finding:
    """Look up and update one embedding row with the operators that training uses."""
    import torch

    from dlrm_hybrid.model.embeddings import DistinctBags, Embeddings
    from dlrm_hybrid.model.spec import ModelSpec
    from dlrm_hybrid.model.tables import Fused

    spec = ModelSpec(embedding_dim=4, bottom=(1, 4), top=(1,), table_rows=(3,))
    tables = Embeddings(spec, Fused())
    (weights,) = tables.weights().values()
    weights.fill_(1.0)
    tables.set_lr(0.5)
    # DistinctBags always go through FBGEMM; another batch as small as this one would not.
    bag = DistinctBags(torch.tensor([1]), torch.arange(2), torch.tensor([0]))
    tables.pooled(bag).sum().backward()
    if weights[1].tolist() != [0.5] * 4 or weights[0].tolist() != [1.0] * 4:
        return Level.FAIL, "the fused update of an embedding row is incorrect"
    return Level.OK, "operators load; fused update verified"


def _bfloat16() -> Finding:
    """Time both precisions on the layers of the paper's model, on one thread like a rank."""
    import torch

    from dlrm_hybrid.model.layers.products import measure_bfloat16

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        result = measure_bfloat16(PAPER_LAYERS, PAPER_BATCH)
    finally:
        torch.set_num_threads(threads)
    text = (
        f"matrix products at {result.speed:.2f} times the speed of float32 (batch {PAPER_BATCH}, "
        f"best of {result.repeats})"
    )
    if result.speed < 1:
        return Level.NOTE, f"{text}: keep precision=float32"
    return Level.OK, text


def _kernels() -> Finding:
    """How many kernels are compiled, for which processor, where they are kept and their size."""
    from dlrm_hybrid.kernels.jit import kept_kernels, kernel_folder, kernels, processor

    folder = kernel_folder()
    why = "; ".join(folder.refused)
    if folder.path is None:
        return Level.NOTE, f"cannot be kept, each process compiles its own: {why}"
    compiled, count = kept_kernels(folder.path), len([*kernels()])
    num_bytes = sum(path.stat().st_size for path in folder.path.iterdir())
    detail = (
        f"{compiled} of {count} compiled for {processor().split()[0]}, "
        f"{num_bytes / MB:.1f} MB in {folder.path}"
    )
    if why:
        return Level.NOTE, f"{detail}; {why}"
    if compiled < count:
        advice = "the first run compiles what it calls; to do it now: doctor doctor.action=compile"
        return Level.NOTE, f"{detail}; {advice}"
    return Level.OK, detail


def _echo_text(network: EmulatedNetwork) -> str:
    rate = network.plan.rate_bits_per_second / 1e6
    return (
        f"hosts and shaped links work; at {rate:g} Mbit/s an echo takes "
        f"{network.echo_share:.0%} of its nominal time"
    )


def _delay_text(network: EmulatedNetwork) -> str:
    how = {
        Method.NETEM: "by the kernel (netem)",
        Method.USER_SPACE: "in user space: this kernel has no netem",
    }
    assert network.method is not None and network.plan.latency_seconds is not None
    return (
        f"emulated {how[network.method]}; a round trip takes "
        f"{1e3 * network.round_trip_seconds:.1f} ms, asked for were "
        f"{2e3 * network.plan.latency_seconds:g}"
    )


def _emulated(plan: NetworkPlan, text: Callable[[EmulatedNetwork], str]) -> Finding:
    """Make a small emulated network and measure it; only a note if it cannot be made."""
    try:
        with open_network(plan) as network:
            return Level.OK, text(network)
    except ResourceError as error:
        return Level.NOTE, str(error)
