"""One replica with its residual for several threads (hogwild; DCT, Gupta et al., KDD 2021, 3.3).

The threads share one client: one compressor, one count of pushes, one stream of answers. One thread
at a time encodes, numbers and sends a push, so servers see one worker that pushes in its order; and
answers are applied one after the other, in that order. Other threads read the replica while they
are written to it: a batch may be computed with some old and some new weights.
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
@dataclass(slots=True)
class ThreadClient(Client):
    """One thread's client: it pulls the answer to its own last push before it computes on."""

    _client: ServerClient
    _pushing: Lock
    _pulling: Lock
    _waiting: Within
    _due: int = 0

    @override
    def pull(self) -> Program[None]:
        """Apply the answer to the thread's own last push, and all versions before it.

        Raises:
            DlrmError: see `ServerClient.apply`.
        """
        # One version at a time, so that no two threads wait for the same frame.
        while self._client.wanted(self._due):
            self._enter(self._pulling)
            try:
                if missing := self._client.wanted(self._due):
                    self._client.apply((yield missing[0]))
            finally:
                self._pulling.release()

    @override
    def push(self, gradients: Mapping[str, Tensor]) -> Program[None]:
        """Push as `ServerClient.push` does, while no other thread pushes."""
        self._enter(self._pushing)
        try:
            yield from self._client.push(gradients)
            self._due = self._client.pushed
        finally:
            self._pushing.release()

    @override
    def settled(self) -> Version:
        return self._client.settled()

    @override
    def restart(self, pushed: int, values: Mapping[str, Tensor]) -> None:
        """Reset this thread's count; the owner of the shared client restarts the client."""
        self._due = 0

    def _enter(self, turn: Lock) -> None:
        with self._waiting:
            turn.acquire()


def thread_clients(
    client: ServerClient, threads: int, pushing: Lock, clock: SpanClock
) -> Sequence[ThreadClient]:
    """A client for each thread.

    Args:
        client: the shared client; use it directly only while no thread is in a step.
        threads: number of threads.
        pushing: lock of the thread that pushes.
        clock: measures waiting for each other.
    """
    waiting, pulling = clock.waiting(TURN), Lock()
    return [ThreadClient(client, pushing, pulling, waiting) for _ in range(threads)]
