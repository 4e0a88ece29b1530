"""Folders of checkpoints, and how they are found; free of torch, for the supervisor.

checkpoints/.step_00001024.0.partial/            attempt 0's, while ranks write; then renamed
checkpoints/step_00001024/dense.server-0.safetensors …   one file per rank and group of tensors
checkpoints/step_00001024/preprocessing/         schema, vocabularies and scales
checkpoints/step_00001024/manifest.json          step, files and their tensors, facts
checkpoints/latest                               name of the newest complete folder
checkpoints/best                                 name of the folder with the best score

files/000003-day8/checkpoints/…                  of the run of a file, where a folder is followed
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

from dlrm_hybrid.checkpoint.manifest import (
    MANIFEST_FILE,
    PREFIX,
    Manifest,
    Score,
    folder_name,
    is_folder_name,
    read_manifest,
)
from dlrm_hybrid.disk import RUN_FOLDER_KEY, read_text
from dlrm_hybrid.types import DataError

LATEST_FILE = "latest"
BEST_FILE = "best"
SCORE = "score"
POINTER_BYTES = 100  # most bytes of `latest` and `best`
NEEDED = ("progress", "config", "config_hash", "rows")
PARTIAL = ".partial"
CHECKPOINTS = "checkpoints"
FILES = "files"  # if there is no CHECKPOINTS: a run for each file, in order of name


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class RetentionPolicy:
    """Which complete checkpoints are kept: so many of the newest, and the best, if it is wanted."""

    newest: int
    best: bool


def lost_latest(run_folder: Path) -> str | None:
    """A warning if a run's `latest` names no checkpoint, so that another is used; else None."""
    root = run_folder / CHECKPOINTS
    if not complete(root) or pointed(root / LATEST_FILE) is not None:
        return None
    return (
        f"{root / LATEST_FILE}: does not name a complete checkpoint; "
        f"using the newest, {find(root).name}"
    )


def has_checkpoint(run_folder: Path) -> bool:
    """Whether a run has saved a checkpoint yet."""
    root = run_folder / CHECKPOINTS
    return (root / LATEST_FILE).is_file() or bool(complete(root))


def find(path: Path) -> Path:
    """Resolve `path` to a checkpoint folder: itself, or the latest of a run folder.

    The files `latest` and `best` stand for the checkpoint that they name. If `latest` is missing or
    names none that exists, the newest checkpoint with a valid manifest is taken. In a folder with a
    run for each file it is the checkpoint of the newest run that has one.

    Raises:
        DataError: there is none; the message lists those that exist.
    """
    if (path / MANIFEST_FILE).is_file():
        return path
    if path.name == BEST_FILE and path.is_file():
        named = pointed(path)
        if named is None:
            raise DataError(f"{path}: does not name a checkpoint beside it")
        return named
    root = _root(_newest_run(path))
    latest = pointed(root / LATEST_FILE)
    return _newest(path, root) if latest is None else latest


def find_best(path: Path) -> Path:
    """Resolve `path` to the checkpoint folder to score rows with.

    For a run folder the best one, if evaluations have found one; else, and in errors, as `find`.
    """
    named = (pointed(root / BEST_FILE) for root in (path, path / CHECKPOINTS))
    return next((folder for folder in named if folder is not None), None) or find(path)


def best_score(root: Path) -> tuple[int, Score] | None:
    """Step and score of the checkpoint that `best` names; None if there is none, or damaged."""
    folder = pointed(root / BEST_FILE)
    if folder is None:
        return None
    try:
        manifest = read(folder)
    except DataError:  # reported where it is used
        return None
    score = manifest.score
    return None if score is None else (manifest.step, score)


def shown(folder: Path, step: int) -> str:
    """A line that tells the user which checkpoint of a run folder was chosen."""
    root, line = folder.parent, f"checkpoint {folder}, step {step:,}"
    latest, best = pointed(root / LATEST_FILE), best_score(root)
    if latest is None or best is None or step_of(latest) == best[0]:
        return line
    best_step, score = best
    if folder == latest:
        return f"{line}, the latest; {root / BEST_FILE} is step {best_step:,}: {score.text}"
    if step != best_step:
        return line
    return f"{line}, the best: {score.text}; {root / LATEST_FILE} is step {step_of(latest):,}"


def _newest_run(path: Path) -> Path:
    """The folder itself, or the newest run of a file in it that has a checkpoint."""
    runs = sorted((path / FILES).glob(f"*/{CHECKPOINTS}"))
    return next((root.parent for root in reversed(runs) if complete(root)), path)


def _root(path: Path) -> Path:
    """The folder of all checkpoints: `path`, or that of the run or `latest` file it names."""
    if path.name == LATEST_FILE and not path.is_dir():
        return path.parent
    is_root = (path / LATEST_FILE).is_file() or complete(path)
    return path if is_root else path / CHECKPOINTS


def _newest(path: Path, root: Path) -> Path:
    faults: list[str] = []
    for folder in reversed(complete(root)):
        try:
            read(folder)
        except DataError as error:
            faults.append(f"\n  {error}")
        else:
            return folder
    if faults:
        raise DataError(f"{path}: no usable checkpoint here{''.join(faults)}")
    folders = sorted(str(manifest.parent) for manifest in path.glob(f"**/{MANIFEST_FILE}"))
    hint = f"found {', '.join(folders)}" if folders else "name the folder of a run or checkpoint"
    raise DataError(f"{path}: no checkpoint found (no {LATEST_FILE}); {hint}")


def pointed(pointer: Path) -> Path | None:
    """The checkpoint that `latest` or `best` names; None if there is none of that name."""
    try:
        title = read_text(pointer.parent, pointer.name, POINTER_BYTES).strip()
    except DataError:
        return None
    folder = pointer.parent / title
    return folder if is_folder_name(title) and _is_complete(folder) else None


def _is_complete(folder: Path) -> bool:
    return (folder / MANIFEST_FILE).exists() and not folder.is_symlink()


def partial_folder(root: Path, step: int, attempt: int) -> Path:
    """The folder in which the ranks of an attempt write a step's checkpoint."""
    return root / f".{folder_name(step)}.{attempt}{PARTIAL}"


def partial_folders(root: Path) -> list[Path]:
    """All folders of uncommitted checkpoints."""
    return list(root.glob(f".{PREFIX}*{PARTIAL}"))


def key_of(name: str, begin: Sequence[int], is_full: bool) -> str:
    """Key of a tensor's piece in its file."""
    return name if is_full else f"{name}@{'x'.join(map(str, begin))}"


def unwritten(root: Path, path: Path, error: OSError, place: str | None = None) -> str:
    """The message for a checkpoint that the disk or its permissions refuse.

    Args:
        place: the setting that says where it lies; None for that of a run.
    """
    cause = error.strerror or str(error)
    place = place or f"{RUN_FOLDER_KEY} = {root.parent}; checkpoints before it are intact"
    return f"{error.filename or path}: the checkpoint cannot be written: {cause} ({place})"


def complete(root: Path) -> list[Path]:
    """The complete checkpoints in a run's `checkpoints` folder, oldest first.

    Links and copies under other names do not count.
    """
    folders = [folder for folder in root.glob(f"{PREFIX}*") if is_folder_name(folder.name)]
    return sorted(filter(_is_complete, folders), key=step_of)


def later(path: Path) -> list[Path]:
    """The complete checkpoints after the one that this path resolves to, in the same folder.

    Raises:
        DataError: as `find`.
    """
    start = find(path)
    return [x for x in complete(start.parent) if step_of(x) > step_of(start)]


def step_of(folder: Path) -> int:
    """The step in the name of a checkpoint's folder; names may differ in digits."""
    return int(folder.name.removeprefix(PREFIX))


def best(root: Path) -> Path | None:
    """The complete checkpoint with the best score, the newest of equals.

    After a change of `train.monitor` or of the scored part within a run, only those with the
    newest checkpoint's kind of score count.
    """
    first: Path | None = None
    most: Score | None = None
    for folder in reversed(complete(root)):
        with suppress(DataError):  # a damaged one cannot be the best
            score = read(folder).score
            if score is None or (most and (score.part, score.monitor) != (most.part, most.monitor)):
                continue
            if most is None or score.gain(most.value) > 0:
                first, most = folder, score
    return first


def instead_of(folder: Path) -> str:
    """The end of a message about a damaged checkpoint: what to do instead."""
    if not is_folder_name(folder.name):
        return ""
    older = [x for x in complete(folder.parent) if step_of(x) < step_of(folder)]
    return f"; to resume from the one before, {older[-1]}, remove {folder}" if older else ""


def saved_step(path: Path | None) -> int:
    """The step at which a run resumes from this run folder or checkpoint; 0 for None.

    Raises:
        DataError: as `find` and `read`.
    """
    return 0 if path is None else read(find(path)).step


def read(folder: Path) -> Manifest:
    """Read the manifest of a checkpoint; raises DataError as `read_manifest`."""
    return read_manifest(folder, instead_of(folder))


def read_facts(folder: Path) -> Mapping[str, Any]:
    """The values of a manifest: `step` and the facts given to `commit`.

    Raises:
        DataError: as `read`, or facts are missing that a run needs to resume.
    """
    values = read(folder).values
    missing = [key for key in NEEDED if values.get(key) is None]
    if missing:
        raise DataError(
            f"{folder / MANIFEST_FILE}: does not say {', '.join(missing)}{instead_of(folder)}"
        )
    return values
