"""Attacks the program in every way that it claims to withstand, and prints the outcomes.

    python scripts/faults/attack.py FOLDER
    python scripts/faults/attack.py FOLDER --only unknown-key
    python scripts/faults/attack.py FOLDER --areas arguments data

Each attack gets an empty folder below FOLDER. Prints a Markdown table; exit code 1 if one of them
was not withstood.
"""

from __future__ import annotations

import argparse
import pkgutil
import signal
import sys
import time
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

import attacks
from attacks.base import Attack, BrokenError, NotHereError

from dlrm_hybrid.report.table import Table


def main() -> None:
    """Run the attacks that were asked for."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path, help="for all attacks; it is not removed")
    parser.add_argument("--areas", nargs="+", choices=_areas(), default=_areas())
    parser.add_argument("--only", nargs="+", help="names of attacks")
    options = parser.parse_args()
    # A shell lets what it starts in the background ignore Ctrl-C, and all that this starts too.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    rows: list[tuple[str, ...]] = []
    broken = not_run = 0
    for area, one in _chosen(options.areas, options.only):
        folder = options.folder.absolute() / one.name
        folder.mkdir(parents=True)
        since = time.monotonic()
        try:
            seen = one.run(folder)
        except NotHereError as error:
            not_run += 1
            seen = f"not run: {error}"
        except BrokenError as error:
            broken += 1
            seen = f"**BROKEN** {error}"
        seconds = f"{time.monotonic() - since:.1f}"
        rows.append((area, one.name, one.expected, " ".join(seen.split())[:160], seconds))
        print(f"{one.name} ({seconds} s): {seen}", file=sys.stderr, flush=True)
    print(Table(("area", "attack", "expected", "seen", "seconds"), rows, "llllr").markdown())
    withstood = len(rows) - broken - not_run
    print(f"\n{withstood} attacks withstood, {broken} not, {not_run} not run here")
    sys.exit(broken > 0)


def _areas() -> list[str]:
    return [
        module.name for module in pkgutil.iter_modules(attacks.__path__) if module.name != "base"
    ]


def _chosen(areas: list[str], only: list[str] | None) -> Iterator[tuple[str, Attack]]:
    for area in areas:
        for one in import_module(f"attacks.{area}").ATTACKS:
            if only is None or one.name in only:
                yield area, one


if __name__ == "__main__":
    main()
