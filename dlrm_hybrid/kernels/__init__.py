"""Numeric inner loops, compiled by numba; this file names them and imports none.

Each file is described by its own first lines.
"""

from __future__ import annotations

# The largest first: what takes longest to compile must not begin last.
ALL = (
    *("sections", "levels.activations", "levels.updates", "synthesize", "magnitudes", "scatter"),
    *("criteo", "gaps", "rows", "levels.row_levels", "residual", "ternary", "delimited"),
    *("levels.steps", "levels.rounding"),
)
