"""What a server, or a worker's client of servers, is told once, when it is made."""

from __future__ import annotations

from dataclasses import dataclass

from dlrm_hybrid.parallel.dense.master import Learning
from dlrm_hybrid.parallel.sync.policy import Policy
from dlrm_hybrid.wire.section import Dtype


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerOptions:
    """How a server keeps its versions.

    Attributes:
        policy: the workers' policy.
        check_every: versions between two comparisons of the replicas with the published copy.
        attempt: how often the run has been restarted.
        pull: type of the values that workers are told.
        tells_levels: means of ternary gradients are told instead, where they can be; `pull` is
            FLOAT32.
    """

    policy: Policy
    check_every: int
    attempt: int
    pull: Dtype
    tells_levels: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientOptions:
    """How a worker follows servers.

    Attributes:
        policy: the version each step is computed with.
        attempt: how often the run has been restarted.
        learning: that of servers that tell means; None where they tell weights.
    """

    policy: Policy
    attempt: int
    learning: Learning | None
