"""Which kernels a run needs, by the files they are in; knows no numba."""

from __future__ import annotations

# The largest first: what takes longest to compile must not begin last.
ALL = (
    *("read_sections", "synthesize", "section_forms", "histogram", "write_sections", "ternary"),
    *("rows", "id_sets", "parse", "scatter", "sent", "mean", "vocabulary", "distinct", "narrow"),
    *("moments", "select", "largest", "gather", "tables", "levels", "assemble", "sample"),
)
_PREPARE = ("synthesize", "parse", "vocabulary", "assemble")
_WORLD = (
    *("read_sections", "section_forms", "write_sections", "rows", "id_sets", "scatter", "mean"),
    *("distinct", "narrow"),
)
_DCT = ("histogram", "select")
_TERNARY = ("ternary", "levels")


def needed(*, prepares: bool, is_synthetic: bool, world: str | None) -> frozenset[str]:
    """The files whose kernels a verb calls; one too many costs a second at the first run.

    Args:
        prepares: it makes rows ready.
        is_synthetic: the rows are; a teacher scores them.
        world: the method, `gradient.name`, where stages and servers train; "" for a single
            process; None where nothing is trained or evaluated.
    """
    names = set(_PREPARE if prepares else ())
    if is_synthetic:
        names.add("synthesize")
    if world is not None:
        names.update(("gather", "tables"))
    if world:
        names.update(_WORLD)
        if world == "terngrad":
            names.update(_TERNARY, _DCT)
        elif world == "dct":
            names.update(_DCT)
        elif world != "none":
            names.update(set(ALL) - {*_PREPARE, *_TERNARY})
    return frozenset(names)
