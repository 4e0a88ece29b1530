"""Feeds made-up input to the program: nothing wrong is taken, nothing crashes, nothing takes much.

    python scripts/faults/fuzz.py --rows 1000000 --frames 1000000 --configurations 10000 --seed 0
    python scripts/faults/fuzz.py --commands 300 --seed 1

Raw rows are compared with a plain reading of the format, frames must be refused or be the message
they are, configurations must compose to what can be built or be refused with their keys; `commands`
are configurations given to the program itself. Prints a Markdown table; the exit code is 1 if
something was not as it must be.
"""

from __future__ import annotations

import argparse
import sys
import time

import fuzz_config
import fuzz_frames
import fuzz_rows

from dlrm_hybrid.report.table import MISSING, Table

KINDS = {
    "rows": fuzz_rows.fuzz,
    "frames": fuzz_frames.fuzz,
    "configurations": fuzz_config.fuzz,
    "commands": fuzz_config.fuzz_command,
}
SHOWN_FAULTS = 20


def main() -> None:
    """Feed what is asked for, print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for kind in KINDS:
        parser.add_argument(f"--{kind}", type=int, default=0, help="how many")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    rows: list[list[str]] = []
    failed = False
    for kind, fuzz in KINDS.items():
        times: int = getattr(options, kind)
        if not times:
            continue
        start = time.perf_counter()
        told = fuzz(times, options.seed)
        rate = told.tried / (time.perf_counter() - start)
        failed |= bool(told.faults)
        for fault in told.faults[:SHOWN_FAULTS]:
            print(fault, file=sys.stderr)
        rows.append(
            [
                kind,
                str(options.seed),
                f"{told.tried:,}",
                f"{told.accepted:,}",
                f"{rate:,.0f}" if rate >= 10 else f"{rate:.1f}",
                told.remark or MISSING,
                str(len(told.faults)),
            ]
        )
    columns = ("input", "seed", "tried", "taken", "per second", "most memory", "faults")
    print(Table(columns, rows, "lrrrrlr").markdown(), end="")
    sys.exit(failed)


if __name__ == "__main__":
    main()
