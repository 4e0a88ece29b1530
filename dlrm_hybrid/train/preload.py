"""Imported once by the forkserver, before any rank is forked from it.

Brings the slow imports, so that a rank starts in milliseconds, and ties the forkserver's life to
the supervisor's: this module is the one place of the program where an import does something.
"""

from __future__ import annotations

import os

import torch  # noqa: F401  # pyright: ignore[reportUnusedImport]
import zmq  # noqa: F401  # pyright: ignore[reportUnusedImport]

import dlrm_hybrid.model.sharded_embeddings  # pyright: ignore[reportUnusedImport]
import dlrm_hybrid.train.loop  # noqa: F401  # pyright: ignore[reportUnusedImport]
from dlrm_hybrid.kernels.jit import import_numba
from dlrm_hybrid.process import die_with_parent

die_with_parent(os.getppid())
import_numba()
