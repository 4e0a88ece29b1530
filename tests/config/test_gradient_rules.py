"""Which keys of `gradient` go together, with each other and with other sections."""

from pathlib import Path

import pytest

from dlrm_hybrid.config.compose import sweep_of, values_of
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
        ("gradient.density=0.1", "gradient.density=0.1: only applies to gradient=cltk, dct, "),
        ("gradient.sparsity=high", "gradient.sparsity: unknown key; gradient.density is the frac"),
        ("gradient.clip=3", "gradient.clip=3: only applies to gradient=terngrad"),
        (
            f"{HYBRID} gradient=randomk gradient.feedback=false gradient.precision=levels",
            "gradient.precision = 'levels': what rounds to zero must wait in a residual; needs "
            "feedback=true",
        ),
        (
            f"{HYBRID} gradient=dct gradient.lifespan=null",
            "gradient.lifespan = null: must be a whole number at least 1",
        ),
        (
            f"{HYBRID} gradient=dct gradient.density=1.5",
            "gradient.density = 1.5: must be a number above 0 and at most 1",
        ),
        (
            f"{HYBRID} gradient=dct gradient.threshold=soft",
            "gradient.threshold = 'soft': must be 'dgc' or 'gaussian' or 'hard' or 'redsync' or",
        ),
        (
            f"{HYBRID} gradient=dct gradient.staggered=true",
            "gradient.staggered = True: only applies to renewal=fixed",
        ),
        (
            f"{HYBRID} gradient=dct gradient.residual=update optimizer=adagrad",
            "gradient.residual = 'update': needs optimizer=sgd; optimizer=adagrad must see",
        ),
        (
            f"{HYBRID} gradient=topk gradient.lifespan=10",
            "gradient.lifespan = 10: gradient=topk selects anew every step; gradient=dct reuses",
        ),
        (
            f"{HYBRID} gradient=dct gradient.scope=stage gradient.renewal=fixed "
            "gradient.staggered=true",
            "gradient.staggered = True: scope=stage has one threshold for all tensors",
        ),
        (
            f"{HYBRID} gradient=dgc gradient.warmup_sparsities=[0.5,0.25]",
            "gradient.warmup_sparsities = [0.5, 0.25]: must increase",
        ),
        (
            f"{HYBRID} gradient=dgc gradient.density=0.001 optimizer=momentum",
            "gradient = 'dgc': needs optimizer=sgd, not momentum",
        ),
        (
            f"{HYBRID} gradient=sidco gradient.adaptation=worst",
            "gradient.adaptation = 'worst': must be 'best' or 'literal' or 'flip' or a whole",
        ),
        (
            f"{HYBRID} gradient=topk gradient.aggregation=union sync=bounded sync.staleness=1",
            "gradient = 'topk': its trainers synchronize in every step; needs sync=sync or "
            "gradient.aggregation=own, not bounded",
        ),
        (
            f"{HYBRID} gradient=dct gradient.aggregation=leader gradient.drain=flush",
            "gradient.drain = 'flush': with aggregation=leader a trainer cannot send a residual of "
            "its own; use discard or none",
        ),
        (
            f"{HYBRID} gradient=dct gradient.aggregation=leader gradient.renewal=fixed",
            "gradient.lifespan = 1000: with aggregation=leader a trainer selects in turns, which "
            "may never fall on a fixed renewal; use 1, or renewal=controlled",
        ),
        (
            f"{HYBRID} gradient=terngrad gradient.sharing=false gradient.pull=levels",
            "gradient.sharing = False: sums of different scales have no common levels; "
            "needs pull=weights",
        ),
        (
            f"{HYBRID} gradient=terngrad pull.precision=bfloat16",
            "pull.precision = 'bfloat16': gradient.pull=levels does not round weights; "
            "needs gradient.pull=weights",
        ),
        (
            f"{HYBRID} gradient=cltk sync=bounded sync.staleness=1",
            "gradient = 'cltk': its trainers synchronize in every step; needs sync=sync, "
            "not bounded",
        ),
        (
            f"{HYBRID} gradient=terngrad sync=bounded sync.staleness=1",
            "gradient = 'terngrad': its trainers synchronize in every step; needs sync=sync or "
            "gradient.sharing=false, not bounded",
        ),
        (
            f"{ASYNC} gradient=dct gradient.residual=update",
            "gradient.residual = 'update': with sync=async servers know the learning rate, not "
            "trainers; needs gradient",
        ),
        (
            f"{HYBRID} gradient=hard gradient.magnitude=0",
            "gradient.magnitude = 0: must be a number above 0 and at most 3.40282e+38 or null",
        ),
        (
            f"{HYBRID} gradient=dct gradient.magnitude=0.1",
            "gradient.magnitude=0.1: only applies to gradient=hard",
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


@pytest.mark.parametrize(
    ("sparsities", "densities"), [("0.9", [0.1]), ("0.99,.999,0", [0.01, 0.001, 1.0])]
)
def test_a_sparsity_is_read_as_the_density_that_it_leaves(
    sparsities: str, densities: list[float]
) -> None:
    overrides = [HYBRID, "gradient=dct", f"gradient.sparsity={sparsities}"]
    sweep = sweep_of([*overrides, "train.seed=1,2"])
    jobs = map(sweep.job, range(len(sweep.points)))
    found = {job.values["gradient"]["density"] for job in jobs}
    assert found == {*densities}
    if len(densities) == 1:
        assert values_of(overrides)["gradient"]["density"] == densities[0]


def test_an_experiment_of_ones_own_sets_what_its_method_has(tmp_path: Path) -> None:
    path = tmp_path / "experiment" / "mine.yaml"
    path.parent.mkdir()
    path.write_text("gradient:\n  momentum: 0.5\n")
    with pytest.raises(ConfigError) as caught:
        values_of([f"conf={tmp_path}", "+experiment=mine"])
    expected = "gradient.momentum = 0.5: has no effect with gradient=none; only applies to gradi"
    assert f"{path}:2: {expected}" in str(caught.value)
