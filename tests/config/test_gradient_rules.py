"""Which keys of `gradient` go together, with each other and with other sections."""

import pytest

from dlrm_hybrid.config.compose import values_of
from dlrm_hybrid.types import ConfigError

HYBRID = "parallel=hybrid"
ASYNC = f"{HYBRID} sync=async embedding=served parallel.table_servers=1"


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            "gradient=dct",
            "gradient = 'dct': needs a parameter server to send to; add parallel=hybrid",
        ),
        (
            "gradient.sparsity=0.9",
            "gradient.sparsity = 0.9: has no effect with gradient=none; choose e.g. gradient=dct",
        ),
        ("gradient.lifespan=10", "gradient.lifespan = 10: has no effect with gradient=none"),
        (
            "gradient.precision=bfloat16",
            "gradient.precision = 'bfloat16': gradient=none sends float32",
        ),
        (
            f"{HYBRID} gradient=randomk gradient.randomk.feedback=false gradient.precision=levels",
            "gradient.precision = 'levels': what rounds to zero must wait in a residual; needs "
            "gradient.randomk.feedback=true",
        ),
        (
            f"{HYBRID} gradient=dct gradient.lifespan=null",
            "gradient.lifespan = null: gradient=dct needs a value",
        ),
        (f"{HYBRID} gradient=dct gradient.sparsity=1.5", "gradient.sparsity = 1.5: must"),
        (
            f"{HYBRID} gradient=dct gradient.threshold=soft",
            "gradient.threshold = 'soft': must be 'exact', 'histogram'",
        ),
        (
            f"{HYBRID} gradient=dct gradient.staggered=true",
            "gradient.staggered = True: only applies to gradient.renewal=fixed",
        ),
        (
            f"{HYBRID} gradient=dct gradient.residual=update optimizer=adagrad",
            "gradient.residual = 'update': needs optimizer=sgd; optimizer=adagrad must see",
        ),
        (
            f"{HYBRID} gradient=topk gradient.lifespan=10",
            "gradient.lifespan = 10, gradient.renewal = 'fixed': gradient=topk selects anew",
        ),
        (
            f"{HYBRID} gradient=dct gradient.scope=stage gradient.renewal=fixed "
            "gradient.staggered=true",
            "gradient.staggered = True: gradient.scope=stage has one threshold for all tensors",
        ),
        (
            f"{HYBRID} gradient=dgc gradient.correction.warmup_sparsities=[0.5,0.25]",
            "gradient.correction.warmup_sparsities = [0.5, 0.25]: must increase",
        ),
        (
            f"{HYBRID} gradient=dgc gradient.sparsity=0.999 optimizer=momentum",
            "gradient = 'dgc': needs optimizer=sgd, not momentum",
        ),
        (
            f"{HYBRID} gradient=sidco gradient.sidco.adaptation=worst",
            "gradient.sidco.adaptation = 'worst': must be 'best', 'literal' or 'flip'",
        ),
        (
            f"{HYBRID} gradient=topk gradient.aggregation=union sync=bounded sync.staleness=1",
            "gradient.aggregation = 'union': trainers synchronize in every step; needs sync=sync, "
            "not bounded",
        ),
        (
            f"{HYBRID} gradient=dct gradient.aggregation=leader gradient.drain=flush",
            "gradient.drain = 'flush': with gradient.aggregation=leader a trainer cannot send a "
            "residual of its own; use discard or none",
        ),
        (
            f"{HYBRID} gradient=dct gradient.aggregation=leader gradient.renewal=fixed",
            "gradient.lifespan = 1000: with gradient.aggregation=leader a trainer selects in "
            "turns, which may never fall on a fixed renewal; use 1, or gradient.renewal=controlled",
        ),
        (
            f"{HYBRID} gradient=terngrad gradient.terngrad.sharing=false",
            "gradient.terngrad.sharing = False: sums of different scales have no common levels; "
            "needs gradient.terngrad.pull=weights",
        ),
        (
            f"{HYBRID} gradient=terngrad pull.precision=bfloat16",
            "pull.precision = 'bfloat16': gradient.terngrad.pull=levels does not round weights; "
            "needs gradient.terngrad.pull=weights",
        ),
        (
            f"{HYBRID} gradient=cltk sync=bounded sync.staleness=1",
            "gradient = 'cltk': its trainers synchronize in every step; needs sync=sync, "
            "not bounded",
        ),
        (
            f"{HYBRID} gradient=terngrad sync=bounded sync.staleness=1",
            "gradient = 'terngrad': its trainers synchronize in every step; needs sync=sync or "
            "gradient.terngrad.sharing=false, not bounded",
        ),
        (
            f"{ASYNC} gradient=dct gradient.residual=update",
            "gradient.residual = 'update': with sync=async servers know the learning rate, not "
            "trainers; needs gradient",
        ),
        (
            f"{HYBRID} gradient=hard gradient.threshold=exact",
            "gradient.threshold = 'exact': gradient=hard is defined by hard; "
            "gradient=dct works with any rule",
        ),
        (
            f"{HYBRID} gradient=hard gradient.hard=null",
            "gradient.hard = null: gradient=hard needs its keys",
        ),
        (
            f"{HYBRID} gradient=hard gradient.hard.magnitude=0",
            "gradient.hard.magnitude = 0: must be greater than 0",
        ),
        (
            f"{HYBRID} gradient=dct gradient.hard.magnitude=0.1",
            "gradient.hard.magnitude = 0.1: only applies to gradient.threshold=hard, "
            "not gradient.threshold=histogram",
        ),
        (
            "gradient.hard.magnitude=0.1",
            "gradient.hard.magnitude = 0.1: only applies to gradient.threshold=hard, "
            "not gradient=none",
        ),
        (
            "gradient.hard=3",
            "gradient.hard=3: gradient.hard is a section; its keys: gradient.hard.magnitude",
        ),
        ("~gradient", "gradient: missing"),
    ],
)
def test_what_does_not_go_together_is_refused(overrides: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        values_of(overrides.split())
    head, *lines = str(caught.value).splitlines()
    assert len(lines) == 1
    assert lines[0].strip().startswith(message)


def test_sections_that_nobody_reads_are_null() -> None:
    plain = values_of([HYBRID, "gradient=dct"])["gradient"]
    assert plain["hard"] is None
    with_rule = values_of([HYBRID, "gradient=dct", "gradient.threshold=hard"])["gradient"]
    assert with_rule["hard"] == {"magnitude": None}
    assert {**with_rule, "hard": None, "threshold": "histogram"} == plain
