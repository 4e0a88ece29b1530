"""Saves checkpoints of a world of processes, be it one of one, while training goes on.

    save:   the leader lets servers copy        SAVE, COPIED
            every rank copies what it holds, and begins to write
    round:  every rank says what it has written, if it has     SHARD
            the leader begins to make the checkpoint valid, when all have
            the leader says whether it is       COMMIT

Workers make a round whenever they meet, as long as a checkpoint is on its way.
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
from dlrm_hybrid.compress.embedding.state import LEVELS_PREFIX
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
WAIT_SECONDS = 0.2  # for a rank that writes, before the next one is asked


@final
@dataclass(slots=True, kw_only=True)
class Committer:
    """Collects what ranks say of a checkpoint, and lets a thread make it valid.

    Attributes:
        root: the `checkpoints` folder of the run.
        attempt: how often the run has been restarted.
        retention: which checkpoints are kept.
        title: of this rank, for messages.
        facts: what a checkpoint says beside its tensors.
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
        """Ranks that have not said yet what they have written."""
        return [] if self._preparing is None else list(self._preparing.owed)

    def begin(self, progress: Progress, ranks: Mapping[int, str], begun: float) -> None:
        """These ranks have copied what they hold, and write.

        Args:
            progress: of the run.
            ranks: names by number.
            begun: when training stopped for it, in `time.perf_counter`.
        """
        self._preparing = Preparing(step=progress.step, owed=ranks, shards={})
        self._facts = self.facts(progress)
        self._since = time.perf_counter()
        self._seconds = self._since - begun

    def take(self, rank: int, shard: Shard) -> None:
        """What a rank has written; raises ResourceError if it could not."""
        assert self._preparing is not None
        self._preparing = self._preparing.took(rank, shard)

    def lose(self, rank: int) -> None:
        """A rank is gone; what it has not written yet, its residuals, is not saved."""
        assert self._preparing is not None
        self._preparing = self._preparing.without(rank)

    def poll(self, wait_seconds: float) -> Saved | None:
        """The checkpoint once it is valid; raises as `CheckpointWriter.poll`."""
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
        """Let the valid checkpoint of this step say what else is known now."""
        amend(self.root, progress.step, self.facts(progress), self.retention)


@final
@dataclass(slots=True, kw_only=True)
class CheckpointWriter:
    """Saves checkpoints of a run, one at a time; of one process, which may be its only one.

    All processes that run the training loop call the same methods at the same steps. Others
    are asked by the leader.

    Attributes:
        messenger: to the other ranks.
        leader: rank of the process that leads.
        names: of all ranks of the world, in their order.
        asked: the others: servers, and workers that the leader keeps busy.
        settled: the version that servers have once all that was pushed until now has arrived.
        committer: makes checkpoints valid, where this process leads.
        writer: writes what this process holds.
        groups: gives that.
        away: ranks that are gone, but come again; a checkpoint does without what they hold.
        losses: grows with each rank that is.
        pushed: pushes of each worker of a stage until now, where those of stages differ.
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
        """Whether a checkpoint is on its way."""
        return self._step is not None

    def save(self, progress: Progress) -> None:
        """Copy what a checkpoint holds; all else is done in the background."""
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
        """The one on its way if it has become valid, and this process leads; does not wait.

        Raises:
            ResourceError: a rank cannot write; names it, the file and the key.
            ConfigError: the run folder is not the same for all ranks.
        """
        return self._round(0.0)

    def finish(self) -> Saved | None:
        """As `poll`, but wait; afterwards nothing is on its way."""
        saved = None
        while self.pending:
            saved = self._round(WAIT_SECONDS)
        return saved

    def amend(self, progress: Progress) -> None:
        """Let the checkpoint of this step, which is valid, say what else is known now."""
        if self._leads:
            self.committer.amend(progress)

    def _release_workers(self, step: int) -> None:
        """Let others go on once servers have copied: with batches in flight they could push."""
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
        """What a rank answers; None if it is gone."""
        frame = self.messenger.receive_unless(rank, kind, number, lambda: self._since.is_lost(rank))
        return None if frame is None else values_of(frame)

    def _written(self, wait_seconds: float) -> dict[str, Any]:
        shard = self.writer.take(wait_seconds)
        return {"shard": None if shard is None else shard.values}


def piece_groups(pieces: Iterable[Piece]) -> dict[str, list[Piece]]:
    """What one rank adds to a checkpoint, by group; none of them is empty.

    `dense` and `embeddings` are in every checkpoint, the others where the layout of the world needs
    them: `versions` that workers have of weights, `lookups` of rows that they have asked for, the
    state of a `compressor`, what is remembered of rows sent as `levels`, batches in `flight`; or
    the model: `statistics` of batch norm.
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
