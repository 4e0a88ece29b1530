"""Every choice of a world as a column, and few compositions that have every pair of values."""

import re
from collections.abc import Iterable, Mapping, Sequence
from itertools import combinations
from random import Random

Composition = Mapping[str, str]
Columns = Mapping[str, Mapping[str, tuple[str, ...]]]
# Values that cannot go together: COLUMN=VALUE (or VALUE|VALUE), with a second such.
Forbidden = Iterable[tuple[str, str]]
Choice = tuple[str, frozenset[str]]

SPARSE = "gradient.density=0.1"
SERVED = ("embedding=served", "parallel.table_servers=2")
MODELS = {
    "dot": (),
    "cross": ("model.interaction=cross", "model.cross.rank=8", "model.cross.layers=2"),
    "parallel": ("model.interaction=cross", "model.cross.rank=null", "model.cross.deep=[16,8]"),
    "fm": ("model.interaction=fm", "model.fm.deep=[16,8]"),
    "dropout": ("model.dropout=0.3",),
    "norm": ("model.batch_norm=true",),
    "widths": ("model.table_dims=WIDTHS",),
    "own": ("model=outside_model:DeepFm", "model.embedding_dim=4"),
}
ADAM = ("optimizer=adam", "optimizer.lr=0.01", "embedding.lr=0.1")
OPTIMIZERS = {
    "sgd": (),
    "momentum": ("optimizer=momentum", "optimizer.lr=0.02"),
    "adagrad": ("optimizer=adagrad", "optimizer.lr=0.02"),
    "adam": ADAM,
    "adamw": (*ADAM, "optimizer.weight_decay=0.01", "optimizer.decoupled_weight_decay=true"),
    "decay": ("optimizer.weight_decay=0.01", "optimizer.schedule=linear"),
}

COLUMNS: Columns = {
    "rows": {"clicks": (), "lists": (), "bare": ("model.bottom=[]",), "labels": (), "shared": ()},
    "trainers": {"2": ("parallel.trainers=2",), "3": ("parallel.trainers=3",)},
    "cuts": {
        "none": ("parallel.cuts=[]",),
        "bottom": ("parallel.cuts=[bottom.2]",),
        "top": ("parallel.cuts=[top.1]",),
        "two": ("parallel.cuts=[bottom.2,top.2]",),
    },
    "servers": {str(count): (f"parallel.servers={count}",) for count in (0, 1, 2)},
    "schedule": {
        "sequential": (),
        "gpipe": ("schedule=gpipe", "schedule.microbatches=4"),
        "one_f_one_b": ("schedule=one_f_one_b", "schedule.microbatches=2"),
        "dsp": ("schedule=dsp", "schedule.delays=DELAYS", "schedule.staleness=STALENESS"),
    },
    "sync": {
        "sync": (),
        "bounded": ("sync=bounded", "sync.staleness=2"),
        "async": ("sync=async",),
        "in flight": ("sync=async", "sync.in_flight=2", "sync.lr_scale=one"),
    },
    "tables": {
        "fused": (),
        "distinct": ("embedding.deduplicate=true", "embedding.comm_precision=bfloat16"),
        "levels": ("embedding.deduplicate=true", "embedding.levels=true"),
        "few levels": (
            *("embedding.deduplicate=true", "embedding.levels=true"),
            "embedding.copies_rows=16",
        ),
        "served": (*SERVED, "embedding.comm_precision=float16"),
        "stale": (*SERVED, "embedding.staleness=2"),
        "cached": (*SERVED, "embedding.cache_rows=300", "embedding.cache_batches=3"),
        "files": (*SERVED, "embedding.storage=mmap"),
        "served levels": (*SERVED, "embedding.levels=true"),
        "stale levels": (
            *(*SERVED, "embedding.levels=true", "embedding.copies_rows=16"),
            "embedding.staleness=2",
        ),
        "cached levels": (
            *(*SERVED, "embedding.levels=true", "embedding.staleness=1"),
            *("embedding.cache_rows=300", "embedding.cache_batches=3"),
        ),
    },
    "table optimizer": {
        "sgd": (),
        "adagrad": ("embedding.optimizer=adagrad",),
        "rowwise_adagrad": ("embedding.optimizer=rowwise_adagrad",),
        "adam": ("embedding.optimizer=adam", "embedding.weight_decay=0.001"),
        "rowwise_adam": ("embedding.optimizer=rowwise_adam",),
    },
    "optimizer": OPTIMIZERS,
    "gradient": {
        "none": (),
        "dct": ("gradient=dct", SPARSE, "gradient.renewal=fixed", "gradient.staggered=true"),
        "levels": ("gradient=dct", SPARSE, "gradient.precision=levels"),
        "update": ("gradient=dct", SPARSE, "gradient.residual=update", "gradient.scope=stage"),
        "flush": ("gradient=dct", SPARSE, "gradient.drain=flush", "gradient.drain_every=5"),
        "discard": ("gradient=dct", SPARSE, "gradient.drain=discard", "gradient.drain_every=5"),
        "union": ("gradient=dct", SPARSE, "gradient.aggregation=union"),
        "dgc": ("gradient=dgc", SPARSE, "gradient.warmup_steps=1"),
        "leader": ("gradient=dgc", SPARSE, "gradient.aggregation=leader"),
        "sidco": ("gradient=sidco", SPARSE, "gradient.distribution=gamma"),
        "topk": ("gradient=topk", SPARSE, "gradient.precision=bfloat16"),
        "randomk": ("gradient=randomk", SPARSE),
        "hard": ("gradient=hard", SPARSE),
        "gaussian": ("gradient=gaussian", SPARSE),
        "redsync": ("gradient=redsync", SPARSE),
        "cltk": ("gradient=cltk", SPARSE, "gradient.low_pass=0.5"),
        "deft": ("gradient=deft", SPARSE),
        "terngrad": ("gradient=terngrad", "gradient.smallest=30"),
        "terngrad weights": (
            *("gradient=terngrad", "gradient.sharing=false"),
            *("gradient.pull=weights", "gradient.encoding=trits"),
        ),
    },
    "activation": {
        "none": (),
        "dct": ("activation=dct", "activation.sparsity=0.5"),
        "levels": ("activation=dct", "activation.sparsity=0.75", "activation.bits=4"),
        "gradient_topk": ("activation=gradient_topk", "activation.sparsity=0.5"),
        "sketch": ("activation=sketch", "activation.sparsity=0.5"),
    },
    "pull": {
        "weights": (),
        "bfloat16": ("pull.precision=bfloat16",),
        "levels": ("pull.precision=levels",),
        "sparse": ("pull.sparsity=0.9",),
    },
    "model": MODELS,
}
APART = "sync=async|in flight"
MEETING = "gradient=union|leader|cltk|deft|terngrad"
ALL_SENT = ("none", "terngrad", "terngrad weights")
ASKING = "levels|few levels|served|stale|cached|files|served levels|stale levels|cached levels"
SOME_SENT = f"gradient={'|'.join(one for one in COLUMNS['gradient'] if one not in ALL_SENT)}"
FORBIDDEN: Forbidden = (
    ("optimizer=adamw", SOME_SENT),
    ("rows=bare", "cuts=bottom|two"),
    ("cuts=none", "activation=dct|levels|gradient_topk|sketch"),
    ("cuts=none", "schedule=dsp"),
    ("schedule=dsp", f"tables={ASKING}"),
    ("schedule=dsp", APART),
    (APART, "tables=fused|distinct|levels|few levels"),
    (APART, "optimizer=momentum|adamw"),
    (APART, "pull=sparse"),
    (APART, "gradient=update"),
    (APART, "model=norm"),
    (f"{APART}|bounded", MEETING),
    ("model=norm", "schedule=gpipe|one_f_one_b|dsp"),
    ("gradient=terngrad", "pull=bfloat16|levels|sparse"),
    ("servers=0", "sync=bounded|async|in flight"),
    ("servers=0", MEETING),
    ("servers=0", "pull=bfloat16|levels|sparse"),
    ("gradient=update|dgc|leader", "optimizer=momentum|adagrad|adam|adamw"),
    ("gradient=dgc|leader", "optimizer=decay"),
)


ALONE = "optimizer=adagrad|adam|adamw"
TOGETHER = "trainers=2|3"
PLAIN: Columns = {
    "rows": COLUMNS["rows"],
    "trainers": {"1": ("parallel.trainers=1",), **COLUMNS["trainers"]},
    "cuts": {
        **{cut: (f"parallel.cuts=[{cut}]",) for cut in ("", "bottom.1", "bottom.4", "top.3")},
        "bottom.2,top.2": ("parallel.cuts=[bottom.2,top.2]",),
        "bottom.1,bottom.4,top.1": ("parallel.cuts=[bottom.1,bottom.4,top.1]",),
    },
    "servers": {str(count): (f"parallel.servers={count}",) for count in (0, 1, 3)},
    "schedule": {
        "sequential": (),
        "gpipe": ("schedule=gpipe", "schedule.microbatches=4"),
        "one_f_one_b": ("schedule=one_f_one_b", "schedule.microbatches=4"),
    },
    "tables": {"fused": (), "served": SERVED},
    "table optimizer": COLUMNS["table optimizer"],
    "optimizer": OPTIMIZERS,
    "model": MODELS,
}
# Sums in another order are near only where an optimizer does not divide by them; FBGEMM's row-wise
# sums are its own.
PLAIN_FORBIDDEN: Forbidden = (
    ("tables=served", "table optimizer=adagrad|rowwise_adagrad"),
    ("rows=bare", "cuts=bottom.1|bottom.4|bottom.2,top.2|bottom.1,bottom.4,top.1"),
    *((side, ALONE) for side in (TOGETHER, "schedule=gpipe|one_f_one_b")),
    *(
        (side, "table optimizer=adagrad|rowwise_adagrad|adam|rowwise_adam")
        for side in (TOGETHER, "schedule=gpipe|one_f_one_b")
    ),
    *((side, "model=norm") for side in (TOGETHER, "schedule=gpipe|one_f_one_b")),
)


GIVEN = "given"  # rows with tables that begin with vectors or are frozen: in worlds of others
# They differ in a threshold alone.
RARE = ("randomk", "hard", "gaussian", "redsync", "sidco", "topk")


def options(composition: Composition, columns: Columns = COLUMNS) -> tuple[str, ...]:
    """A composition as overrides; of delays as many as there are stages, of widths as tables.

    Parts of a model of one's own are named as the layers, without the dot.
    """
    columns = {**columns, "rows": {**columns["rows"], GIVEN: ()}}
    delays, staleness = ("1,1,0", "4,2,0") if composition["cuts"] == "two" else ("1,0", "2,0")
    given = tuple(
        one.replace("DELAYS", f"[{delays}]")
        .replace("STALENESS", f"[{staleness}]")
        .replace("WIDTHS", _widths(composition))
        for column, value in composition.items()
        for one in columns[column][value]
    )
    return _named(given) if composition["model"] == "own" else given


def plain_options(composition: Composition) -> tuple[str, ...]:
    """What of a composition of `PLAIN` says something without a world."""
    kept = ("rows", "table optimizer", "optimizer", "model")
    given = tuple(
        one.replace("WIDTHS", _widths(composition))
        for name in kept
        for one in PLAIN[name][composition[name]]
    )
    return _named(given) if composition["model"] == "own" else given


def _widths(composition: Composition) -> str:
    """Widths that FBGEMM does not know, and for clicks those that it does; the model's is 4."""
    of_rows = {"clicks": [8, 4, 12, *[4] * 20, 8, 4, 8], "bare": [6, 3], "shared": [6, 3]}
    return str(of_rows.get(composition["rows"], [6, 3, 4])).replace(" ", "")


def _named(given: Sequence[str]) -> tuple[str, ...]:
    """Cuts by the names of the parts; what only a DLRM has is left out."""
    cut = re.compile(r"\b(bottom|top)\.(?=\d)")
    return tuple(cut.sub(r"\1", one) for one in given if one != "model.bottom=[]")


def is_exact(composition: Composition) -> bool:
    """Whether sums have the order, and the roundings, that they have in plain training.

    FBGEMM adds a gradient times the weight of an id in one rounding, table servers in two.
    """
    is_weighted = composition["rows"] in ("lists", "labels", "shared")
    rounds_twice = (composition["tables"], composition["table optimizer"]) == ("served", "sgd")
    has_order = composition["trainers"] == "1" and composition["schedule"] == "sequential"
    return has_order and not (is_weighted and rounds_twice)


def _is_allowed(composition: Composition, forbidden: Sequence[Sequence[Choice]]) -> bool:
    """Whether no two values of it are forbidden together."""
    return not any(
        all(composition[column] in values for column, values in pair) for pair in forbidden
    )


def _choice(side: str) -> Choice:
    column, _, values = side.partition("=")
    return column, frozenset(values.split("|"))


def pairs(composition: Composition) -> set[tuple[tuple[str, str], ...]]:
    """Every two values of different columns."""
    return set(combinations(composition.items(), 2))


def singles(columns: Columns) -> set[tuple[str, str]]:
    """Every value of every column but the rare ones."""
    return {
        (column, value)
        for column, choices in columns.items()
        for value in choices
        if value not in RARE
    }


def size(composition: Composition) -> int:
    """How many ranks a world of processes has."""
    stages = 1 if composition["cuts"] in ("none", "") else composition["cuts"].count(",") + 2
    stages += composition["cuts"] == "two"
    is_served = set(SERVED) <= set(COLUMNS["tables"][composition["tables"]])
    return int(composition["trainers"]) * stages + int(composition["servers"]) + 2 * is_served


def covering(
    columns: Columns = COLUMNS, forbidden: Forbidden = FORBIDDEN
) -> tuple[list[Composition], int]:
    """Compositions in which every pair of values occurs that can.

    Returns:
        them, and how many of the first have every single value that is not `RARE`.
    """
    draw = Random(0)
    chosen: list[Composition] = []
    values = singles(columns)
    while values:  # first every value
        chosen.append(
            max(
                _drawn(columns, forbidden, draw, 600),
                key=lambda one: (len(values & one.items()), -size(one)),
            )
        )
        values -= set(chosen[-1].items())
    count = len(chosen)
    pool = [(one, pairs(one)) for one in _drawn(columns, forbidden, draw, 2000)]
    left = set().union(*(held for _, held in pool)).difference(*map(pairs, chosen))
    while left:
        one, held = max(draw.sample(pool, 120), key=lambda one: len(left & one[1]))
        if left & held:
            chosen.append(one)
            left -= held
    return chosen, count


def _drawn(columns: Columns, forbidden: Forbidden, draw: Random, count: int) -> list[Composition]:
    """So many that are allowed."""
    apart = [tuple(map(_choice, pair)) for pair in forbidden]
    choices = [(column, list(values)) for column, values in columns.items()]
    found: list[Composition] = []
    while len(found) < count:
        one = {column: draw.choice(values) for column, values in choices}
        if _is_allowed(one, apart):
            found.append(one)
    return found
