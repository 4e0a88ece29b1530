"""Compiled inner loops (numba), one file each; no kernel calls one of another file."""
