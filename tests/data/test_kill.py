from __future__ import annotations

import os
import signal
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
from criteo_rows import everything, make_lines, run_prepare
from forked import exit_code_of

Progress = Callable[[str, int, int | None], None]


@pytest.fixture(scope="module")
def raw(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("raw") / "train.txt"
    path.write_bytes(b"".join(make_lines(3_000, seed=1)))
    return path


@pytest.fixture(scope="module")
def made(raw: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What nobody has disturbed."""
    output = tmp_path_factory.mktemp("made") / "out"
    run_prepare(raw, output, min_count=2)
    return output


def struck_in(wanted: str, output: Path, strike: Callable[[], None]) -> Progress:
    """Strikes at the first progress of a stage with something on the disk."""

    def progress(stage: str, done: int, total: int | None) -> None:
        spilled = Path(f"{output}.partial").rglob("spill-*/1.bin")
        if stage == wanted and any(path.stat().st_size for path in spilled):
            strike()

    return progress


@pytest.mark.parametrize("stage", ["parse", "vocabulary", "assemble"])
def test_killed_and_started_again_gives_the_same_bytes(
    tmp_path: Path, raw: Path, made: Path, stage: str
) -> None:
    output = tmp_path / "out"
    killed = struck_in(stage, output, lambda: os.kill(os.getpid(), signal.SIGKILL))
    begin = partial(run_prepare, raw, output, min_count=2, processes=2, block_bytes=20_000)
    assert exit_code_of(lambda: begin(progress=killed)) == -signal.SIGKILL
    assert not output.exists()
    left = [path.stat().st_size for path in (tmp_path / "out.partial").rglob("spill-*/1.bin")]
    assert left[0] > 0, "the kill came before anything was written"
    assert not run_prepare(raw, output, min_count=2).up_to_date
    assert everything(output) == everything(made)
    assert not (tmp_path / "out.partial").exists()
