"""Lists of worlds that `worlds.py` compares; the others of each are held against its first."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import final

Words = Sequence[str]
"""Overrides."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Listed:
    """Worlds that differ in one thing.

    Attributes:
        worlds: overrides of each by name.
        common: overrides of all.
        speed: more of them where speed is measured.
        scores: more of them where scores are.
        paper: what a paper says of some, in percent of the first: of time, and of test loss.
    """

    worlds: Mapping[str, Words]
    common: Words = ()
    speed: Words = ()
    scores: Words = ()
    paper: Mapping[str, tuple[str, str]] = field(default_factory=dict[str, tuple[str, str]])


NO_CHECKPOINTS = ("checkpoint.every=0", "checkpoint.minutes=0")
TIMED = ("train.evaluate_every=0", *NO_CHECKPOINTS)
ROUND = ("data.rows=100000", "train.epochs=10", *TIMED)  # as long as a step limit says
SCORED = ("parallel.world=in_process", "optimizer.schedule=linear", *NO_CHECKPOINTS)
SERVED = ("embedding=served", "parallel.table_servers=1")
LATE = (*SERVED, "embedding.staleness=4")
BOUNDED, ASYNC = "sync=bounded", "sync=async"

EXPERIMENTS = Listed(
    worlds={
        name: (f"+experiment={name}",)
        for name in ("baseline", "dct_dp", "dct_mp", "dct_hybrid", "dct_levels")
    },
    speed=("data.rows=300000", "train.steps=105", *TIMED),
)

LINKS_OF_TABLES = Listed(
    worlds={
        "sharded, sync": (),
        "sharded, bounded 1": (BOUNDED,),
        "served 0, sync": SERVED,
        "served 4, sync": LATE,
        "served 4, bounded 1": (*LATE, BOUNDED),
        "served 0, async": (*SERVED, ASYNC),
        "served 4, async": (*LATE, ASYNC),
        "served 0, async, 2 threads": (*SERVED, ASYNC, "parallel.threads=2"),
        "served 0, async, 4 threads": (*SERVED, ASYNC, "parallel.threads=4"),
        "served 4, bounded 2": (*LATE, BOUNDED, "sync.staleness=2"),
    },
    common=("+experiment=dct_hybrid",),
    speed=("train.steps=85", *ROUND),
)

CACHED = (*SERVED, "embedding.cache_rows=10000", "embedding.cache_batches=16")
STALE_TABLES = Listed(
    worlds={
        "served-0": SERVED,
        "served-4": LATE,
        "served-16": (*SERVED, "embedding.staleness=16"),
        "served-4-bounded-1": (*LATE, BOUNDED),
        "cached-16": CACHED,
        "served-4-cached-16": (*CACHED, "embedding.staleness=4"),
    },
    common=("parallel=hybrid", "parallel.cuts=[]"),
    scores=SCORED,
)

THREADS = Listed(
    worlds={
        "1 thread": ("parallel.trainers=1", "parallel.threads=1"),
        "2 threads": ("parallel.trainers=1", "parallel.threads=2"),
        "2 trainers": ("parallel.trainers=2", "parallel.threads=1"),
    },
    common=("+experiment=dct_hybrid", ASYNC, *SERVED, "parallel.cuts=[]", "activation=none"),
    speed=("data.rows=233334", *TIMED),  # of which 200,000 train
)

RATES = Listed(
    worlds={
        f"{trainers} trainers, {name}, lr {lr}": (
            *(f"parallel.trainers={trainers}", f"optimizer.lr={lr}"),
            *words,
        )
        for trainers, name, words, rates in (
            (4, "sync", (), (0.1, 0.4)),
            (4, "async", (ASYNC,), (0.1, 0.2, 0.4)),
            (4, "async, DCT 99 %", (ASYNC, "gradient=dct", "gradient.density=0.01"), (0.2,)),
            (16, "sync", (), (0.1,)),
            (16, "async", (ASYNC,), (0.1, 0.4, 1.6)),
        )
        for lr in rates
    },
    common=("parallel=hybrid", "parallel.cuts=[]", *SERVED),
    scores=("parallel.world=in_process", *NO_CHECKPOINTS),
)

ALONE = ("parallel=hybrid", "parallel.trainers=1", "parallel.servers=0")
STALE: Mapping[str, Words] = {
    "4,2,0": ("schedule=dsp", "schedule.delays=[1,1,0]", "schedule.staleness=[4,2,0]"),
    "6,3,0": ("schedule=dsp", "schedule.delays=[2,2,0]", "schedule.staleness=[6,3,0]"),
    "10,5,0": ("schedule=dsp", "schedule.delays=[3,3,0]", "schedule.staleness=[10,5,0]"),
}
"""As in the DSP paper, for three stages, by the staleness."""
SEQUENTIAL: Mapping[str, Words] = {"sequential": ()}
SCHEDULES = Listed(
    worlds={
        **SEQUENTIAL,
        "one_f_one_b, 4": ("schedule=one_f_one_b", "schedule.microbatches=4"),
        **{f"dsp {name}": words for name, words in STALE.items()},
    },
    common=ALONE,
    # At the usual rate and without a warm-up (10,5,0) diverges in fifty steps.
    speed=("data.rows=300000", "train.epochs=10", "train.steps=400", "optimizer.lr=0.01", *TIMED),
)


def staleness(warmup: int) -> Listed:
    """Stages in sequence, and those that do not wait, with steps of warm-up and without."""
    warm = f"optimizer.staleness_warmup_steps={warmup}"
    return Listed(
        worlds={
            **SEQUENTIAL,
            **{f"{name}, warm-up": (*words, warm) for name, words in STALE.items()},
            **STALE,
        },
        common=ALONE,
        scores=SCORED,
    )


PRODUCTION = ("parallel=hybrid", *SERVED, ASYNC)
PRODUCTION_SPEED = ("train.steps=205", *ROUND)
PRODUCTION_SCORES = (*SCORED, "data.rows=400000", "train.evaluate_every=0")
ONE_CUT = ("parallel.cuts=[bottom.2]",)


def dct_dp(sparsity: float, lifespan: int) -> Words:
    """As in the DCT paper: each threshold by sorting, and kept for so many pushes."""
    return (
        *("gradient=dct", "gradient.threshold=exact", "gradient.renewal=fixed"),
        *(f"gradient.density={1 - sparsity:g}", f"gradient.lifespan={lifespan}"),
    )


SAME, AS_95 = "within 0.01", ("as 95 %", "no loss")
LIFESPANS = Listed(
    worlds={
        "nothing": (),
        "95 %, L = 1": dct_dp(0.95, 1),
        "95 %, L = 1, histogram": (*dct_dp(0.95, 1), "gradient.threshold=histogram"),
        **{f"95 %, L = {lifespan}": dct_dp(0.95, lifespan) for lifespan in (10, 100, 1000)},
    },
    common=(*PRODUCTION, "parallel.cuts=[]"),
    speed=PRODUCTION_SPEED,
    scores=PRODUCTION_SCORES,
    paper={
        **{"95 %, L = 1": ("+11", SAME), "95 %, L = 1000": ("-23", SAME)},
        **{"95 %, L = 10": ("", SAME), "95 %, L = 100": ("", SAME)},
    },
)
SPARSITIES = Listed(
    worlds={
        "nothing": (),
        **{f"{100 * one:g} %": dct_dp(one, 1000) for one in (0.75, 0.9, 0.95, 0.98, 0.99, 0.995)},
    },
    common=(*PRODUCTION, "parallel.cuts=[]"),
    speed=PRODUCTION_SPEED,
    scores=PRODUCTION_SCORES,
    paper={
        **{"75 %": ("", "no loss"), "90 %": ("", "no loss"), "95 %": ("-23", "no loss")},
        **{"98 %": AS_95, "99 %": AS_95, "99.5 %": AS_95},
    },
)
TWO_STAGES = Listed(
    worlds={
        "nothing": (),
        **{
            f"{100 * one:g} %": ("activation=dct", f"activation.sparsity={one}")
            for one in (0.75, 0.9, 0.95)
        },
    },
    common=(*PRODUCTION, *ONE_CUT),
    speed=PRODUCTION_SPEED,
    scores=PRODUCTION_SCORES,
    paper={
        "75 %": ("-7.04", "-0.023"),
        "90 %": ("-13.95", "-0.016"),
        "95 %": ("-14.43", "+0.121"),
    },
)

LISTS: Mapping[str, Listed] = {
    "experiments": EXPERIMENTS,
    "tables": LINKS_OF_TABLES,
    "stale-tables": STALE_TABLES,
    "threads": THREADS,
    "rates": RATES,
    "schedules": SCHEDULES,
    "staleness": staleness(2000),
    "staleness-short": staleness(360),
    "lifespans": LIFESPANS,
    "sparsities": SPARSITIES,
    "two-stages": TWO_STAGES,
}
