"""What a record says of the machine and the program."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from dlrm_hybrid.telemetry import machine


@pytest.mark.skipif(shutil.which("git") is None, reason="needs git")
def test_the_commit_is_of_the_repository_that_has_this_program(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And not of one in whose folder it is installed."""

    for name in [name for name in os.environ if name.startswith("GIT_")]:
        monkeypatch.delenv(name)  # as of a hook of a real repository
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", os.devnull)
    monkeypatch.setenv("GIT_CONFIG_NOSYSTEM", "1")

    def git(*arguments: str) -> None:
        name = ("-c", "user.name=me", "-c", "user.email=me@example.org")
        subprocess.run(["git", "-C", tmp_path, *name, *arguments], check=True)

    git("init", "--quiet")
    file = tmp_path / Path(machine.__file__).name
    file.touch()
    git("commit", "--quiet", "--allow-empty", "--message=first")
    assert machine._git_sha.__wrapped__(tmp_path) is None
    git("add", file.name)
    git("commit", "--quiet", "--message=second")
    found = machine._git_sha.__wrapped__(tmp_path)
    assert found is not None and len(found) == 12
