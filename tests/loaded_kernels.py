"""Imported by the forkserver of tests: loads all kernels, which each rank would do for itself."""

from dlrm_hybrid.kernels import jit

for _, kernel in jit.kernels():
    kernel.compile(jit.argument_types(kernel.py_func))
