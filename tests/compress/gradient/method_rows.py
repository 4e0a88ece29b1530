"""Every method of gradients as `conf/` has it, as rows of a table: a new method adds its rows here.

What is special about a row is said here; the laws are in test_gradient_laws.py. Sparsifiers put
together by hand are in gradient_rows.py.

Shapes: N elements of a tensor.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np
from agreeing import elements
from numpy.typing import NDArray
from torch import Tensor

from dlrm_hybrid.compress.gradient.compressor import Compressor
from dlrm_hybrid.compress.gradient.context import StageContext
from dlrm_hybrid.compress.gradient.layout import Layout, Spec
from dlrm_hybrid.compress.gradient.rule import target_k
from dlrm_hybrid.config.compose import values_of
from dlrm_hybrid.config.schema import Config
from dlrm_hybrid.config.validate import validate
from dlrm_hybrid.run.assembly import model as build_model

Float32s = NDArray[np.float32]
# What joins a residual, of a tensor's gradient and of the state before the step.
Joins = Callable[[Float32s, Mapping[str, Tensor], str], Float32s]


def gradient_itself(gradient_N: Float32s, state: Mapping[str, Tensor], name: str) -> Float32s:
    """Without momentum."""
    return gradient_N


@dataclass(frozen=True, slots=True, kw_only=True)
class MethodRow:
    """A configured method and what is special about it.

    Attributes:
        method: choice of `gradient`.
        options: further overrides.
        checks: it refuses what is not finite; otherwise it passes it on.
        drops: a step may lose residual, by the ledger "<tensor>.drains".
        joins: what joins the residual, of which then a part is sent.
        sends_largest: nothing that stays in a tensor is larger than what leaves it.
        sends_always: something leaves at every step at which something is not zero.
        has_threshold: it reports one.
        rounds: values are rounded on the way.
        draws: what leaves is right on average only, and nothing stays.
    """

    method: str
    options: tuple[str, ...] = ()
    checks: bool = True
    drops: bool = False
    joins: Joins = gradient_itself
    sends_largest: bool = True
    sends_always: bool = True
    has_threshold: bool = True
    rounds: bool = False
    draws: bool = False

    @property
    def name(self) -> str:
        """Of the row."""
        return " ".join((self.method, *self.options))

    def make(self, specs: Sequence[Spec]) -> Compressor:
        """A fresh compressor of the only trainer for some tensors."""
        config = configured(self)
        context = StageContext(
            layout=Layout(specs),
            trainer=0,
            trainers=1,
            model_elements=elements(specs),
            last_layer="of another stage",
            lr=build_model.dense_schedule(config, steps=1).lr,
            seed=config.train.seed,
        )
        return config.gradient.build(context)


@cache
def configured(row: MethodRow) -> Config:
    """The configuration of a row; sparsity 0.9 where there is one."""
    sparse = () if row.method in DENSE else ("gradient.density=0.1",)
    world = ("parallel=hybrid", "parallel.trainers=1")
    return validate(values_of([*world, f"gradient={row.method}", *sparse, *row.options]))


def momentum_joins(gradient_N: Float32s, state: Mapping[str, Tensor], name: str) -> Float32s:
    """DGC without Nesterov."""
    return np.float32(0.9) * state[f"{name}.momentum"].numpy().reshape(-1) + gradient_N


def nesterov_joins(gradient_N: Float32s, state: Mapping[str, Tensor], name: str) -> Float32s:
    """DGC with Nesterov."""
    momentum_N = state[f"{name}.momentum"].numpy().reshape(-1)
    return gradient_N + np.float32(0.9) * (momentum_N + gradient_N)


def scaled_joins(gradient_N: Float32s, state: Mapping[str, Tensor], name: str) -> Float32s:
    """Random k without feedback: times N / k."""
    count = sum(view.numel() for key, view in state.items() if key.endswith(".residual"))
    return np.float32(count / target_k(count, 0.9)) * gradient_N


DENSE = ("none", "terngrad")
RULES = ("exact", "dgc", "redsync", "gaussian", "hard", "sidco")
BFLOAT16 = "gradient.precision=bfloat16"
LEVELS = "gradient.precision=levels"
UNION = "gradient.aggregation=union"
LEADER = "gradient.aggregation=leader"
STAGE = "gradient.scope=stage"
OWN_SCALES = ("gradient.sharing=false", "gradient.pull=weights")
WARM = "gradient.warmup_steps=2"

METHOD_ROWS = [
    MethodRow(method="none", checks=False, has_threshold=False),
    MethodRow(method="dct", sends_always=False),
    *(
        MethodRow(method="dct", options=(f"gradient.threshold={rule}",), sends_always=False)
        for rule in RULES
    ),
    MethodRow(method="dct", options=(STAGE, BFLOAT16), sends_always=False, rounds=True),
    MethodRow(method="topk"),
    MethodRow(method="topk", options=(STAGE,)),
    MethodRow(method="topk", options=(UNION,)),
    MethodRow(method="dct", options=(UNION, BFLOAT16), sends_always=False, rounds=True),
    MethodRow(method="dct", options=(LEADER, BFLOAT16), sends_always=False, rounds=True),
    *(
        MethodRow(method="dct", options=(LEVELS, *more), sends_always=False, rounds=True)
        for more in ((), (UNION,), (LEADER,))
    ),
    MethodRow(method="topk", options=(LEVELS,), rounds=True),
    MethodRow(method="topk", options=(LEADER, STAGE)),
    MethodRow(method="dgc", options=(WARM,), joins=momentum_joins),
    MethodRow(method="dgc", options=(WARM, LEADER), joins=momentum_joins),
    MethodRow(method="dgc", options=(WARM, UNION, BFLOAT16), joins=momentum_joins, rounds=True),
    MethodRow(
        method="dgc",
        options=(WARM, "gradient.nesterov=true", BFLOAT16),
        joins=nesterov_joins,
        rounds=True,
    ),
    MethodRow(method="dgc", options=(WARM, LEVELS), joins=momentum_joins, rounds=True),
    MethodRow(method="redsync"),
    MethodRow(method="redsync", options=("gradient.search=trim",)),
    MethodRow(method="gaussian"),
    MethodRow(method="gaussian", options=("gradient.fit=magnitude",)),
    MethodRow(method="hard", options=(BFLOAT16,), sends_always=False, rounds=True),
    *(
        MethodRow(method="sidco", options=(f"gradient.distribution={distribution}",))
        for distribution in ("exponential", "gamma", "pareto")
    ),
    *(
        MethodRow(
            method="sidco",
            options=(f"gradient.adaptation={adaptation}", more),
            rounds=more == BFLOAT16,
        )
        for adaptation, more in (("flip", STAGE), ("literal", BFLOAT16))
    ),
    *(
        MethodRow(
            method="randomk",
            options=(f"gradient.feedback={str(feedback).lower()}",),
            joins=gradient_itself if feedback else scaled_joins,
            drops=not feedback,
            sends_largest=False,
            sends_always=False,
            has_threshold=False,
        )
        for feedback in (True, False)
    ),
    MethodRow(
        method="randomk",
        options=(LEVELS,),
        sends_largest=False,
        sends_always=False,
        has_threshold=False,
        rounds=True,
    ),
    MethodRow(method="cltk", has_threshold=False),
    *(
        MethodRow(method="cltk", options=(rounded,), has_threshold=False, rounds=True)
        for rounded in (BFLOAT16, LEVELS)
    ),
    *(
        MethodRow(
            method="deft",
            options=(f"gradient.budget={budget}", *rounded),
            has_threshold=False,
            rounds=bool(rounded),
        )
        for budget, rounded in (
            *(("exact", ()), ("exact", (BFLOAT16,)), ("exact", (LEVELS,))),
            ("paper", ()),
        )
    ),
    MethodRow(method="terngrad", draws=True),
    MethodRow(method="terngrad", options=("gradient.encoding=trits",), draws=True),
    MethodRow(method="terngrad", options=OWN_SCALES, draws=True),
    MethodRow(method="terngrad", options=("gradient.clip=null",), draws=True),
]
