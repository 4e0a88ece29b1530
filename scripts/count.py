"""Counts lines and files by room, as Markdown: the package, conf/, tests/, scripts/.

python scripts/count.py            of the working tree
python scripts/count.py 2210fc2    and of a commit
"""

from __future__ import annotations

import argparse
import subprocess
from collections import Counter
from pathlib import Path, PurePosixPath

ROOMS = ("conf", "tests", "scripts")
SUFFIXES = {".py", ".pyi", ".yaml"}
OUTER = {
    *("compress", "config", "data", "export", "kernels", "plan"),
    *("predict", "report", "saved", "telemetry", "wire"),
}


def git(*arguments: str) -> str:
    """What a command of git prints."""
    return subprocess.run(["git", *arguments], check=True, capture_output=True, text=True).stdout


def room(path: PurePosixPath) -> str | None:
    """Where a file is counted; None for nowhere."""
    if path.suffix not in SUFFIXES or path.parts[0] not in ("dlrm_hybrid", *ROOMS):
        return None
    if path.parts[0] in ROOMS:
        return f"{path.parts[0]}/"
    return path.parts[1] if len(path.parts) > 2 else "beside the rooms"


def counted(commit: str | None) -> tuple[Counter[str], Counter[str]]:
    """Lines and files by room, of a commit or of the working tree."""
    listing = git("ls-tree", "-r", "--name-only", commit) if commit else git("ls-files")
    lines: Counter[str] = Counter()
    files: Counter[str] = Counter()
    for name in listing.splitlines():
        place = room(PurePosixPath(name))
        if place is None:
            continue
        try:
            text = git("show", f"{commit}:{name}") if commit else Path(name).read_text("utf-8")
        except FileNotFoundError:  # removed, not yet committed
            continue
        totals = [place] if place.endswith("/") else [place, "dlrm_hybrid/"]
        if place in OUTER:
            totals.append("outer rooms")
        for total in totals:
            lines[total] += text.count("\n")
            files[total] += 1
    return lines, files


def main() -> None:
    """Print a row for each room, with a pair of columns for each commit."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("commits", nargs="*", help="counted beside the working tree")
    states = [*parser.parse_args().commits, None]
    counts = [counted(state) for state in states]
    names = sorted({name for lines, _ in counts for name in lines}, key=_order)
    heads = [f"{state or 'now'}: lines | files" for state in states]
    print(f"| room | {' | '.join(heads)} |\n|---|{'--:|--:|' * len(states)}")
    for name in names:
        cells = " | ".join(f"{lines[name]:,} | {files[name]}" for lines, files in counts)
        print(f"| {name} | {cells} |")


def _order(name: str) -> tuple[int, str]:
    return (2 if name.endswith("/") else 1 if name == "outer rooms" else 0, name)


if __name__ == "__main__":
    main()
