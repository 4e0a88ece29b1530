"""A process that prepares and halts at a stage, so that a test can kill it there.

Arguments: raw file, output folder, threads, stage to halt in. At the first progress of that stage
with something on the disk it writes a line and waits for one.
"""

from __future__ import annotations

import sys
from pathlib import Path

from dlrm_hybrid.data.folder import PrepareOptions
from dlrm_hybrid.data.manifest import Semantics
from dlrm_hybrid.data.prepare import prepare
from dlrm_hybrid.data.schemas.reading import builtin
from dlrm_hybrid.types import DlrmError


def main() -> int:
    raw, output, threads, halt_in = sys.argv[1:]
    halted = False

    def progress(stage: str, done: int, total: int | None) -> None:
        nonlocal halted
        spilled = Path(f"{output}.partial").rglob("spill-*/1.bin")
        if stage == halt_in and not halted and any(path.stat().st_size for path in spilled):
            halted = True
            sys.stdout.write("halted\n")
            sys.stdout.flush()
            sys.stdin.readline()

    semantics = Semantics(
        days=7,
        day_split="equal_rows",
        vocabulary="all_days",
        min_count=2,
        max_ind_range=0,
        on_bad_row="error",
        schema=builtin("criteo_kaggle"),
    )
    options = PrepareOptions(
        semantics=semantics,
        max_bad_rows=0,
        processes=int(threads),
        block_bytes=20_000,
        overwrite=False,
        advice="",
    )
    try:
        prepare([Path(raw)], Path(output), options, progress, print)
    except DlrmError as error:
        sys.stderr.write(f"{error}\n")
        return int(error.exit_code)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
