"""Where checkpoints lie and what they say about themselves; free of torch, for the supervisor.

checkpoints/.step_00001024.0.partial/            of attempt 0, while ranks write; then renamed
checkpoints/step_00001024/dense.server-0.safetensors …   one file per rank and group of tensors
checkpoints/step_00001024/manifest.json          step, files, which of them has what, facts
checkpoints/latest                               the name of the newest complete folder
checkpoints/best                                 of the one with the lowest loss on the test part
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

import xxhash

from dlrm_hybrid.types import DataError

FORMAT = 2
MANIFEST_FILE = "manifest.json"
LATEST_FILE = "latest"
BEST_FILE = "best"
SEAL = ', "xxh3": "'
TEST_LOSS = "test_loss"
PREFIX = "step_"
PARTIAL = ".partial"
CHECKPOINTS = "checkpoints"


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Keeping:
    """Which complete checkpoints stay.

    Attributes:
        newest: so many.
        best: besides, of those that were evaluated, the one with the lowest loss.
    """

    newest: int
    best: bool


def has_latest(run_folder: Path) -> bool:
    """Whether a run has saved anything yet."""
    return (run_folder / CHECKPOINTS / LATEST_FILE).is_file()


def find(path: Path) -> Path:
    """The checkpoint folder that `path` means: itself, or the latest of a run folder.

    If somebody has removed that one, the newest that is there. The files `latest` and `best` mean
    what they name.

    Raises:
        DataError: there is none; the message lists the ones that exist.
    """
    if (path / MANIFEST_FILE).is_file():
        return path
    if path.name in (LATEST_FILE, BEST_FILE) and path.is_file():
        return path.parent / path.read_text(encoding="utf-8", errors="replace").strip()
    root = path if (path / LATEST_FILE).is_file() else path / CHECKPOINTS
    try:
        latest = root / (root / LATEST_FILE).read_text(encoding="ascii").strip()
    except (OSError, ValueError):
        found = sorted(str(manifest.parent) for manifest in path.glob(f"**/{MANIFEST_FILE}"))
        hint = f"; there are {', '.join(found)}" if found else ""
        raise DataError(f"{path}: no checkpoint here (no {LATEST_FILE}){hint}") from None
    found = complete(root)
    return found[-1] if found and not latest.is_dir() else latest


def name(step: int) -> str:
    """Of the folder of a step."""
    return f"{PREFIX}{step:08d}"


def partial_folder(root: Path, step: int, attempt: int) -> Path:
    """Where the ranks of an attempt write the checkpoint of a step; none of another finds it."""
    return root / f".{name(step)}.{attempt}{PARTIAL}"


def partial_folders(root: Path) -> list[Path]:
    """All that have not become checkpoints."""
    return list(root.glob(f".{PREFIX}*{PARTIAL}"))


def key_of(name: str, begin: Sequence[int], is_whole: bool) -> str:
    """What a piece of a tensor is called in its file."""
    return name if is_whole else f"{name}@{'x'.join(map(str, begin))}"


def unwritten(root: Path, path: Path, error: OSError) -> str:
    """Says which file of a checkpoint there is no room for, or no right."""
    cause = error.strerror or str(error)
    return (
        f"{error.filename or path}: the checkpoint cannot be written: {cause} "
        f"(hydra.run.dir = {root.parent}; checkpoints before it are intact)"
    )


def complete(root: Path) -> list[Path]:
    """The complete checkpoints below the `checkpoints` folder of a run, oldest first."""
    found = [path.parent for path in root.glob(f"{PREFIX}*/{MANIFEST_FILE}")]
    return sorted(found, key=lambda folder: int(folder.name.removeprefix(PREFIX)))


def best(root: Path) -> Path | None:
    """The complete checkpoint with the lowest loss on the test part, the newest of equals."""
    losses: dict[Path, float] = {}
    for folder in reversed(complete(root)):
        with suppress(DataError):  # a damaged one is not the best
            loss: float | None = read_facts(folder).get(TEST_LOSS)
            if loss is not None:
                losses[folder] = loss
    return min(losses, key=lambda folder: losses[folder]) if losses else None


def instead_of(folder: Path) -> str:
    """What to do where this checkpoint is damaged, as the end of a message."""
    if not folder.name.startswith(PREFIX) or not folder.parent.is_dir():
        return ""
    older = [one for one in complete(folder.parent) if one.name < folder.name]
    if not older:
        return ""
    return f"; the one before it is {older[-1]}: to go on from there remove {folder}"


def saved_step(path: Path | None) -> int:
    """The step after which a run goes on from this run folder or checkpoint; 0 without one.

    Raises:
        DataError: as `find` and `read_facts`.
    """
    return 0 if path is None else read_facts(find(path))["step"]


def manifest_text(facts: Mapping[str, Any]) -> str:
    """A manifest that says these facts; its last one is the checksum of all before it."""
    text = json.dumps({"format": FORMAT, **facts})[:-1]
    return f'{text}{SEAL}{_digest(text)}"}}'


def read_facts(folder: Path) -> dict[str, Any]:
    """The manifest of a checkpoint: `step`, `files`, `tensors` and the facts given to `commit`.

    Raises:
        DataError: it is missing, changed or not one of ours.
    """
    path = folder / MANIFEST_FILE
    try:
        text = path.read_text(encoding="utf-8")
        manifest: dict[str, Any] = json.loads(text)
        if manifest["format"] != FORMAT:
            raise DataError(
                f"{path}: a checkpoint of format {manifest['format']}; this version of the program "
                f"reads format {FORMAT} only"
            )
        body, _, seal = text.rpartition(SEAL)
        if seal != f'{_digest(body)}"}}':
            raise DataError(f"{path}: changed since it was written{instead_of(folder)}")
        del manifest["xxh3"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DataError(f"{path}: not a checkpoint: {error!r}{instead_of(folder)}") from error
    return manifest


def _digest(text: str) -> str:
    return xxhash.xxh3_128(text.encode()).hexdigest()
