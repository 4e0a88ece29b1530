"""Checkpoints of a world of processes: every rank writes what it holds, the leader makes it valid.

    save:   the leader lets servers copy        SAVE, COPIED
            every rank copies what it holds, and begins to write
    round:  every rank says what it has written, if it has     SHARD
            the leader begins to make the checkpoint valid, when all have
            the leader says whether it is       COMMIT

Workers make a round whenever they meet, as long as a checkpoint is on its way.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, final

from dlrm_hybrid.checkpoint.commit import Saved, Shard
from dlrm_hybrid.checkpoint.writer import Groups, ShardWriter
from dlrm_hybrid.parallel.messages import Messenger
from dlrm_hybrid.train.parts import Progress
from dlrm_hybrid.train.saver import WAIT_SECONDS, Committer
from dlrm_hybrid.types import Version
from dlrm_hybrid.wire.frame import Kind


@final
@dataclass(slots=True, kw_only=True)
class WorldCheckpointWriter:
    """A `CheckpointWriter` of one worker.

    Attributes:
        messenger: to the other ranks.
        leader: rank of the worker that leads.
        names: of all ranks of the world, in their order.
        servers: ranks of the servers.
        settled: the version that servers have once all that was pushed until now has arrived.
        committer: makes checkpoints valid, where this worker leads.
        writer: writes what this worker holds.
        groups: gives that.
    """

    messenger: Messenger
    leader: int
    names: Mapping[int, str]
    servers: Sequence[int]
    settled: Callable[[], Version]
    committer: Committer
    writer: ShardWriter
    groups: Callable[[], Groups]
    _step: int | None = None

    @property
    def pending(self) -> bool:
        """See `CheckpointWriter`."""
        return self._step is not None

    def save(self, progress: Progress) -> None:
        """See `CheckpointWriter`; no server learns on before it has copied."""
        begun, step = time.perf_counter(), progress.step
        asked = self.servers if self._leads else ()
        version = self.settled()
        for server in asked:
            self.messenger.send(server, Kind.SAVE, version, {"step": step})
        self.writer.begin(step, self.groups())
        for server in asked:
            self.messenger.receive(server, Kind.COPIED, version)
        if self._leads:
            self.committer.begin(progress, self.names, begun)
        self._step = step

    def poll(self) -> Saved | None:
        """See `CheckpointWriter`."""
        return self._round(0.0)

    def finish(self) -> Saved | None:
        """See `CheckpointWriter`."""
        saved = None
        while self.pending:
            saved = self._round(WAIT_SECONDS)
        return saved

    def amend(self, progress: Progress) -> None:
        """See `CheckpointWriter`."""
        if self._leads:
            self.committer.amend(progress)

    @property
    def _leads(self) -> bool:
        return self.messenger.rank == self.leader

    def _round(self, wait_seconds: float) -> Saved | None:
        step, saved = self._step, None
        assert step is not None
        if self._leads:
            saved = self._lead(step, wait_seconds)
            done = saved is not None
        else:
            self.messenger.send(self.leader, Kind.SHARD, step, self._written(wait_seconds))
            done = self.messenger.receive(self.leader, Kind.COMMIT, step)["done"]
        if done:
            self._step = None
        return saved

    def _lead(self, step: int, wait_seconds: float) -> Saved | None:
        servers = [rank for rank in self.servers if rank in self.committer.owed]
        for rank in servers:
            self.messenger.send(rank, Kind.SHARD, step, {"wait_seconds": wait_seconds})
        workers = [rank for rank in self.names if rank not in (*self.servers, self.leader)]
        written = {self.leader: self._written(wait_seconds)}
        written |= {
            rank: self.messenger.receive(rank, Kind.SHARD, step) for rank in (*workers, *servers)
        }
        for rank, values in written.items():
            if values["shard"] is not None:
                self.committer.take(rank, Shard(**values["shard"]))
        saved = self.committer.poll(wait_seconds)
        for rank in workers:
            self.messenger.send(rank, Kind.COMMIT, step, {"done": saved is not None})
        return saved

    def _written(self, wait_seconds: float) -> dict[str, Any]:
        shard = self.writer.take(wait_seconds)
        return {"shard": None if shard is None else asdict(shard)}
