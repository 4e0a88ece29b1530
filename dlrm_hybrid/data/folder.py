"""The output folder of prepare: made under another name and a lock, renamed when complete."""

from __future__ import annotations

import errno
import os
import re
import secrets
import shutil
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path

from dlrm_hybrid.data import manifest
from dlrm_hybrid.data.manifest import (
    MANIFEST_FILE,
    UNFINISHED_FILE,
    VOCABULARY_FOLDER,
    Manifest,
    Semantics,
    SourceFile,
)
from dlrm_hybrid.data.preprocessing import Preprocessing
from dlrm_hybrid.disk import HeldError, append, flush, locked, read_text
from dlrm_hybrid.types import DataError, ResourceError

QUARANTINE_FILE = "bad_rows.txt"
RUNS_FILE = "runs.txt"  # the folders of runs trained on these rows, one a line
MOST_RUNS_BYTES = 1 << 20
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_OWN = re.compile(
    r"(label|dense|weight|group|ids(\.[0-9]+\.(values|offsets|weights))?|vectors\.[0-9]+(\.ids)?)"
    rf"\.npy|{VOCABULARY_FOLDER}|"
    + "|".join(map(re.escape, (MANIFEST_FILE, UNFINISHED_FILE, QUARANTINE_FILE, RUNS_FILE)))
)
_MOST_COPIES = 16
Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Generated:
    """A raw file that is generated when it is needed.

    Attributes:
        name: name of the file; it determines the bytes inside.
    """

    name: str
    write: Callable[[Path], None]


Raw = Sequence[Path] | Generated


@dataclass(frozen=True, slots=True, kw_only=True)
class PrepareOptions:
    """Options of prepare: the meaning of the rows, and the threads and memory to use.

    Attributes:
        max_bad_rows: bad rows to leave out at most, unless each is an error.
        processes: number of threads that parse, number the categories and write shards.
        block_bytes: bytes of text parsed at a time.
        overwrite: whether to replace an output that was prepared differently.
        advice: what the user can do about such an output; ends the error message.
        base: earlier rows whose vocabularies and scales to use; None for new ones.
        grows: whether categories that the base lacks get rows behind its own.
    """

    semantics: Semantics
    max_bad_rows: int
    processes: int
    block_bytes: int
    overwrite: bool
    advice: str
    base: Preprocessing | None = None
    grows: bool = True

    def base_fault(self, prepared: Manifest) -> str | None:
        """The difference between the bases of prepared rows and of these options, if any."""
        base, prepared_base = self.base, prepared.base
        if base is None:
            return "it has vocabularies of an earlier run (data.base)" if prepared_base else None
        if prepared_base and prepared_base.fits(base.manifest.meaning_xxh3, self.grows):
            return None
        base_rows = (base.manifest.identity, base.manifest.meaning)
        if base_rows == (prepared.identity, prepared.meaning):  # the base was made from these rows
            return None
        return (
            f"its vocabularies are not on those of {base.folder}, data.grow = {self.grows} "
            "(data.base)"
        )


@dataclass(frozen=True, slots=True)
class Stale:
    """An existing output of prepare that is not what was asked for, with the reason."""

    reason: str


@dataclass(frozen=True, slots=True)
class Partial:
    """Work folder `<output>.partial`, locked; `spill` is for temporary files between stages."""

    folder: Path
    output: Path
    result: Path
    spill: Path

    def publish(self) -> None:
        """Rename the result to the output, in place of an older one; DataError if that is taken."""
        flush(self.result)
        replaced = self.folder / "replaced"
        try:
            if (self.output / MANIFEST_FILE).exists():
                self.output.rename(replaced)
            self.result.rename(self.output)
        except OSError as error:
            if replaced.exists():
                replaced.rename(self.output)
            raise DataError(f"{self.output}: cannot be renamed into place: {error}") from error
        flush(self.output.parent)


def current(
    output: Path, raw: Raw | None, options: PrepareOptions, say: Say
) -> Manifest | Stale | None:
    """Look for an up-to-date output: its manifest, `Stale` with the reason, or None without one.

    Args:
        raw: files that it must have been made from; None accepts any.
        say: called before a raw file is read in full.

    Raises:
        DataError: the output is stale and `overwrite` is not set; or it holds files that prepare
            did not write; or a raw file cannot be read.
    """
    if not output.exists() or (output.is_dir() and not any(output.iterdir())):
        return None
    _refuse_foreign(output)
    existing = _read(output, raw, options, say)
    if isinstance(existing, Stale):
        if runs := trained_on(output):
            existing = Stale(
                f"{existing.reason}; {_some(runs)} learned from these rows: without them a run "
                "predicts and is exported, but is not evaluated on them or resumed"
            )
        if not options.overwrite:
            raise DataError(f"{existing.reason}; {options.advice}")
    return existing


def trained_on(output: Path) -> list[str]:
    """The folders of runs that were trained on these prepared rows and still exist."""
    try:
        lines = read_text(output, RUNS_FILE, MOST_RUNS_BYTES).splitlines()
    except DataError:
        return []
    return [line for line in dict.fromkeys(lines) if Path(line).is_dir()]


def note_run(output: Path, run: Path) -> None:
    """Add a run to the list of those trained on these prepared rows, if it can be written."""
    path = str(run.absolute())
    if not path.isprintable() or path in trained_on(output):
        return
    flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
    with suppress(OSError):
        descriptor = os.open(output / RUNS_FILE, flags, 0o666)
        try:
            append(descriptor, f"{path}\n".encode())
        finally:
            os.close(descriptor)


def _read(output: Path, raw: Raw | None, options: PrepareOptions, say: Say) -> Manifest | Stale:
    try:
        prepared = manifest.read(output)
    except DataError as error:
        return Stale(str(error))
    differences = prepared.semantics.differences(options.semantics)
    sources = prepared.sources
    if raw is not None:
        differences += [fault] if (fault := options.base_fault(prepared)) else []
        differences += _other_vectors(prepared)
        names = [source.stamp.name for source in sources]
        raw_names = [raw.name] if isinstance(raw, Generated) else [path.name for path in raw]
        if names != raw_names:
            differences.append(
                f"it contains the rows of {_some(names)}, not those of {_some(raw_names)}"
            )
    if not differences and raw is not None and not isinstance(raw, Generated):
        updates = [_checked(*pair, say) for pair in zip(raw, sources, strict=True)]
        sources = tuple(source for source in updates if source is not None)
        differences = [
            f"{path} has changed since it was prepared (data.raw)"
            for path, source in zip(raw, updates, strict=True)
            if source is None
        ]
    if differences:
        return Stale(f"{output} was prepared differently: {'; '.join(differences)}")
    if fault := manifest.size_fault(output, prepared):
        return Stale(f"{fault}: the folder is damaged")
    return prepared if sources == prepared.sources else _remember(output, prepared, sources)


def _other_vectors(prepared: Manifest) -> Iterator[str]:
    """Files of vectors that have changed; those that are gone are no longer needed."""
    for file in prepared.vectors:
        key = f"categorical[{file.column}].vectors"
        path = Path(prepared.schema.categorical[file.column].vectors or "")
        if not path.exists():
            continue
        if manifest.stamp(path, key).content != file.stamp.content:
            yield f"{path} has changed since it was prepared ({key}, data.schema)"


def _refuse_foreign(output: Path) -> None:
    advice = "choose another folder (data.prepared)"
    if not output.is_dir():
        raise DataError(f"{output}: is not a folder; {advice}")
    if not (output / MANIFEST_FILE).is_file():
        raise DataError(
            f"{output} was not made by prepare: it contains files, but no {MANIFEST_FILE}; {advice}"
        )
    foreign = sorted(path.name for path in output.iterdir() if not _OWN.fullmatch(path.name))
    if foreign:
        raise DataError(f"{output}: holds {foreign[0]!a}, which prepare did not write; {advice}")


def _some(names: Sequence[str]) -> str:
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(names[:3]) + more


def _checked(path: Path, source: SourceFile, say: Say) -> SourceFile | None:
    """The source with the file's stamp among its copies; None if its bytes have changed."""
    now, before = manifest.stamp(path), source.stamp
    if now in (before, *source.copies):
        return source
    if now.content != before.content:
        return None
    # Copied or touched, or changed between the sampled pieces.
    say(f"{path}: copied or touched since it was prepared; comparing its whole content")
    if manifest.file_xxh3(path) != source.xxh3:
        return None
    return replace(source, copies=(now, *source.copies)[:_MOST_COPIES])


def look_like(raw: Sequence[Path], sources: Sequence[SourceFile]) -> bool:
    """Whether raw files look like those that rows were prepared from: by name, size and sample.

    Missing files are recognised by their names alone.
    """
    if [path.name for path in raw] != [source.stamp.name for source in sources]:
        return False
    pairs = zip(raw, sources, strict=True)
    return all(
        manifest.stamp(path).content == source.stamp.content
        for path, source in pairs
        if path.exists()
    )


def _remember(output: Path, before: Manifest, sources: Sequence[SourceFile]) -> Manifest:
    """The manifest with new stamps, saved if possible; else the next call compares files again."""
    updated = replace(before, sources=tuple(sources))
    with suppress(HeldError, DataError, OSError), locked(_lock(Path(os.path.realpath(output)))):
        if manifest.read(output) == before:  # the rows have not been replaced meanwhile
            manifest.write(output, updated)
    return updated


def _lock(output: Path) -> Path:
    return output.with_name(f"{output.name}.lock")


@contextmanager
def partial(output: Path, say: Say) -> Generator[Partial, None, None]:
    """Make a locked work folder beside `output`, in place of one left by a killed run.

    Args:
        output: the folder to make; a link is followed.
        say: called with the holder of the lock before waiting for it.

    Raises:
        ResourceError: the folder cannot be made.
    """
    user_path = output
    output = Path(os.path.realpath(output))
    folder = output.with_name(f"{output.name}.partial")

    def waiting(holder: str) -> None:
        say(f"{user_path}: {holder} is preparing these rows; waiting for it")

    with ExitStack() as stack:
        try:
            output.parent.mkdir(parents=True, exist_ok=True)
            stack.enter_context(locked(_lock(output), waiting))
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir()
        except OSError as error:
            raise ResourceError(f"{folder} cannot be made: {error} (data.prepared)") from error
        stack.callback(shutil.rmtree, folder, ignore_errors=True)
        # New names each time, so that no dying worker of an earlier run writes into them.
        token = secrets.token_hex(4)
        result, spill = folder / f"result-{token}", folder / f"spill-{token}"
        result.mkdir()
        spill.mkdir()
        yield Partial(folder, output, result, spill)


def check_space(folder: Path, needed_bytes: int) -> None:
    """Raise ResourceError if the disk of a folder has fewer bytes free than needed."""
    free_bytes = shutil.disk_usage(folder).free
    if free_bytes < needed_bytes:
        raise ResourceError(
            f"{folder}: prepare needs about {needed_bytes:,} bytes of disk, {free_bytes:,} are "
            "free (data.prepared)"
        )


@contextmanager
def disk_errors(output: Path) -> Generator[None, None, None]:
    """Turn an OSError into a `ResourceError` that names the key."""
    try:
        yield
    except OSError as error:
        reason = "no room left on the disk" if error.errno in _NO_ROOM else "the disk refuses"
        raise ResourceError(f"{output}: {reason}: {error} (data.prepared)") from error
