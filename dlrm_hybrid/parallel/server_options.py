"""What a server is told once, when it is made."""

from __future__ import annotations

from dataclasses import dataclass

from dlrm_hybrid.parallel.policy import Policy
from dlrm_hybrid.wire.section import Dtype


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerOptions:
    """How a server keeps its versions.

    Attributes:
        policy: the workers' policy.
        check_every: versions between two comparisons of the replicas with the published copy.
        attempt: how often the run has been restarted.
        pull: type of the values that workers are told.
    """

    policy: Policy
    check_every: int
    attempt: int
    pull: Dtype
