"""Numeric inner loops, compiled by numba; this file names them and imports none.

Each file is described by its own first lines. `ops` puts the six primitives of compression behind
one protocol, which plain torch implements too (`compress.torch_ops`).
"""

from __future__ import annotations

# The largest first: what takes longest to compile must not begin last.
ALL = (
    *("sections", "levels.activations", "levels.updates", "synthesize", "magnitudes", "scatter"),
    *("criteo", "gaps", "rows", "levels.coded_rows", "levels.order", "ops", "ternary"),
    *("delimited", "levels.rows", "levels.steps", "levels.rounding"),
)
_WORLD = ("sections", "scatter", "gaps", "magnitudes")


def needed(
    *,
    prepares: bool,
    is_synthetic: bool,
    world: str | None,
    selects: bool,
    levels: bool,
    activation_levels: bool = False,
    rows: bool = False,
) -> frozenset[str]:
    """The files whose kernels a verb calls; one too many costs seconds at the first run.

    Args:
        prepares: it makes rows ready.
        is_synthetic: the rows are; a teacher scores them.
        world: the method, `gradient.name`, where stages and servers train; "" for a single
            process; None where nothing is trained or evaluated.
        selects: servers select what they publish, whatever the method.
        levels: pushes or pulls are levels.
        activation_levels: activations are.
        rows: rows of tables and their gradients are levels.
    """
    names: set[str] = set()
    if prepares or world is not None:
        names.add("criteo")
    if prepares:
        names.add("delimited")
    if prepares or is_synthetic:
        names.add("synthesize")
    if world is not None:
        names.add("rows")
    if world:
        names.update(_WORLD)
    if world == "terngrad":
        names.add("ternary")
    if selects or world not in (None, "", "none", "terngrad"):
        names.add("ops")
    if levels:
        names.update(("ops", "levels.rounding", "levels.order", "levels.updates"))
    if activation_levels:
        names.update(("levels.activations", "levels.steps"))
    if rows:
        names.update(("levels.rows", "levels.coded_rows"))
    return frozenset(names)
