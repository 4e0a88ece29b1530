"""A forkserver whose imports fail: what ranks need is installed, but does not load."""

import os
import subprocess
import sys
from pathlib import Path


def test_what_cannot_be_imported_ends_the_run_and_is_named(tmp_path: Path) -> None:
    """It is no loss: another forkserver would fail in the same way."""
    (tmp_path / "broken.py").write_text("raise OSError('cannot load x.so')\n", "utf-8")
    program = (
        "import os\n"
        "from pathlib import Path\n"
        "import test_supervisor as t\n"
        "os.dup2 = None  # a program that starts ranks keeps the descriptors it has\n"
        "from dlrm_hybrid.run.supervisor import ensure_forkserver\n"
        "ensure_forkserver(['broken'])\n"
        f"ranks = t.ranks(Path({str(tmp_path)!r}), '3')\n"
        "end = t.run_ranks(ranks, 'test_supervisor:tells_its_pid', lambda event: None)\n"
        "print(end.exit_code, end.lost, end.message)\n"
    )
    path = [str(tmp_path), *map(str, Path(__file__).parents[:2]), os.environ.get("PYTHONPATH", "")]
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "PYTHONPATH": ":".join(path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stderr == ""
    start = "1 None ranks cannot be started: OSError: cannot load x.so; see "
    assert done.stdout.startswith(start)
