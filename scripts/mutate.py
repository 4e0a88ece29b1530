"""Plants one-line faults in a copy of the package, and checks that the tests named for them fail.

    python scripts/mutate.py
    python scripts/mutate.py --only sidco
    python scripts/mutate.py --sample 5 --seed 3
    python scripts/mutate.py --only dgc --tests tests/compress/gradient/test_gradient_laws.py

Prints a Markdown table; exit code 1 if a fault survives its tests, or if the text that it replaces
is not in its file exactly once.
"""

from __future__ import annotations

import argparse
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import yaml

from dlrm_hybrid.report.table import Table
from dlrm_hybrid.rng import fold

REPOSITORY = Path(__file__).parents[1]
TIMEOUT_SECONDS = 600
FAILED = 1  # exit code of pytest when a test fails


@dataclass(frozen=True, slots=True)
class Fault:
    """One wrong line, or a few that make sense together only.

    Attributes:
        what: the behaviour that it breaks.
        file: of the package.
        old: text that is there once.
        new: what it becomes.
        tests: arguments of pytest; at least one of these tests must fail.
    """

    what: str
    file: str
    old: str
    new: str
    tests: str


def read_faults() -> list[Fault]:
    """All faults, as mutations.yaml has them."""
    text = Path(__file__).with_name("mutations.yaml").read_text(encoding="utf-8")
    return [Fault(file=file, **one) for file, own in yaml.safe_load(text).items() for one in own]


def main() -> None:
    """Plant the faults that were asked for, one after the other."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", help="faults of which the text or the file contains this")
    parser.add_argument("--sample", type=int, metavar="N", help="so many of them, drawn by --seed")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--tests", help="arguments of pytest instead of those beside the faults")
    options = parser.parse_args()
    chosen = _chosen(options.only, options.sample, options.seed)
    misplaced = [fault for fault in chosen if not is_placed(fault)]
    for fault in misplaced:
        print(f"{fault.file}: not there, or more than once: {fault.old!r}", file=sys.stderr)
    if misplaced:
        sys.exit(1)
    survivors = 0
    rows: list[tuple[str, ...]] = []
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder)
        _copy_repository(copy)
        for fault in chosen:
            since = time.monotonic()
            with _planted(fault, copy / fault.file):
                outcome = _outcome(copy, shlex.split(options.tests or fault.tests))
            survivors += outcome != "killed"
            seconds = f"{time.monotonic() - since:.0f}"
            rows.append((fault.what, Path(fault.file).name, outcome, seconds))
            print(f"{outcome} ({seconds} s): {fault.what}", file=sys.stderr, flush=True)
    print(Table(("fault", "file", "outcome", "seconds"), rows, "lllr").markdown())
    print(f"\n{len(chosen) - survivors} faults killed, {survivors} not")
    sys.exit(survivors > 0)


def _chosen(only: str | None, sample: int | None, seed: int) -> Sequence[Fault]:
    found = read_faults()
    if only is not None:
        found = [one for one in found if only.lower() in (one.what + one.file).lower()]
    if sample is not None:
        found = sorted(found, key=lambda one: fold(seed, "mutate", one.what))[:sample]
    return found


def is_placed(fault: Fault) -> bool:
    """Whether the text that a fault replaces is where it should be, once."""
    path = REPOSITORY / fault.file
    return path.is_file() and path.read_text(encoding="utf-8").count(fault.old) == 1


def _copy_repository(copy: Path) -> None:
    """Everything that git knows or would add."""
    command = ("git", "ls-files", "-z", "--cached", "--others", "--exclude-standard")
    listed = subprocess.run(command, cwd=REPOSITORY, capture_output=True, check=True).stdout
    for name in listed.decode().split("\0"):
        if name and (REPOSITORY / name).is_file():
            (copy / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(REPOSITORY / name, copy / name)


@contextmanager
def _planted(fault: Fault, path: Path) -> Generator[None, None, None]:
    right = path.read_text(encoding="utf-8")
    path.write_text(right.replace(fault.old, fault.new), encoding="utf-8")
    try:
        yield
    finally:
        path.write_text(right, encoding="utf-8")


def _outcome(copy: Path, tests: list[str]) -> str:
    """Of pytest in the copy: `killed`, `SURVIVED`, or why neither can be said."""
    # Two versions of a file within a second would share their bytecode.
    environ = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1", "PYTHONPATH": str(copy)}
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *tests]
    try:
        done = subprocess.run(
            command,
            cwd=copy,
            env=environ,
            timeout=TIMEOUT_SECONDS,
            capture_output=True,
            text=True,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return "killed"  # the fault makes it hang
    if done.returncode == FAILED:
        return "killed"
    if done.returncode == 0:
        return "SURVIVED"
    return f"NOT RUN: {done.stdout.strip().splitlines()[-1:]}"


if __name__ == "__main__":
    main()
