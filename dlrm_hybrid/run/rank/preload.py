"""Imported once by the forkserver, before any rank is forked from it.

Ties the forkserver to the supervisor's life, and brings the slow imports, so that a rank starts in
milliseconds: this module is the one place of the program where an import does something.
"""

from __future__ import annotations

import os
from importlib import import_module

from dlrm_hybrid.process import die_with_parent

SLOW = ("torch", "zmq", "dlrm_hybrid.model.sharded_embeddings", "dlrm_hybrid.train.loop")

die_with_parent(os.getppid())  # before imports that take seconds: a run may be refused meanwhile
for name in SLOW:
    import_module(name)
import_module("dlrm_hybrid.kernels.compiler.jit").import_numba()
