"""Kills a run that follows a folder, at random moments; compares with an undisturbed one.

    python scripts/faults/kill_following.py FOLDER --kills 30 --seed 0
    python scripts/faults/kill_following.py FOLDER --kills 30 --files 6 --rows 3000 parallel=hybrid

Files appear while it runs, each written beside its place and renamed. The program is killed with
kill -9 and started again with the same command until all files are learned, and again in a new
folder until there were so many kills. Rows of one table, which is full, change hands. Prints a
Markdown table; exit code 1 if a file was learned twice or not at all, or weights or scores are
others. Overrides go to every run.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from fault_runs import HANG_SECONDS, POLL_SECONDS, alive, arguments, digest, wait_gone

from dlrm_hybrid.checkpoint.folder import FILES
from dlrm_hybrid.disk import read_object
from dlrm_hybrid.report.table import Table
from dlrm_hybrid.rng import fold
from dlrm_hybrid.telemetry.summary import COMPLETE

sys.path.append(str(Path(__file__).parents[1] / "rows"))
from drifting import Log, write

GONE_SECONDS = 60.0
MOST_CHANGES = 8  # of the place, from a start of the program to its end
MOST_SECONDS = 0.3  # after the last of these
SHARE = 0.02  # of the polls bring another file
GIVEN = (
    *("data=table", "model=dlrm_small", "train.batch_size=64", "checkpoint.every=5"),
    *("telemetry.tensorboard=false", "data.processes=1", "checkpoint.keep=1000"),
)


@dataclass(frozen=True, slots=True)
class Followed:
    """A run that follows an inbox of its own.

    Attributes:
        folder: of the run; its inbox is beside it.
        log: folder of the files to come.
        files: their number.
        overrides: more of them.
    """

    folder: Path
    log: Path
    files: int
    overrides: Sequence[str]

    @property
    def inbox(self) -> Path:
        """The folder that it follows."""
        return self.folder.with_name(f"{self.folder.name}-inbox")

    def start(self) -> subprocess.Popen[bytes]:
        """Start the program, or start it again."""
        command = [sys.executable, "-m", "dlrm_hybrid", "train", *GIVEN, *self.overrides]
        command += [f"data.schema={self.log}/day1.yaml", f"data.follow={self.inbox}"]
        command += [f"data.follow_files={self.files}", f"hydra.run.dir={self.folder}"]
        with self.folder.with_suffix(".txt").open("ab") as output:
            return subprocess.Popen(command, stdout=output, stderr=output, start_new_session=True)

    def bring(self, number: int) -> None:
        """Let a file appear, if it has not."""
        self.inbox.mkdir(parents=True, exist_ok=True)
        name = f"day{number}.parquet"
        if not (self.inbox / name).exists():
            shutil.copy(self.log / name, self.inbox / f"{name}.tmp")
            (self.inbox / f"{name}.tmp").rename(self.inbox / name)

    def place(self) -> str:
        """What the program is at: the file, and how far it is."""
        runs = sorted((self.folder / FILES).glob("*"))
        if not runs:
            return "no file"
        steps = sorted((runs[-1] / "checkpoints").glob("step_*"))
        if (runs[-1] / "summary.json").exists():
            return f"after file {len(runs)}"
        if not (runs[-1] / "config.json").exists():
            return f"preparing file {len(runs)}"
        return f"file {len(runs)}, {steps[-1].name if steps else 'before a checkpoint'}"

    def result(self) -> list[tuple[str, Any, str]]:
        """Name, scores and weights of each file."""
        found: list[tuple[str, Any, str]] = []
        for one in read_object(self.folder, "summary.json")["files"]:
            run = self.folder / one["run"]
            whole = read_object(run, "summary.json")
            assert whole["status"] == COMPLETE, run
            scores = {key: one[key] for key in one if key not in ("stamp", "run")}
            found.append((one["file"], json.dumps(scores), digest(run, whole["steps"])))
        return found

    def evicted(self) -> int:
        """How many rows of the table of items changed hands."""
        runs = (read_object(one, "summary.json") for one in (self.folder / FILES).glob("*"))
        return sum(run["growth"]["item"]["evicted"] for run in runs if run["growth"])

    def ranks(self) -> list[int]:
        """Process ids of all ranks that there were."""
        texts = [path.read_text() for path in self.folder.glob(f"{FILES}/*/log/*.pid")]
        return [int(text) for text in texts if text]  # killed before it had written it: empty


def main() -> None:
    """Make the runs, print the table."""
    parser = arguments(__doc__, kills=6, files=4, rows=3000, seed=0)
    options, overrides = parser.parse_known_args()
    log = options.folder / "log"
    write(Log(rows=options.rows, days=options.files, new=0.1), log)
    schema = (log / "day1.yaml").read_text()
    full = schema.replace("{name: item,", "{name: item, max_rows: 20, evict: rarest,")
    (log / "day1.yaml").write_text(full)
    whole = Followed(options.folder / "whole", log, options.files, overrides)
    for number in range(1, options.files + 1):
        whole.bring(number)
    if whole.start().wait():
        raise SystemExit(f"{whole.folder}: the run that nobody has harmed failed")
    expected = whole.result()
    if not whole.evicted():
        raise SystemExit(f"{whole.folder}: no row changed hands")
    draw = np.random.default_rng(fold(options.seed, "following"))
    kills, rows = 0, list[list[str]]()
    while kills < options.kills:
        folder = options.folder / f"killed-{options.seed}-{len(rows)}"
        broken = Followed(folder, log, options.files, overrides)
        places, fault = _harmed(broken, draw, options.kills - kills)
        kills += len(places)
        if not fault and broken.result() != expected:
            fault = "other files, scores or weights"
        rows.append([str(len(rows)), "; ".join(places), fault or "equal"])
        print("|".join(rows[-1]), file=sys.stderr)
    print(Table(("run", "killed in", "files, scores and weights"), rows, "rll").markdown())
    print(f"{kills} kills, {options.files} files each")
    sys.exit(any(row[-1] != "equal" for row in rows))


def _harmed(broken: Followed, draw: np.random.Generator, most: int) -> tuple[list[str], str]:
    """Kill the program until it has learned all; returns where, and what must not happen."""
    places: list[str] = []
    brought = 0
    while True:
        process, since = broken.start(), broken.place()
        changes = int(draw.integers(MOST_CHANGES)) if len(places) < most else sys.maxsize
        until = time.monotonic() + HANG_SECONDS
        while process.poll() is None and changes > 0:
            if brought < broken.files and (not brought or draw.random() < SHARE):
                brought += 1
                broken.bring(brought)
            time.sleep(POLL_SECONDS)
            place = broken.place()
            if place != since:
                since, changes, until = place, changes - 1, time.monotonic() + HANG_SECONDS
            if time.monotonic() > until:
                process.kill()
                return places, f"nothing has happened: {place}"
        time.sleep(draw.uniform(0, MOST_SECONDS))
        if process.poll() is not None:
            return places, f"exit code {process.returncode}" if process.returncode else ""
        places.append(broken.place())
        process.kill()
        process.wait()
        if left := wait_gone(broken.ranks(), GONE_SECONDS):
            return places, f"left: {[one for one in left if alive(one)]}"


if __name__ == "__main__":
    main()
