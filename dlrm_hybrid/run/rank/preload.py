"""Imported once by the forkserver, before any rank is forked from it.

Ties the forkserver to the supervisor's life, and brings the slow imports and what every rank would
make for itself, so that a rank starts in milliseconds: this module is the one place of the program
where an import does something.
"""

from __future__ import annotations

import gc
import os
from importlib import import_module

from dlrm_hybrid.process import die_with_parent

SLOW = ("torch", "zmq", "dlrm_hybrid.model.sharded_embeddings", "dlrm_hybrid.train.loop")
# Of modules, functions that are slow once: each has a cache, which ranks find filled.
FIRST = (
    ("dlrm_hybrid.kernels.compiler.jit", "import_numba", ()),
    ("dlrm_hybrid.config.validate", "adapter", ()),
    ("dlrm_hybrid.data.manifest", "adapter", ()),
    ("dlrm_hybrid.data.schemas.reading", "builtin", ("criteo_kaggle",)),
)

die_with_parent(os.getppid())  # before imports that take seconds: a run may be refused meanwhile
for name in SLOW:
    import_module(name)
for name, function, arguments in FIRST:
    getattr(import_module(name), function)(*arguments)
gc.freeze()
