"""Makes a checkpoint valid whose files all ranks have written, and drops those not to be kept.

The manifest comes last into the folder, then the folder gets its name, then `latest` and `best`
move, then older ones go. Whenever this is cut short, `latest` names a complete checkpoint.
"""

from __future__ import annotations

import shutil
import socket
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

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
from dlrm_hybrid.checkpoint.manifest import MANIFEST_FILE, manifest_text, name
from dlrm_hybrid.checkpoint.two_phase import Preparing, Shard
from dlrm_hybrid.durable import flush, replace_text
from dlrm_hybrid.types import ConfigError, ResourceError

SEEN_SECONDS = 60.0  # file systems of a network may know of a new file so much later
POLL_SECONDS = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class Saved:
    """A checkpoint that is valid.

    Attributes:
        step: training steps done.
        folder: where it lies.
        num_bytes: of all its files.
        seconds: for which training stood still.
        background_seconds: from then until it was valid.
    """

    step: int
    folder: Path
    num_bytes: int
    seconds: float
    background_seconds: float


def clean(root: Path) -> None:
    """Remove what attempts have left that were cut short; none may be under way."""
    for folder in partial_folders(root):
        shutil.rmtree(folder, ignore_errors=True)


def commit(
    root: Path, attempt: int, prepared: Preparing, facts: Mapping[str, Any], keep: RetentionPolicy
) -> tuple[Path, int]:
    """Make it valid; its folder and the bytes of all files.

    Args:
        root: the `checkpoints` folder of the run.
        attempt: whose checkpoint it is.
        prepared: what the ranks have written.
        facts: whatever else a resumed run needs, as JSON values; under `test_loss` what the
            checkpoint is worth, None where it was not evaluated.
        keep: which checkpoints stay, this one included.

    Raises:
        ResourceError: the disk is full or not writable; older checkpoints are intact.
        ConfigError: a file cannot be seen here that another rank has written.
    """
    folder = root / name(prepared.step)
    partial = partial_folder(root, prepared.step, attempt)
    try:
        for rank, shard in prepared.shards.items():
            _await_files(partial, rank, shard)
        text = manifest_text({"step": prepared.step, **prepared.contents(), **facts})
        replace_text(partial / MANIFEST_FILE, text)
        # Of a life that was cut short before `latest` moved, or while it was being removed.
        _remove(folder)
        partial.rename(folder)
        flush(root)
        replace_text(root / LATEST_FILE, folder.name + "\n")
        for newer in complete(root):
            if step_of(newer) > prepared.step:
                _remove(newer)
        _keep(root, keep)
        return folder, sum(path.stat().st_size for path in folder.iterdir())
    except OSError as error:
        raise ResourceError(unwritten(root, folder, error)) from error


def amend(root: Path, step: int, facts: Mapping[str, Any], keep: RetentionPolicy) -> None:
    """Let the checkpoint of a step say other facts, if it is here; raises ResourceError."""
    folder = root / name(step)
    if not (folder / MANIFEST_FILE).exists():
        return  # the run began with a checkpoint of another
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
        (root / BEST_FILE).unlink(missing_ok=True)  # what it named may go now
    found = complete(root)
    for folder in found:
        if folder not in (*found[-keep.newest :], best_folder):
            _remove(folder)


def _remove(folder: Path) -> None:
    """The manifest first, so that no half folder looks whole."""
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
