"""Imported once by the forkserver, before any rank is forked from it.

Ties the forkserver to the supervisor, and makes the slow imports and caches that every rank needs,
so that a rank starts in milliseconds. This module is the one place of the program where an import
has effects.
"""

from __future__ import annotations

import gc
import os
import warnings
from collections.abc import Sequence
from contextlib import suppress
from importlib import import_module
from pathlib import Path

from dlrm_hybrid.process import FIRST_KERNELS, FORKSERVER_ERRORS, die_with_parent

MOST_BESIDE_IMPORTS = 4  # each takes 200 MB, as long as the ranks import
SLOW = ("torch", "zmq", "dlrm_hybrid.model.sharded_embeddings", "dlrm_hybrid.train.driver")


def write_errors(parent: int) -> None:
    """Redirect standard error to the file that the supervisor has opened for it, if any.

    It is searched for here, so that the supervisor keeps its own descriptors.
    """
    for link in Path(f"/proc/{parent}/fd").iterdir():
        with suppress(OSError):  # descriptors may close meanwhile
            if str(link.readlink()).startswith(f"/memfd:{FORKSERVER_ERRORS}"):
                descriptor = os.open(link, os.O_WRONLY | os.O_APPEND)
                os.dup2(descriptor, 2)
                os.close(descriptor)


def compile_beside(kernels: Sequence[str]) -> None:
    """Let children compile these kernels on all cores, beside the imports, if they are not kept.

    A rank that needs one meanwhile waits for it, or compiles it itself if none has begun. So what
    fails in a child is said by the rank.
    """
    from dlrm_hybrid.kernels.jit import are_kept, compile_missing

    if are_kept(kernels):
        return
    warnings.filterwarnings("ignore", "forkserver: waitpid")  # it knows of its ranks alone
    parent = os.getpid()
    for _ in range(min(len(os.sched_getaffinity(0)), MOST_BESIDE_IMPORTS)):
        if os.fork() == 0:
            try:
                die_with_parent(parent)
                compile_missing(kernels)
            finally:
                os._exit(0)


def make_first() -> None:
    """Fill caches that are slow to fill, for all ranks."""
    from dlrm_hybrid.config.keys import all_keys
    from dlrm_hybrid.data import manifest
    from dlrm_hybrid.data.schemas.reading import builtin
    from dlrm_hybrid.kernels.jit import import_numba

    import_numba()
    all_keys()
    manifest.adapter()
    builtin("criteo_kaggle")


with suppress(OSError):  # without /proc, errors go to the terminal
    write_errors(os.getppid())
die_with_parent(os.getppid())  # before slow imports: the supervisor may end meanwhile
gc.disable()  # what is imported stays: looking for garbage in it takes a sixth of the time
if kernels := os.environ.get(FIRST_KERNELS):
    compile_beside(kernels.split())
for name in SLOW:
    import_module(name)
make_first()
gc.enable()
gc.freeze()
