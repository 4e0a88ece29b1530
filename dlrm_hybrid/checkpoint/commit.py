"""Two-phase commit of checkpoints, and removal of those not to be kept.

Every rank first writes and reports its shard; once the last has, all become valid at once. If a
rank fails or is lost, everything stays as it was. This part is pure.
The manifest comes last into the folder, then the folder is renamed, then `latest` and `best` move,
then older checkpoints go. Whenever this is cut short, `latest` names a complete checkpoint.
"""

from __future__ import annotations

import math
import shutil
import socket
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, final

from dlrm_hybrid.checkpoint.folder import (
    BEST_FILE,
    LATEST_FILE,
    RetentionPolicy,
    best,
    complete,
    partial_folder,
    partial_folders,
    read,
    step_of,
    unwritten,
)
from dlrm_hybrid.checkpoint.manifest import MANIFEST_FILE, folder_name, manifest_text
from dlrm_hybrid.data.preprocessing import PREPROCESSING_FOLDER
from dlrm_hybrid.data.preprocessing import keep as keep_preprocessing
from dlrm_hybrid.disk import flush, replace_text
from dlrm_hybrid.parallel.finite import key_of_rate
from dlrm_hybrid.types import ConfigError, DivergedError, DlrmError, ResourceError

SEEN_SECONDS = 60.0  # longest time after which a network file system shows a new file
POLL_SECONDS = 0.05


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Shard:
    """One rank's shard of a checkpoint, as JSON values.

    Attributes:
        files: size and xxh3 by name.
        tensors: group, dtype, full shape and parts (file, begin, shape), by name.
        fault: why the shard could not be written; None if it was.
        not_finite: name of a tensor with NaN or infinity, for which nothing was written.
    """

    files: Mapping[str, Mapping[str, Any]]
    tensors: Mapping[str, Mapping[str, Any]]
    seconds: float
    fault: str | None
    not_finite: str | None = None

    @property
    def values(self) -> dict[str, Any]:
        """The fields by name, to be sent as JSON."""
        return {field.name: getattr(self, field.name) for field in fields(self)}


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Preparing:
    """A checkpoint whose ranks are still writing.

    Attributes:
        owed: names, by number, of the ranks that have not reported yet.
        shards: shards of the ranks that have, by name of the rank.
    """

    step: int
    owed: Mapping[int, str]
    shards: Mapping[str, Shard]

    def took(self, rank: int, shard: Shard) -> Preparing:
        """This checkpoint with the shard of one more rank.

        Raises:
            ResourceError: the rank could not write; names it.
            DivergedError: the shard holds a value that is not finite; names step, tensor and key.
            DlrmError: the rank has reported before, or has no shard.
        """
        name = self.owed.get(rank)
        if name is None:
            raise DlrmError(f"rank {rank} has nothing to add to the checkpoint of step {self.step}")
        if shard.fault is not None:
            raise ResourceError(f"{name} (rank {rank}): {shard.fault}")
        if shard.not_finite is not None:
            raise DivergedError(
                f"step {self.step}: {shard.not_finite} of {name} (rank {rank}) is not finite, so "
                f"no checkpoint was saved; {key_of_rate(shard.not_finite)} may be too high"
            )
        return replace(self.without(rank), shards={**self.shards, name: shard})

    def without(self, rank: int) -> Preparing:
        """This checkpoint without a rank that was lost before it reported."""
        return replace(self, owed={n: name for n, name in self.owed.items() if n != rank})

    @property
    def is_prepared(self) -> bool:
        """Whether all ranks have written their shards."""
        return not self.owed

    def contents(self) -> dict[str, Any]:
        """Merge `files` and `tensors` of all ranks, for the manifest.

        Raises:
            DlrmError: parts of a tensor are missing, or two ranks disagree about it.
        """
        files = {name: file for x in self.shards.values() for name, file in x.files.items()}
        return {"files": files, "tensors": _merged(self.shards.values())}


def _merged(shards: Iterable[Shard]) -> dict[str, dict[str, Any]]:
    tensors: dict[str, dict[str, Any]] = {}
    for shard in shards:
        for name, entry in shard.tensors.items():
            merged = tensors.setdefault(name, {**entry, "parts": []})
            if any(merged[key] != entry[key] for key in ("group", "dtype", "shape")):
                raise DlrmError(f"{name}: two ranks have saved it as different tensors")
            merged["parts"] += entry["parts"]
    for name, merged in tensors.items():
        elements = sum(math.prod(part["shape"]) for part in merged["parts"])
        if elements != math.prod(merged["shape"]):
            raise DlrmError(f"{name}: {elements} elements saved, its shape is {merged['shape']}")
    return tensors


@dataclass(frozen=True, slots=True, kw_only=True)
class Saved:
    """A checkpoint that is whole and valid.

    Attributes:
        seconds: time that training paused.
        background_seconds: time from then until it was valid.
    """

    step: int
    folder: Path
    num_bytes: int
    seconds: float
    background_seconds: float


def clean(root: Path) -> None:
    """Remove the partial folders of interrupted attempts; no checkpoint may be in progress."""
    for folder in partial_folders(root):
        shutil.rmtree(folder, ignore_errors=True)


def commit(
    root: Path,
    attempt: int,
    prepared: Preparing,
    facts: Mapping[str, Any],
    keep: RetentionPolicy,
    place: str | None = None,
) -> tuple[Path, int]:
    """Make a checkpoint valid; returns its folder, and the bytes of its files but `preprocessing/`.

    Args:
        root: the `checkpoints` folder of the run.
        attempt: the attempt that wrote it.
        facts: whatever else a resumed run needs, as JSON values; `score` is a `Score` or None.
        keep: rule for the checkpoints kept, this one included.
        place: for messages, see `unwritten`.

    Raises:
        ResourceError: the disk is full or not writable; older checkpoints are intact.
        ConfigError: a file that another rank has written cannot be seen here.
    """
    folder = root / folder_name(prepared.step)
    partial = partial_folder(root, prepared.step, attempt)
    try:
        for rank, shard in prepared.shards.items():
            _await_files(partial, rank, shard)
        files = {file for shard in prepared.shards.values() for file in shard.files}
        for path in partial.iterdir():
            if path.name not in files:  # half written by a lost rank
                path.unlink()
        if (root.parent / PREPROCESSING_FOLDER).is_dir():  # batches given to a `World` have none
            keep_preprocessing(root.parent, partial)
        text = manifest_text({"step": prepared.step, **prepared.contents(), **facts})
        replace_text(partial / MANIFEST_FILE, text)
        # One may be left by an attempt that ended before `latest` moved, or during its removal.
        _remove(folder)
        partial.rename(folder)
        flush(root)
        replace_text(root / LATEST_FILE, folder.name + "\n")
        for newer in complete(root):
            if step_of(newer) > prepared.step:
                _remove(newer)
        _keep(root, keep)
        return folder, sum(path.stat().st_size for path in folder.iterdir() if path.is_file())
    except OSError as error:
        raise ResourceError(unwritten(root, folder, error, place)) from error


def amend(root: Path, step: int, facts: Mapping[str, Any], keep: RetentionPolicy) -> None:
    """Change facts in the manifest of a step's checkpoint, if any; raises ResourceError."""
    folder = root / folder_name(step)
    if not (folder / MANIFEST_FILE).exists():
        return  # the run began from another run's checkpoint
    try:
        replace_text(folder / MANIFEST_FILE, manifest_text({**read(folder).values, **facts}))
        _keep(root, keep)
    except OSError as error:
        raise ResourceError(unwritten(root, folder, error)) from error


def _keep(root: Path, keep: RetentionPolicy) -> None:
    best_folder = best(root) if keep.best else None
    if best_folder is not None:
        replace_text(root / BEST_FILE, best_folder.name + "\n")
    else:
        (root / BEST_FILE).unlink(missing_ok=True)  # the checkpoint it named may be removed now
    folders = complete(root)
    for folder in folders:
        if folder not in (*folders[-keep.newest :], best_folder):
            _remove(folder)


def _remove(folder: Path) -> None:
    """Remove a checkpoint, its manifest first, so that no partial folder looks complete."""
    if folder.exists():
        (folder / MANIFEST_FILE).unlink(missing_ok=True)
        shutil.rmtree(folder)


def _await_files(partial: Path, rank: str, shard: Shard) -> None:
    until = time.monotonic() + SEEN_SECONDS
    for file, entry in shard.files.items():
        path = partial / file
        while not (path.exists() and path.stat().st_size == entry["num_bytes"]):
            if time.monotonic() > until:
                raise ConfigError(
                    f"{rank} has written {path}, which {socket.gethostname()} does not see: "
                    f"hydra.run.dir = {partial.parent.parent} must be shared by all machines"
                )
            time.sleep(POLL_SECONDS)
