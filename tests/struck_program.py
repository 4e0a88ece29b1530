"""The program as a command, of whose ranks some suffer the faults that are planned for its run.

Its first argument names the entry of ranks that a supervisor starts. Those of a launcher, whose run
folder may have no name yet, look for their faults beside the folder that FAULTS names, if it does.
"""

import os
import sys
from pathlib import Path

import world_faults

from dlrm_hybrid.cli.main import run
from dlrm_hybrid.run import training
from dlrm_hybrid.run.launch import member
from dlrm_hybrid.run.rank.main import run_rank
from dlrm_hybrid.run.request import TrainTask

FAULTS = "FAULTS"
STRUCK = [__file__, world_faults.ENTRY]


def struck_launched_rank(task: TrainTask, *rest) -> None:
    """Be a rank that a launcher has started, with the fault planned for it."""
    world_faults.await_fault(Path(os.environ.get(FAULTS, task.run_folder)), task.rank)
    run_rank(task, *rest)


if __name__ == "__main__":
    training.TRAIN_RANK = sys.argv.pop(1)
    member.run_rank = struck_launched_rank
    sys.exit(run(sys.argv))
