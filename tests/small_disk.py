"""A disk of a few kilobytes, and what fills it."""

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

needs_mount = pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to mount a small disk")
CHUNK_BYTES = 1 << 12


@contextmanager
def small_disk(folder: Path, kilobytes: int) -> Iterator[Path]:
    """The folder, made, with so much room and no more while the context lasts."""
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={kilobytes}k", "tmpfs", folder]
    done = subprocess.run(mount, capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"cannot mount a small disk: {done.stderr.strip()}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", folder], check=True)


def enlarge(folder: Path, kilobytes: int) -> None:
    """Give the disk more room."""
    options = f"remount,size={kilobytes}k"
    subprocess.run(["mount", "-o", options, folder], check=True)


def fill(folder: Path) -> None:
    """Leave no room at all."""
    with (folder / "filler").open("wb", buffering=0) as file:
        try:
            while True:
                file.write(bytes(CHUNK_BYTES))
        except OSError:
            return
