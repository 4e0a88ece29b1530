"""Folders that appear under their name only when they are complete."""

from __future__ import annotations

import os
import shutil
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

from dlrm_hybrid.config.validate import faults_text
from dlrm_hybrid.disk import flush, writing
from dlrm_hybrid.run.folder import one_user
from dlrm_hybrid.types import ConfigError


@contextmanager
def new_folder(target: Path, key: str) -> Generator[Path, None, None]:
    """Make a folder atomically: yields a folder to write to, renamed to `target` at the end.

    A killed process leaves a hidden folder beside it, which the next one removes.

    Raises:
        ConfigError: something exists there, or another process is making it.
        ResourceError: it cannot be written.
    """
    if not target.name:
        raise ConfigError(faults_text([f"{key} = {target}: not the name of a new folder"]))
    with writing(target, key):
        target.parent.mkdir(parents=True, exist_ok=True)
    with one_user(target.with_name(f".{target.name}.lock"), key, target):
        if os.path.lexists(target):
            raise ConfigError(faults_text([f"{key} = {target}: exists; name a new folder"]))
        partial = target.with_name(f".{target.name}.partial")
        try:
            with writing(target, key):
                shutil.rmtree(partial, ignore_errors=True)
                partial.mkdir()
            yield partial
            with writing(target, key):
                for path in (*partial.rglob("*"), partial):
                    flush(path)
                partial.rename(target)
                flush(target.parent)
        finally:
            shutil.rmtree(partial, ignore_errors=True)
