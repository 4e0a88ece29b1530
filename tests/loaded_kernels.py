"""Imported by the forkserver of tests: loads all kernels, which each rank would do for itself."""

import gc

from dlrm_hybrid.kernels import jit

for _, kernel in jit.kernels():
    kernel.compile(jit.argument_types(kernel.py_func))
gc.freeze()  # ranks need not look through it, either
