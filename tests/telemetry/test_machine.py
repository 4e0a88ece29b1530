"""What a record says of the machine and the program."""

import subprocess
from pathlib import Path

from dlrm_hybrid.telemetry import machine


def test_the_commit_is_of_the_repository_that_has_this_program(tmp_path: Path) -> None:
    """And not of one in whose folder it is installed."""

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
