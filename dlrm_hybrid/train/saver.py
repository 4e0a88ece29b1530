"""Saves checkpoints of a world of processes, or of a single one, while training goes on.

    save:   the process with the driver asks every rank to copy its tensors, and copies its own;
            each begins to write                               SAVE, COPIED
    round:  it asks every rank for its shard, if written       SHARD
            once it has all of them, it commits the checkpoint in the background

It makes a round whenever workers meet, while a checkpoint is under way.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, final

from dlrm_hybrid.checkpoint.commit import Preparing, Saved, Shard, amend, commit
from dlrm_hybrid.checkpoint.folder import RetentionPolicy
from dlrm_hybrid.checkpoint.writer import ShardWriter, in_background, outcome
from dlrm_hybrid.parallel.messages import values_of
from dlrm_hybrid.train.engine import Holder, IsLost, lost_since
from dlrm_hybrid.train.progress import Progress
from dlrm_hybrid.types import ResourceError
from dlrm_hybrid.wire.frame import Kind

WAIT_SECONDS = 0.2  # longest wait for a rank's shard, before the next one is asked


@final
@dataclass(slots=True, kw_only=True)
class CheckpointWriter:
    """Saves checkpoints of a run, one at a time, while workers wait for orders.

    Attributes:
        holder: holds this process's tensors.
        names: names of all ranks whose tensors are saved, in order.
        writer: writes this process's shards.
        retention: rule for the checkpoints kept.
        facts: facts of a checkpoint beside its tensors.
    """

    holder: Holder
    names: Mapping[int, str]
    writer: ShardWriter
    retention: RetentionPolicy
    facts: Callable[[Progress], Mapping[str, Any]]
    _preparing: Preparing | None = None
    _facts: Mapping[str, Any] = field(default_factory=dict[str, Any])
    _commit: Future[tuple[Path, int]] | None = None
    _seconds: float = 0.0  # for which training paused
    _since: float = 0.0  # time at which it went on
    _is_lost: IsLost = field(default_factory=lambda: lost_since(()))

    @property
    def pending(self) -> bool:
        """Whether a checkpoint is under way."""
        return self._preparing is not None

    def save(self, progress: Progress) -> None:
        """Copy the tensors of a checkpoint; the rest is done in the background."""
        start, step, holder = time.perf_counter(), progress.step, self.holder
        away = holder.away
        present = {rank: name for rank, name in self.names.items() if rank not in away}
        peers = [rank for rank in present if rank != holder.messenger.rank]
        version, pushed = holder.settled(), holder.pushed()
        self._is_lost = lost_since(holder.losses)
        for rank in peers:
            holder.messenger.send(rank, Kind.SAVE, version, {"step": step, "pushed": pushed})
        self.writer.begin(step, holder.pieces())
        for rank in peers:
            self._from(rank, Kind.COPIED, version)
        self._preparing = Preparing(step=step, owed=present, shards={})
        self._facts = self.facts(progress)
        self._since = time.perf_counter()
        self._seconds = self._since - start

    def poll(self) -> Saved | None:
        """The checkpoint under way if it has become valid; does not wait.

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
        amend(self.writer.root, progress.step, self.facts(progress), self.retention)

    def _round(self, wait_seconds: float) -> Saved | None:
        """Collect the shards that are written; commit the checkpoint once all of them are."""
        preparing, messenger = self._preparing, self.holder.messenger
        assert preparing is not None
        for rank in preparing.owed:
            if self._is_lost(rank):
                preparing = preparing.without(rank)  # its residuals are not saved
        peers = [rank for rank in preparing.owed if rank != messenger.rank]
        for rank in peers:
            messenger.send(rank, Kind.SHARD, preparing.step, {"wait_seconds": wait_seconds})
        if (shard := self.writer.take(wait_seconds)) is not None:
            preparing = preparing.took(messenger.rank, shard)
        for rank in peers:
            values = self._from(rank, Kind.SHARD, preparing.step)
            if values is None:
                preparing = preparing.without(rank)
            elif values["shard"] is not None:
                preparing = preparing.took(rank, Shard(**values["shard"]))
        self._preparing = preparing
        return self._committed(preparing, wait_seconds) if preparing.is_prepared else None

    def _committed(self, prepared: Preparing, wait_seconds: float) -> Saved | None:
        """Commit a checkpoint in a thread; returns it once it is valid."""
        writer, facts = self.writer, self._facts
        root, attempt, place = writer.root, writer.attempt, writer.place
        if self._commit is None:
            self._commit = in_background(
                lambda: commit(root, attempt, prepared, facts, self.retention, place)
            )
        try:
            result = outcome(self._commit, wait_seconds)
        except ResourceError as error:
            rank = self.holder.messenger.rank
            raise ResourceError(f"{self.names[rank]} (rank {rank}): {error}") from error
        if result is None:
            return None
        self._preparing = self._commit = None
        folder, num_bytes = result
        return Saved(
            step=prepared.step,
            folder=folder,
            num_bytes=num_bytes,
            seconds=self._seconds,
            background_seconds=time.perf_counter() - self._since,
        )

    def _from(self, rank: int, kind: Kind, number: int) -> dict[str, Any] | None:
        """Receive a rank's answer; None if the rank is lost."""
        frame = self.holder.messenger.receive_unless(
            rank, kind, number, lambda: self._is_lost(rank)
        )
        return None if frame is None else values_of(frame)
