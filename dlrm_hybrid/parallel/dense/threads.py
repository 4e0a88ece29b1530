"""One replica with its residual for several threads (hogwild; DCT, Gupta et al., KDD 2021, 3.3).

The threads share one client: one compressor, one count of pushes, one stream of answers. One thread
at a time encodes, numbers and sends a push, so servers see one worker that pushes in its order; and
answers are applied one after the other, in that order. What they write to the replica other threads
read at the same time: a batch may be computed with some old and some new weights.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from threading import Lock
from typing import final

from torch import Tensor
from typing_extensions import override

from dlrm_hybrid.parallel.dense.client import Client, ServerClient
from dlrm_hybrid.parallel.effects import Program
from dlrm_hybrid.telemetry.spans import TURN, SpanClock, Within
from dlrm_hybrid.types import Version


@final
@dataclass(frozen=True, slots=True)
class _Turns:
    """Held by the thread that pushes, and by the one that takes answers."""

    pushing: Lock
    pulling: Lock


@final
@dataclass(slots=True)
class ThreadClient(Client):
    """One thread's access to what it shares; it has the answer to its last push before it pulls."""

    _client: ServerClient
    _turns: _Turns
    _waiting: Within
    _due: int = 0

    @override
    def pull(self) -> Program[None]:
        """Wait for the answer to the thread's own last push, and for all before it.

        Raises:
            DlrmError: see `ServerClient.apply`.
        """
        # One version at a time: nobody waits for what others wait for.
        while self._client.wanted(self._due):
            self._enter(self._turns.pulling)
            try:
                if wanted := self._client.wanted(self._due):
                    self._client.apply((yield wanted[0]))
            finally:
                self._turns.pulling.release()

    @override
    def push(self, gradients: Mapping[str, Tensor]) -> Program[None]:
        """As `ServerClient.push`, when no other thread pushes."""
        self._enter(self._turns.pushing)
        try:
            yield from self._client.push(gradients)
            self._due = self._client.pushed
        finally:
            self._turns.pushing.release()

    @override
    def settled(self) -> Version:
        return self._client.settled()

    @override
    def restart(self, pushed: int, values: Mapping[str, Tensor]) -> None:
        """Nothing is due: what all threads share is restarted by whoever owns it."""
        self._due = 0

    def _enter(self, turn: Lock) -> None:
        with self._waiting:
            turn.acquire()


def thread_clients(
    client: ServerClient, threads: int, pushing: Lock, clock: SpanClock
) -> Sequence[ThreadClient]:
    """A client for each thread.

    Args:
        client: that they share; whoever calls it itself does so while no thread is in a step.
        threads: how many.
        pushing: held by the one that pushes.
        clock: measures waiting for each other.
    """
    turns = _Turns(pushing, Lock())
    return [ThreadClient(client, turns, clock.waiting(TURN)) for _ in range(threads)]
