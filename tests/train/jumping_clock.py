"""Ranks whose clock on the wall jumps by a day, back and forth; named by tests as an entry."""

import itertools
import json
import time
from pathlib import Path
from types import SimpleNamespace

from dlrm_hybrid.run.rank.main import train_rank
from dlrm_hybrid.train import driver
from dlrm_hybrid.train.signals import StopRequest

ENTRY = "jumping_clock:jumping_world_rank"
DAY_SECONDS = 86_400.0
JUMPS = (0.0, DAY_SECONDS, -DAY_SECONDS)


def jumping_world_rank(argument: str, report, stop: StopRequest) -> None:
    """Be a rank of a world; it writes down how often it was told a wrong time."""
    real, jumps, asked = time.time, itertools.cycle(JUMPS), itertools.count(1)
    task = json.loads(argument)
    note = Path(f"{task['run_folder']}.asked-{task['rank']}")

    def jumping() -> float:
        note.write_text(str(next(asked)))
        return real() + next(jumps)

    time.time = jumping
    train_rank(argument, report, stop)


def hasty_world_rank(argument: str, report, stop: StopRequest) -> None:
    """Be a rank of a world whose first worker's clock is a day further whenever it asks."""
    task = json.loads(argument)
    days = itertools.count()
    hasty = SimpleNamespace(**vars(time))
    if task["rank"] == 0:
        hasty.monotonic = lambda: time.monotonic() + DAY_SECONDS * next(days)
    driver.time = hasty
    train_rank(argument, report, stop)
