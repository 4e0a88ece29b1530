"""`async` that begins in lock-step: rounds of those that are there, then each push alone.

Weights move most in the first steps, and old ones do most harm there. Workers say in a pull that
they push alone from then on. All of them do so at the same rest, where all have their answers and
nobody has pushed yet: between the same two pushes at all servers, whoever was lost before.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import final

from typing_extensions import override

from dlrm_hybrid.parallel.sync.asynchronous import Asynchronous, AsynchronousBucket
from dlrm_hybrid.parallel.sync.policy import (
    Action,
    Average,
    BucketState,
    Exactly,
    Pull,
    Push,
    SyncPolicy,
)
from dlrm_hybrid.parallel.sync.rounds import Rounds, RoundsBucket
from dlrm_hybrid.types import ConfigError, DlrmError, Version


@final
@dataclass(frozen=True, slots=True)
class Warmup(SyncPolicy):
    """Push n is computed with the answer to push n - 1 until the worker pulls to go on alone.

    Attributes:
        steps: made in rounds; learning rates are of these until then, and of later ones after it,
            however often pushes of lost workers were made again.
        then: the policy after that.

    Raises:
        ConfigError: there are no such steps.
    """

    steps: int
    then: Asynchronous

    def __post_init__(self) -> None:
        if self.steps < 1:
            raise ConfigError(f"sync.warmup_steps: {self.steps} must be at least 1")

    @override
    def needs(self, pushed: int) -> Exactly:
        return Exactly(Version(pushed))

    @override
    def alone(self) -> Asynchronous:
        return self.then

    @override
    def bucket(self, workers: Sequence[int], pushed: int) -> WarmupBucket:
        return WarmupBucket(self, Rounds(self.then.trainers).bucket(workers, pushed))


@final
@dataclass(frozen=True, slots=True)
class WarmupBucket(BucketState):
    """The state under one policy, then under the other.

    Attributes:
        policy: of the workers.
        state: in rounds until a worker has pulled to go on alone.
    """

    policy: Warmup
    state: RoundsBucket | AsynchronousBucket

    @property
    @override
    def version(self) -> Version:
        return self.state.version

    @override
    def on_pull(self, pull: Pull) -> WarmupBucket:
        state = self.state
        if pull.alone and isinstance(state, RoundsBucket):
            if state.arrived:
                raise DlrmError(
                    f"pull of rank {pull.sender}: it goes on alone, but rank "
                    f"{next(iter(state.arrived))} is in the middle of a round"
                )
            state = self.policy.then.bucket(state.workers, state.applied)
        return replace(self, state=state.on_pull(pull))

    @override
    def on_push(self, push: Push) -> tuple[WarmupBucket, tuple[Action, ...]]:
        return self._with(*self.state.on_push(push))

    @override
    def on_pass(self, push: Push) -> tuple[WarmupBucket, tuple[Action, ...]]:
        return self._with(*self.state.on_pass(push))

    @override
    def on_leave(self, worker: int) -> tuple[WarmupBucket, tuple[Action, ...]]:
        return self._with(*self.state.on_leave(worker))

    def _with(
        self, state: RoundsBucket | AsynchronousBucket, actions: tuple[Action, ...]
    ) -> tuple[WarmupBucket, tuple[Action, ...]]:
        return replace(self, state=state), tuple(map(self._timed, actions))

    def _timed(self, action: Action) -> Action:
        """With a learning rate of the right part of the run."""
        if not isinstance(action, Average):
            return action
        if isinstance(self.state, RoundsBucket):
            return replace(action, number=min(action.number, self.policy.steps - 1))
        return replace(action, number=max(action.number, self.policy.steps))
