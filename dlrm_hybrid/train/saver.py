"""Saves checkpoints of a world of processes, or of a single one, while training goes on.

    save:   the leader makes servers copy                      SAVE, COPIED
            every rank copies its tensors, and begins to write
    round:  every rank reports its shard, if written           SHARD
            the leader begins to commit the checkpoint once all have
            the leader reports whether it is valid             COMMIT

Workers make a round whenever they meet, while a checkpoint is under way.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

from dlrm_hybrid.checkpoint.commit import Preparing, Saved, Shard, amend, commit
from dlrm_hybrid.checkpoint.folder import RetentionPolicy
from dlrm_hybrid.checkpoint.writer import Groups, ShardWriter, in_background, outcome
from dlrm_hybrid.compress.embedding.trainer import LEVELS_PREFIX
from dlrm_hybrid.model.tensors import Piece
from dlrm_hybrid.parallel.compression import PREFIX as COMPRESSOR_PREFIX
from dlrm_hybrid.parallel.finite import EMBEDDING_PREFIX, LOOKUPS_PREFIX
from dlrm_hybrid.parallel.messages import Messenger, values_of
from dlrm_hybrid.parallel.worker import FLIGHT_PREFIX
from dlrm_hybrid.train import statistics
from dlrm_hybrid.train.asynchronous.roll import Since
from dlrm_hybrid.train.progress import Progress
from dlrm_hybrid.types import ResourceError, Version
from dlrm_hybrid.wire.frame import Kind

COMPRESSOR, LOOKUPS, FLIGHT, LEVELS = "compressor", "lookups", "flight", "levels"
_VERSION = re.compile(r"\.(published|threshold|life|behind[0-9]+)$")
WAIT_SECONDS = 0.2  # longest wait for a rank's shard, before the next one is asked


@final
@dataclass(slots=True, kw_only=True)
class Committer:
    """Collects the shards of a checkpoint, and commits it in a thread.

    Attributes:
        root: the `checkpoints` folder of the run.
        attempt: how often the run has been restarted.
        retention: rule for the checkpoints kept.
        title: name of this rank, for messages.
        facts: facts of a checkpoint beside its tensors.
    """

    root: Path
    attempt: int
    retention: RetentionPolicy
    title: str
    facts: Callable[[Progress], Mapping[str, Any]]
    _preparing: Preparing | None = None
    _facts: Mapping[str, Any] | None = None
    _commit: Future[tuple[Path, int]] | None = None
    _seconds: float = 0.0
    _since: float = 0.0

    @property
    def owed(self) -> list[int]:
        """Ranks that have not reported their shards yet."""
        return [] if self._preparing is None else list(self._preparing.owed)

    def begin(self, progress: Progress, ranks: Mapping[int, str], begun: float) -> None:
        """Begin a checkpoint of these ranks, which have copied their tensors.

        Args:
            progress: that of the run.
            ranks: names by number.
            begun: time at which training paused, of `time.perf_counter`.
        """
        self._preparing = Preparing(step=progress.step, owed=ranks, shards={})
        self._facts = self.facts(progress)
        self._since = time.perf_counter()
        self._seconds = self._since - begun

    def take(self, rank: int, shard: Shard) -> None:
        """Add a rank's shard; raises ResourceError if it could not be written."""
        assert self._preparing is not None
        self._preparing = self._preparing.took(rank, shard)

    def lose(self, rank: int) -> None:
        """Go on without a lost rank; its residuals, not yet written, are not saved."""
        assert self._preparing is not None
        self._preparing = self._preparing.without(rank)

    def poll(self, wait_seconds: float) -> Saved | None:
        """Commit once all shards are here; returns it once valid, raises as `CheckpointWriter`."""
        if self._preparing is None or not self._preparing.is_prepared:
            return None
        prepared, facts = self._preparing, self._facts
        assert facts is not None
        if self._commit is None:
            self._commit = in_background(
                lambda: commit(self.root, self.attempt, prepared, facts, self.retention)
            )
        try:
            done = outcome(self._commit, wait_seconds)
        except ResourceError as error:
            raise ResourceError(f"{self.title}: {error}") from error
        if done is None:
            return None
        self._preparing = self._commit = None
        folder, num_bytes = done
        return Saved(
            step=prepared.step,
            folder=folder,
            num_bytes=num_bytes,
            seconds=self._seconds,
            background_seconds=time.perf_counter() - self._since,
        )

    def amend(self, progress: Progress) -> None:
        """Update the facts of the valid checkpoint of this step."""
        amend(self.root, progress.step, self.facts(progress), self.retention)


@final
@dataclass(slots=True, kw_only=True)
class CheckpointWriter:
    """Saves checkpoints of a run, one at a time; one process's side of it.

    All processes in the training loop call the same methods at the same steps.

    Attributes:
        messenger: to the other ranks.
        leader: rank of the process that leads.
        names: those of all ranks of the world, in order.
        asked: ranks outside the loop: servers, and asynchronous workers.
        settled: version of the servers once all pushes made so far have arrived.
        committer: commits checkpoints, if this process leads.
        writer: writes this process's shards.
        groups: pieces that this process holds, by group.
        away: lost ranks that may rejoin, whose shards a checkpoint omits.
        losses: ranks lost so far; appended to.
        pushed: pushes per worker of each stage so far; None if stages agree.
    """

    messenger: Messenger
    leader: int
    names: Mapping[int, str]
    asked: Sequence[int]
    settled: Callable[[], Version]
    committer: Committer
    writer: ShardWriter
    groups: Callable[[], Groups]
    away: Callable[[], Collection[int]] = frozenset
    losses: Sequence[int] = ()
    pushed: Callable[[], Sequence[int]] | None = None
    _step: int | None = None
    _since: Since = Since((), 0)

    @property
    def pending(self) -> bool:
        """Whether a checkpoint is under way."""
        return self._step is not None

    def save(self, progress: Progress) -> None:
        """Copy the tensors of a checkpoint; the rest is done in the background."""
        begun, step = time.perf_counter(), progress.step
        away = self.away()
        asked = [rank for rank in self.asked if rank not in away] if self._leads else ()
        version = self.settled()
        self._since = Since.now(self.losses)
        pushed = None if self.pushed is None else list(self.pushed())
        for server in asked:
            self.messenger.send(server, Kind.SAVE, version, {"step": step, "pushed": pushed})
        self.writer.begin(step, self.groups())
        for server in asked:
            self._from(server, Kind.COPIED, version)
        if pushed is not None:
            self._release_workers(step)
        if self._leads:
            there = {rank: name for rank, name in self.names.items() if rank not in away}
            self.committer.begin(progress, there, begun)
        self._step = step

    def poll(self) -> Saved | None:
        """The checkpoint under way if it has become valid and this process leads; does not wait.

        Raises:
            ResourceError: a rank cannot write; names it, the file and the key.
            ConfigError: the run folder is not the same for all ranks.
        """
        return self._round(0.0)

    def finish(self) -> Saved | None:
        """Wait for the checkpoint under way, if any, and return it as `poll`."""
        saved = None
        while self.pending:
            saved = self._round(WAIT_SECONDS)
        return saved

    def amend(self, progress: Progress) -> None:
        """Update the facts of this step's checkpoint, which is valid."""
        if self._leads:
            self.committer.amend(progress)

    def _release_workers(self, step: int) -> None:
        """Let workers go on once servers have copied: with batches in flight they could push."""
        if not self._leads:
            self.messenger.receive(self.leader, Kind.COPIED, step)
            return
        for rank in self.names:
            if rank not in (*self.asked, self.leader):
                self.messenger.send(rank, Kind.COPIED, step, {})

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
        for rank in self.committer.owed:
            if self._since.is_lost(rank):
                self.committer.lose(rank)
        asked = [rank for rank in self.asked if rank in self.committer.owed]
        for rank in asked:
            self.messenger.send(rank, Kind.SHARD, step, {"wait_seconds": wait_seconds})
        workers = [rank for rank in self.names if rank not in (*self.asked, self.leader)]
        written: dict[int, dict[str, Any] | None] = {self.leader: self._written(wait_seconds)}
        for rank in (*workers, *asked):
            written[rank] = self._from(rank, Kind.SHARD, step)
        for rank, values in written.items():
            if values is None:
                self.committer.lose(rank)
            elif values["shard"] is not None:
                self.committer.take(rank, Shard(**values["shard"]))
        saved = self.committer.poll(wait_seconds)
        for rank in workers:
            self.messenger.send(rank, Kind.COMMIT, step, {"done": saved is not None})
        return saved

    def _from(self, rank: int, kind: Kind, number: int) -> dict[str, Any] | None:
        """Receive a rank's answer; None if the rank is lost."""
        frame = self.messenger.receive_unless(rank, kind, number, lambda: self._since.is_lost(rank))
        return None if frame is None else values_of(frame)

    def _written(self, wait_seconds: float) -> dict[str, Any]:
        shard = self.writer.take(wait_seconds)
        return {"shard": None if shard is None else shard.values}


def piece_groups(pieces: Iterable[Piece]) -> dict[str, list[Piece]]:
    """Group a rank's pieces of a checkpoint; no group is empty.

    `dense` and `embeddings` are in every checkpoint, others if the layout of the world needs them
    (workers' `versions` of weights, `lookups` requested ahead, state of a `compressor` and of rows
    sent as `levels`, batches in `flight`) or the model (`statistics` of batch norm).
    """
    groups: dict[str, list[Piece]] = {}
    for piece in pieces:
        groups.setdefault(_group(piece.name), []).append(piece)
    return groups


def _group(name: str) -> str:
    if name.startswith(COMPRESSOR_PREFIX):
        return COMPRESSOR
    if name.startswith(EMBEDDING_PREFIX):
        return "embeddings"
    if name.startswith(FLIGHT_PREFIX):
        return FLIGHT
    if name.startswith(statistics.PREFIX):
        return statistics.GROUP
    if name.startswith(LEVELS_PREFIX):
        return LEVELS
    if name.startswith(LOOKUPS_PREFIX):
        return LOOKUPS
    return "versions" if _VERSION.search(name) else "dense"
