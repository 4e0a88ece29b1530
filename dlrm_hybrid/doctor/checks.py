"""What training needs of a machine, checked by doing it."""

from __future__ import annotations

import os
import platform
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from enum import StrEnum
from importlib import metadata
from pathlib import Path

import psutil

from dlrm_hybrid.comm.netem.network import open_network
from dlrm_hybrid.comm.netem.plan import Plan
from dlrm_hybrid.data.shards import open_shards, verify
from dlrm_hybrid.types import DataError, ResourceError

GIB = 2**30
MB = 1e6
VERSIONS = {"torch": "2.13.0", "torchrec": "1.8.0", "fbgemm-gpu": "1.8.0"}
LEAST_MEMORY_BYTES = 1 * GIB
KAGGLE_MEMORY_BYTES = 4 * GIB
LEAST_DISK_BYTES = 1 * GIB
KAGGLE_DISK_BYTES = 26 * GIB
PAPER_LAYERS = ((13, 512), (512, 256), (256, 64), (64, 16), (367, 512), (512, 256), (256, 1))
PAPER_BATCH = 128
VECTOR_FLAGS = ("avx2", "avx512f", "avx512_bf16", "amx_bf16", "asimd", "sve")
EMULATED = Plan(hosts=2, rate_bits_per_second=10**8, latency_seconds=None)


class Level(StrEnum):
    """How bad it is: `FAIL` means that training cannot run."""

    OK = "ok"
    NOTE = "note"
    FAIL = "FAIL"


@dataclass(frozen=True, slots=True)
class Check:
    """One line of the report; `detail` of anything but OK says what to do."""

    name: str
    level: Level
    detail: str


def run_checks(folder: Path, rows: Callable[[], Check]) -> Iterator[Check]:
    """All checks, cheapest first.

    Args:
        folder: where runs and data would lie.
        rows: calls `check_rows`.
    """
    probes: list[tuple[str, Callable[[], Check]]] = [
        ("python", _python),
        ("packages", _packages),
        ("cores", _cores),
        ("vector instructions", _vectors),
        ("memory", _memory),
        ("disk", lambda: _disk(folder)),
        ("prepared rows", rows),
        ("torch", _torch),
        ("fbgemm", _fbgemm),
        ("bfloat16", _bfloat16),
        ("kernels", _kernels),
        ("network emulation", _emulation),
        ("network latency", _latency),
    ]
    for name, probe in probes:
        try:
            yield probe()
        except Exception as error:  # whatever is broken is a finding, not the end of the report
            yield Check(name, Level.FAIL, f"{type(error).__name__}: {error}")


def _python() -> Check:
    text = f"{platform.python_version()}, {platform.system()} {platform.machine()}"
    return Check("python", Level.OK, text)


def _packages() -> Check:
    wrong: list[str] = []
    found: list[str] = []
    for name, wanted in VERSIONS.items():
        version = metadata.version(name)
        found.append(f"{name} {version}")
        if version.partition("+")[0] != wanted:
            wrong.append(f"{name} is {version}, {wanted} is needed")
    if wrong:
        advice = "; install with the constraints file: make install"
        return Check("packages", Level.FAIL, "; ".join(wrong) + advice)
    return Check("packages", Level.OK, ", ".join(found))


def _cores() -> Check:
    cores, load = len(os.sched_getaffinity(0)), os.getloadavg()[0]
    text = f"{cores}, load {load:.1f}"
    if load > cores:
        advice = "keep threads=1: oversubscription has slowed training up to 19-fold"
        return Check("cores", Level.NOTE, f"{text}: busy, wall times are unreliable; {advice}")
    return Check("cores", Level.OK, text)


def _vectors() -> Check:
    flags: set[str] = set()
    for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
        if line.startswith(("flags", "Features")):
            flags |= set(line.partition(":")[2].split())
    found = [flag for flag in VECTOR_FLAGS if flag in flags]
    if not found:
        return Check("vector instructions", Level.NOTE, "none known: training will be slow")
    return Check("vector instructions", Level.OK, ", ".join(found))


def _memory() -> Check:
    free = psutil.virtual_memory().available
    text = f"{free / GIB:.1f} GiB available"
    if free < LEAST_MEMORY_BYTES:
        return Check("memory", Level.FAIL, f"{text}, {LEAST_MEMORY_BYTES / GIB:.0f} GiB needed")
    if free < KAGGLE_MEMORY_BYTES:
        return Check("memory", Level.NOTE, f"{text}; all of Criteo Kaggle needs about 4 GiB")
    return Check("memory", Level.OK, text)


def _disk(folder: Path) -> Check:
    free = shutil.disk_usage(folder).free
    text = f"{free / GIB:.0f} GiB free in {folder}"
    if free < LEAST_DISK_BYTES:
        return Check("disk", Level.FAIL, f"{text}, {LEAST_DISK_BYTES / GIB:.0f} GiB needed")
    if not os.access(folder, os.W_OK):
        return Check("disk", Level.FAIL, f"{folder} is not writable")
    if free < KAGGLE_DISK_BYTES:
        return Check("disk", Level.NOTE, f"{text}; all of Criteo Kaggle needs about 26 GiB")
    return Check("disk", Level.OK, text)


def check_rows(folder: Path, progress: Callable[[int, int], None]) -> Check:
    """Read all prepared rows and compare their checksums.

    Args:
        folder: of the rows that the configuration names.
        progress: called with how many of how many rows have been read.
    """
    name = "prepared rows"
    if not folder.exists():
        return Check(name, Level.OK, f"none in {folder} yet")
    try:
        shards = open_shards(folder, None)
        verify(shards, lambda done: progress(done, shards.manifest.rows))
    except DataError as error:
        return Check(name, Level.FAIL, str(error))
    return Check(name, Level.OK, f"{shards.manifest.rows:,} in {folder}, all checksums match")


def _torch() -> Check:
    import torch

    device = "CUDA build" if torch.version.cuda else "CPU build"
    return Check("torch", Level.OK, f"{torch.__version__}, {device}; computes on the CPU")


def _fbgemm() -> Check:
    """Look up and learn one row with the operators that training uses."""
    import torch

    from dlrm_hybrid.model.embeddings import (
        DistinctBags,
        EmbeddingOptimizer,
        EmbeddingOptions,
        Embeddings,
    )
    from dlrm_hybrid.model.spec import ModelSpec

    spec = ModelSpec(embedding_dim=4, bottom=(1, 4), top=(1,), table_rows=(3,))
    options = EmbeddingOptions(optimizer=EmbeddingOptimizer.SGD, eps=1e-8)
    tables = Embeddings(spec, options)
    (weights,) = tables.weights().values()
    weights.fill_(1.0)
    tables.set_lr(0.5)
    # A batch as small as this one goes past FBGEMM, bags of distinct ids never do.
    bag = DistinctBags(torch.tensor([1]), torch.arange(2), torch.tensor([0]))
    tables.pooled(bag).sum().backward()
    if weights[1].tolist() != [0.5] * 4 or weights[0].tolist() != [1.0] * 4:
        return Check("fbgemm", Level.FAIL, "the fused update of an embedding row is incorrect")
    return Check("fbgemm", Level.OK, "operators load; fused update verified")


def _bfloat16() -> Check:
    """Both precisions on the layers of the paper's model, on one thread as ranks do."""
    import torch

    from dlrm_hybrid.model.layers import measure_bfloat16

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        found = measure_bfloat16(PAPER_LAYERS, PAPER_BATCH)
    finally:
        torch.set_num_threads(threads)
    text = (
        f"matrix products at {found.speed:.2f} times the speed of float32 (batch {PAPER_BATCH}, "
        f"best of {found.repeats})"
    )
    if found.speed < 1:
        return Check("bfloat16", Level.NOTE, f"{text}: keep precision=float32")
    return Check("bfloat16", Level.OK, text)


def _kernels() -> Check:
    """What is compiled, for which processor, where it is kept and how big it is."""
    from dlrm_hybrid.kernels import ALL
    from dlrm_hybrid.kernels.cache import kernel_folder, processor
    from dlrm_hybrid.kernels.jit import cache_state, other_folders

    found = kernel_folder()
    why = "; ".join(found.refused)
    if found.path is None:
        return Check(
            "kernels", Level.NOTE, f"cannot be cached, each process compiles its own: {why}"
        )
    state = cache_state(found.path, ALL)
    damaged = "".join(f"; {line}; removed" for line in state.damaged)
    detail = (
        f"{state.compiled} of {state.kernels} compiled for {processor().split()[0]}, "
        f"{state.num_bytes / MB:.1f} MB in {found.path}{damaged}"
    )
    if others := other_folders(found.path):
        num_bytes = sum(size for _, size in others)
        detail += f"; {len(others)} folders of other versions, {num_bytes / MB:.1f} MB"
    if why:
        return Check("kernels", Level.NOTE, f"{detail}; {why}")
    if state.missing:
        advice = "the first run compiles the rest; to do it now: doctor doctor.action=compile"
        return Check("kernels", Level.NOTE, f"{detail}; {advice}")
    return Check("kernels", Level.OK, detail)


def _emulation() -> Check:
    """Make a small network and measure it."""
    name = "network emulation"
    try:
        with open_network(EMULATED) as network:
            return Check(
                name,
                Level.OK,
                f"hosts and shaped links work; at {EMULATED.rate_bits_per_second / 1e6:g} Mbit/s "
                f"an echo takes {network.echo_share:.0%} of its nominal time",
            )
    except ResourceError as error:
        return Check(name, Level.NOTE, str(error))


def _latency() -> Check:
    name = "network latency"
    try:
        with open_network(replace(EMULATED, latency_seconds=0.001)):
            return Check(name, Level.OK, "an emulated network can delay packets")
    except ResourceError as error:
        return Check(name, Level.NOTE, str(error))
