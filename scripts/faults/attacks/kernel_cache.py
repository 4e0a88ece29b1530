"""Attacks on the cache of compiled kernels: damaged, foreign, full, in a bad place."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

from .base import SMALL, Attack, Ended, expect, program, start, wait

# The smallest run there is: it needs few kernels.
RUN = ("train", *SMALL, "train.steps=3", "checkpoint.minutes=0")


def _environ(folder: Path) -> dict[str, str]:
    return {"XDG_CACHE_HOME": str(folder / "cache"), "NUMBA_CACHE_DIR": ""}


def _files(folder: Path) -> list[Path]:
    return sorted(folder.glob("cache/dlrm_hybrid/kernels-*/*.nb?"))


def _told(ended: Ended, folder: Path) -> str:
    """What the program has said, and the ranks of its newest run."""
    run = max(folder.glob("runs/*/*"))
    logs = [path.read_text(encoding="utf-8") for path in sorted(run.glob("log/*.log"))]
    return "".join((ended.output, ended.errors, *logs))


def _cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:1000])


def _flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 0xFF
    path.write_bytes(content)


def _damaged_files(damage: Callable[[Path], None], folder: Path) -> str:
    """Every file is harmed: the next run says so of each that it needs, and mends them."""
    first = program(RUN, folder, _environ(folder))
    expect(first.code == 0, f"exit code {first.code}: {first.errors}")
    files = _files(folder)
    expect(bool(files), "nothing was kept")
    for path in files:
        damage(path)
    second = program(RUN, folder, _environ(folder))
    expect(second.code == 0, f"exit code {second.code}: {second.errors}")
    mended = _told(second, folder).count("compiled again")
    expect(mended > 0, f"{len(files)} harmed, none told")  # rows are ready: it needs not all
    third = program(RUN, folder, _environ(folder))
    expect(third.code == 0, f"exit code {third.code}: {third.errors}")
    expect("compiled again" not in _told(third, folder), "not mended")
    return f"{len(files)} files harmed, {mended} kernels needed, told and mended"


def _bad_place(environ: dict[str, str], folder: Path) -> str:
    """The home folder cannot be used: the run says which folder it takes instead."""
    own = {"NUMBA_CACHE_DIR": "", "XDG_CACHE_HOME": "", "TMPDIR": str(folder)}
    ended = program(RUN, folder, {**own, **environ})
    expect(ended.code == 0, f"exit code {ended.code}: {ended.errors}")
    told = {line for line in _told(ended, folder).splitlines() if "kernels are kept in" in line}
    expect(len(told) == 1, ended.output)
    return told.pop()


def _writable_by_others(folder: Path) -> str:
    expect(program(RUN, folder, _environ(folder)).code == 0, "the first run failed")
    _files(folder)[0].parent.chmod(0o777)
    ended = program(RUN, folder, _environ(folder) | {"TMPDIR": str(folder)})
    expect(ended.code == 0, f"exit code {ended.code}: {ended.errors}")
    expect("may be written by others" in _told(ended, folder), ended.output)
    return "not used, and said"


def _two_at_once(folder: Path) -> str:
    """Both start with an empty folder of kernels, and take turns in compiling."""
    places = [folder / name for name in ("one", "two")]
    for place in places:
        place.mkdir()
    rows = f"data.prepared={folder / 'rows'}"
    expect(program(("prepare", *SMALL, rows), folder, None).code == 0, "no rows")
    both = [start((*RUN, rows), place, _environ(folder)) for place in places]
    for running, place in zip(both, places, strict=True):
        ended = wait(running, place)
        expect(ended.code == 0, f"exit code {ended.code}: {ended.errors}")
        expect("compiled again" not in _told(ended, place), "a file was half written")
    return f"{len(_files(folder)) // 2} kernels kept, none damaged"


ATTACKS = (
    *(
        Attack(f"kernels-{name}", "a line each, compiled again", partial(_damaged_files, damage))
        for name, damage in (("cut", _cut), ("flipped", _flip))
    ),
    Attack(
        "kernels-home-not-writable",
        "the temporary folder is used and named",
        partial(_bad_place, {"HOME": "/proc/nobody"}),
    ),
    Attack(
        "kernels-home-is-a-file",
        "the temporary folder is used and named",
        partial(_bad_place, {"HOME": "/dev/null"}),
    ),
    Attack("kernels-writable-by-others", "not used, and said", _writable_by_others),
    Attack("kernels-two-at-once", "both train, no file is damaged", _two_at_once),
)
