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
# What trainers and servers call in their first step where all that they send is levels, in this
# order. Where only rows are, those of gradients are compiled for nothing, beside the imports.
OF_LEVELS = (
    *("criteo.pack", "criteo.gather", "gaps.unique_ids", "magnitudes.topk_rows"),
    *("gaps.encode_ids", "gaps.decode_ids", "levels.row_levels.take_slots"),
    *("levels.row_levels.row_levels", "levels.steps.quantise", "levels.row_levels.count_levels"),
    *("levels.row_levels.encode_levels", "levels.steps.count_symbols"),
    *("levels.activations.encode_units", "levels.row_levels.clear_slots"),
    *("levels.row_levels.add_squares", "levels.row_levels.decode_levels"),
    *("levels.row_levels.rows_of_levels", "levels.activations.decode_units"),
    *("levels.steps.restore", "scatter.gather", "levels.steps.flip", "magnitudes.kth_magnitude"),
    *("residual.accumulate_select", "levels.rounding.round_to_levels"),
    *("residual.return_rounding_error", "levels.updates.quanta", "levels.updates.count_places"),
    *("levels.updates.list_update", "levels.updates.write_update", "gaps.sum_rows"),
    "levels.row_levels.find_slots",
    *("levels.row_levels.gradient_levels", "levels.row_levels.scale_levels", "rows.sort_by_row"),
    *("levels.updates.read_update", "rows.update_sgd", "levels.updates.collect_update"),
    *("scatter.scatter_add", "scatter.collect", "scatter.put", "levels.rounding.add_levels"),
    "scatter.put_all",
)
# Those of them that trainers without stages, who send no activations, do not call.
OF_STAGES = (
    *("levels.activations.encode_units", "levels.activations.decode_units"),
    *("levels.steps.quantise", "levels.steps.count_symbols", "levels.steps.restore"),
    *("levels.steps.flip", "magnitudes.topk_rows"),
)


def first_kernels(rows_as_levels: bool, activations_as_levels: bool) -> list[str]:
    """The kernels to compile beside the ranks' imports, by what a run sends as levels."""
    if not rows_as_levels:
        return []
    return [name for name in OF_LEVELS if activations_as_levels or name not in OF_STAGES]
